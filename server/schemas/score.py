"""Scores of text pairs, in vLLM's dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema

from penstock.engine.protocol.errors import InvalidRequestError

from ..dialects import VLLM, keys_ignored_by
from ..wire import json_schema
from ..wire.json_schema import documented
from .inputs import content_text, parse_text_or_texts
from .options import ListAnswer, PairBody

_PAIRS: Final = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


def parse_score_side(value: Any) -> list[str]:
    """Returns the texts of one side, where vLLM's objects `{"content": [...]}` may stand for texts, too."""
    return parse_text_or_texts([_content(entry) for entry in value] if isinstance(value, list) else _content(value))


def _content(entry: Any) -> Any:
    return content_text(entry["content"]) if isinstance(entry, dict) and "content" in entry else entry


ScoreSide = Annotated[list[str], PlainValidator(parse_score_side), WithJsonSchema(json_schema.SCORE_SIDE)]


class ScoreRequest(PairBody):
    """Body of POST /score: one pair of fields, 1 to 1, 1 to N or N to N."""

    model_config = documented(
        {"text_1": "What holds back the water?", "text_2": ["A gate.", "A song."]},
        {"queries": ["red", "blue"], "documents": ["a red door", "a blue door"]},
        one_of=(*_PAIRS,),
    )

    ignored_keys: ClassVar = keys_ignored_by(VLLM)

    text_1: ScoreSide | None = Field(None, description="Queries. Together with `text_2`.")
    text_2: ScoreSide | None = Field(None, description="Documents.")
    queries: ScoreSide | None = Field(None, description="Other name of `text_1`. Together with `documents` or `items`.")
    documents: ScoreSide | None = Field(None, description="Other name of `text_2`.")
    items: ScoreSide | None = Field(None, description="Other name of `text_2`.")
    data_1: ScoreSide | None = Field(None, description="Other name of `text_1`. Together with `data_2`.")
    data_2: ScoreSide | None = Field(None, description="Other name of `text_2`.")
    encoding_format: Literal["float"] | None = Field(
        None, description="Scores are numbers; vLLM's documentation shows it."
    )

    def field_names(self) -> Mapping[str, str]:
        """See JsonBody."""
        given = self._given()
        return dict(zip(_PAIRS[0], given[0], strict=True)) if len(given) == 1 else {}

    def sides(self) -> tuple[str, str]:
        """Returns the names of the fields of the two sides. Raises InvalidRequestError unless one pair is there."""
        given = self._given()
        if len(given) != 1:
            names = "; ".join(f"{a} and {b}" for a, b in _PAIRS)
            raise InvalidRequestError(f"Give exactly one of these pairs of fields: {names}.", param="text_1")
        return given[0]

    def _given(self) -> list[tuple[str, str]]:
        return [(a, b) for a, b in _PAIRS if getattr(self, a) and getattr(self, b)]


class ScoreRow(BaseModel):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(ListAnswer[ScoreRow]):
    """Answer of POST /score, in the order of the pairs."""
