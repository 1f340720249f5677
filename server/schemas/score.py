"""Scores of text pairs, in vLLM's dialect."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from penstock.engine.protocol.errors import InvalidRequestError

from ..wire import json_schema
from ..wire.json_schema import exactly_one
from .fields.common import Count, PairBody, Usage
from .fields.contents import content_text
from .fields.texts import parse_text_or_texts

_PAIRS: Final = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


def parse_score_side(value: Any) -> list[str]:
    """Returns the texts of one side, where vLLM's objects `{"content": [...]}` may stand for texts, too.

    Raises:
        ValueError: Anything else; the message names the entry.
    """
    return parse_text_or_texts([_content(entry) for entry in value] if isinstance(value, list) else _content(value))


def _content(entry: Any) -> Any:
    return content_text(entry["content"]) if isinstance(entry, dict) and "content" in entry else entry


ScoreSide = Annotated[list[str], PlainValidator(parse_score_side), WithJsonSchema(json_schema.SCORE_SIDE)]


class ScoreRequest(PairBody):
    """Body of POST /score: one pair of fields, 1 to 1, 1 to N or N to N."""

    model_config = ConfigDict(
        json_schema_extra={
            **exactly_one(*_PAIRS),
            "examples": [
                {"text_1": "What holds back the water?", "text_2": ["A gate.", "A song."]},
                {"queries": ["red", "blue"], "documents": ["a red door", "a blue door"]},
            ],
        }
    )

    text_1: ScoreSide | None = Field(None, description="Queries. Together with `text_2`.")
    text_2: ScoreSide | None = Field(None, description="Documents.")
    queries: ScoreSide | None = Field(None, description="Other name of `text_1`. Together with `documents` or `items`.")
    documents: ScoreSide | None = Field(None, description="Other name of `text_2`.")
    items: ScoreSide | None = Field(None, description="Other name of `text_2`.")
    data_1: ScoreSide | None = Field(None, description="Other name of `text_1`. Together with `data_2`.")
    data_2: ScoreSide | None = Field(None, description="Other name of `text_2`.")

    max_tokens_per_query: Count | None = Field(
        None, description="Tokens. Cut each query to this many first; 0 or absent: leave it whole."
    )
    max_tokens_per_doc: Count | None = Field(
        None, description="Tokens. Cut each document to this many first; 0 or absent: leave it whole."
    )

    def sides(self) -> tuple[str, str]:
        """Returns the names of the fields that hold the two sides.

        Raises:
            InvalidRequestError: Not exactly one pair of fields is there.
        """
        given = [(a, b) for a, b in _PAIRS if getattr(self, a) and getattr(self, b)]
        if len(given) != 1:
            names = "; ".join(f"{a} and {b}" for a, b in _PAIRS)
            raise InvalidRequestError(f"Give exactly one of these pairs of fields: {names}.", param="text_1")
        return given[0]


class ScoreRow(BaseModel):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(BaseModel):
    """Answer of POST /score, in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreRow]
    usage: Usage
