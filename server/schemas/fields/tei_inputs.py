"""Forms of the inputs that TEI alone takes; what is none of them is a ValueError that names the entry."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BeforeValidator, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from ...wire import json_schema
from .options import Listed
from .texts import Inputs, check_length, whole_numbers

TextOrList = TypeVar("TextOrList", bound=str | list[Any])
EMPTY_TEXT: Final = "empty_text"
"""Type of the error of an empty text."""


class Sequences(NamedTuple):
    """What is to be classified.

    Attributes:
        entries: One text or two for each.
        is_batch: Sent as a list of them; False for a single one.
    """

    entries: list[list[str]]
    is_batch: bool


def parse_sequences(value: Any) -> Sequences:
    """Returns the texts and pairs of TEI's `inputs`: a text, a pair [text, text], or a list of [text] and pairs."""
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list) or not entries:
        raise ValueError("must be a text, a pair [text, text], or a list of [text] and [text, text], and not empty")
    if isinstance(entries[0], str):
        if len(entries) > 2:
            raise ValueError(
                f"is a flat list of {len(entries)}; a flat list is a text or a pair. "
                "Send several as [[text], [text], ...]"
            )
        sequences = Sequences([_sequence(entries, 0)], is_batch=False)
    else:
        sequences = Sequences([_sequence(entry, i) for i, entry in enumerate(entries)], is_batch=True)
    refuse_empty(["".join(entry) for entry in sequences.entries])
    return sequences


def refuse_empty(value: TextOrList) -> TextOrList:
    """Returns a text, or a list of texts and token ids, as it is; an empty one in it is TEI's error of its own."""
    if value == "" or (not isinstance(value, str) and "" in value):
        where = "" if isinstance(value, str) else f" in entry {value.index('')}"
        raise PydanticCustomError(EMPTY_TEXT, "holds an empty text{where}; send some text", {"where": where})
    return value


def _sequence(entry: Any, index: int) -> list[str]:
    if not isinstance(entry, list) or len(entry) not in (1, 2) or not all(isinstance(text, str) for text in entry):
        raise ValueError(f"must hold [text] or pairs [text, text]; entry {index} is neither")
    return entry


def lower_case(value: Any) -> Any:
    """Returns a text in lower case: clients say both `Left` and `left`."""
    return value.lower() if isinstance(value, str) else value


FullInputs = Annotated[Inputs, AfterValidator(refuse_empty), WithJsonSchema(json_schema.FULL_INPUTS)]
FullText = Annotated[str, AfterValidator(refuse_empty), WithJsonSchema(json_schema.FULL_STRING)]
FullTexts = Annotated[Listed[Annotated[str, WithJsonSchema(json_schema.FULL_STRING)]], AfterValidator(refuse_empty)]
SequenceInputs = Annotated[Sequences, PlainValidator(parse_sequences), WithJsonSchema(json_schema.SEQUENCES)]
TruncationSide = Annotated[
    Literal["left", "right"],
    BeforeValidator(lower_case),
    WithJsonSchema({"type": "string", "pattern": "^([Ll]eft|[Rr]ight)$"}),
]


def parse_batches(value: Any) -> list[list[int]]:
    """Returns the lists of token ids of `ids`, which may be one list."""
    batches = [value] if isinstance(value, list) and value and not isinstance(value[0], list) else value
    if not isinstance(batches, list) or not batches:
        raise ValueError("must be a list of token ids, or a list of such lists, and not empty")
    check_length(batches)
    batches = [whole_numbers(ids) if isinstance(ids, list) else ids for ids in batches]
    for i, ids in enumerate(batches):
        if not isinstance(ids, list) or set(map(type, ids)) != {int}:
            raise ValueError(f"must hold token ids or lists of them; list {i} does not, or is empty")
    return batches


IdBatches = Annotated[list[list[int]], PlainValidator(parse_batches), WithJsonSchema(json_schema.ID_BATCHES)]
