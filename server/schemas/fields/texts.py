"""Texts and token ids in bodies, in the forms that several dialects send.

Every parser raises ValueError for anything else than it returns; the message names the entry.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, PlainValidator, WithJsonSchema

from ...wire import json_schema

Text = str | list[int]
MAX_ENTRIES: Final = 1_000_000
"""Texts or lists of ids in a body, or ids in a list, whatever the settings say."""


def parse_inputs(value: Any) -> list[Text]:
    """Returns one entry per input for the four forms of OpenAI's `input`: str, [str], [int] and [[int]].

    A flat list of ids is one input. Texts, Jina's objects `{"text": ...}` and lists of ids may be mixed in one list.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(f"must be a text, a list of texts or token ids, not {_kind(value)}")
    if not value:
        raise ValueError("is an empty list; give at least one text")
    check_length(value)
    kinds = set(map(type, value))
    if kinds == {str}:
        return value
    if float in kinds:
        value = whole_numbers(value)
        kinds = set(map(type, value))
    if kinds == {int}:
        return [_checked_ids(value)]
    if (dict in kinds or list in kinds) and kinds <= {str, dict, list}:
        value = [whole_numbers(entry) if type(entry) is list else parse_text(entry) for entry in value]
    inputs: list[Text] = value
    for i, entry in enumerate(value):
        if type(entry) is list and set(map(type, entry)) == {int}:
            _checked_ids(entry)
        elif type(entry) is not str:
            raise ValueError(
                f'must hold texts, objects {{"text": ...}} or lists of token ids; entry {i} is {_kind(entry)}'
            )
    return inputs


def check_length(values: list[Any]) -> None:
    """Raises ValueError for a list that takes seconds to be looked at, during which nobody else is served."""
    if len(values) > MAX_ENTRIES:
        raise ValueError(f"has {len(values)} entries; no request may have more than {MAX_ENTRIES}")


def _checked_ids(ids: list[int]) -> list[int]:
    lowest, highest = min(ids), max(ids)
    if lowest < -json_schema.MAX_INTEGER or highest > json_schema.MAX_INTEGER:
        raise ValueError("holds a number that is out of range: no model has such a token id")
    if lowest < 0:
        raise ValueError(f"holds the token id {lowest}, which is out of vocabulary: ids count from 0")
    return ids


def whole_numbers(values: list[Any]) -> list[Any]:
    """Returns a list with the integers that are written as 5.0, which JSON does not tell from 5."""
    if float not in set(map(type, values)):
        return values
    return [int(value) if type(value) is float and value.is_integer() else value for value in values]


def parse_token_ids(value: Any) -> list[int]:
    """Returns the ids of one list, which may be empty; millions are looked at in no time."""
    if not isinstance(value, list):
        raise ValueError(f"must be a list of token ids, not {_kind(value)}")
    check_length(value)
    value = whole_numbers(value)
    if value and set(map(type, value)) != {int}:
        i, odd = next((i, entry) for i, entry in enumerate(value) if type(entry) is not int)
        raise ValueError(f"must hold token ids, whole numbers; entry {i} is {_kind(odd)}")
    return _checked_ids(value) if value else []


def parse_some_token_ids(value: Any) -> list[int]:
    """Returns the ids of one list, which may not be empty."""
    ids = parse_token_ids(value)
    if not ids:
        raise ValueError("is an empty list, []; give at least one token id")
    return ids


def parse_text(value: Any) -> Any:
    """Returns the text of `{"text": ...}`; anything else is left to the check for a string."""
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        return value["text"]
    return value


def parse_texts(value: Any) -> list[str]:
    """Returns the texts of a list whose entries are strings or `{"text": ...}`."""
    if not isinstance(value, list):
        raise ValueError(f"must be a list of texts, not {_kind(value)}")
    if not value:
        raise ValueError("is an empty list; give at least one text")
    check_length(value)
    texts = value if set(map(type, value)) == {str} else [parse_text(entry) for entry in value]
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f'must hold texts or objects {{"text": ...}}; entry {i} is {_kind(text)}')
    return texts


def parse_text_or_texts(value: Any) -> list[str]:
    """Returns the texts of a text, `{"text": ...}`, or a list of them."""
    text = parse_text(value)
    return [text] if isinstance(text, str) else parse_texts(value)


def _kind(value: Any) -> str:
    """Names a JSON value for a message: its kind, and the value itself where it is short."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        if not value:
            return "an empty list"
        odd = next((entry for entry in value if type(entry) is not int), value[0])
        return f"a list that holds {'a list' if isinstance(odd, list) else _kind(odd)}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)[:60]


Inputs = Annotated[list[Text], PlainValidator(parse_inputs), WithJsonSchema(json_schema.INPUTS)]
TokenIds = Annotated[list[int], PlainValidator(parse_token_ids), WithJsonSchema(json_schema.ANY_TOKEN_IDS)]
SomeTokenIds = Annotated[list[int], PlainValidator(parse_some_token_ids), WithJsonSchema(json_schema.TOKEN_IDS)]
TextOrObject = Annotated[str, BeforeValidator(parse_text), WithJsonSchema(json_schema.TEXT)]
Texts = Annotated[list[str], PlainValidator(parse_texts), WithJsonSchema(json_schema.TEXTS)]
TextOrTexts = Annotated[list[str], PlainValidator(parse_text_or_texts), WithJsonSchema(json_schema.TEXT_OR_TEXTS)]
