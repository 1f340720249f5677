"""Scores of text pairs, in vLLM's dialect."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from penstock.engine.errors import InvalidRequestError

from .common import PairBody, Usage, parse_text, parse_texts

_PAIRS: Final = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


def parse_side(value: Any) -> list[str]:
    """Returns the texts of one side: a text, `{"text": ...}`, or a list of them.

    Raises:
        ValueError: Anything else; the message names the entry.
    """
    text = parse_text(value)
    return [text] if isinstance(text, str) else parse_texts(value)


_TEXT_SCHEMA: Final = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
Side = Annotated[list[str], PlainValidator(parse_side), WithJsonSchema(_TEXT_SCHEMA)]


class ScoreRequest(PairBody):
    """Body of POST /score: one pair of fields, 1 to 1, 1 to N or N to N."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": list(pair)} for pair in _PAIRS],
            "examples": [
                {"text_1": "What holds back the water?", "text_2": ["A gate.", "A song."]},
                {"queries": ["red", "blue"], "documents": ["a red door", "a blue door"]},
            ],
        }
    )

    text_1: Side | None = Field(None, description="Queries. Together with `text_2`.")
    text_2: Side | None = Field(None, description="Documents.")
    queries: Side | None = Field(None, description="Other name of `text_1`. Together with `documents` or `items`.")
    documents: Side | None = Field(None, description="Other name of `text_2`.")
    items: Side | None = Field(None, description="Other name of `text_2`.")
    data_1: Side | None = Field(None, description="Other name of `text_1`. Together with `data_2`.")
    data_2: Side | None = Field(None, description="Other name of `text_2`.")

    def sides(self) -> tuple[list[str], list[str]]:
        """Returns the texts of both sides.

        Raises:
            InvalidRequestError: Not exactly one pair of fields is there.
        """
        given = [(getattr(self, a), getattr(self, b)) for a, b in _PAIRS if getattr(self, a) and getattr(self, b)]
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
