"""Parsers of texts, token ids and documents in request bodies, for the forms of all dialects.

Every parser raises ValueError for other forms. The message names the entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

import orjson
from pydantic import AfterValidator, BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from penstock.engine.protocol.errors import InvalidRequestError

from ..errors import EMPTY_TEXT, quote, quote_names
from . import json_schema
from .images import (
    INPUT_KEYS,
    Image,
    ImageSource,
    parse_content,
    parse_image,
    parse_image_object,
    parse_image_part,
)
from .json_schema import Parsed
from .options import FailFastList

Text = str | list[int]
Input = Text | Image
MAX_RANK_FIELDS: Final = 64
"""Names of fields to rank. Each is looked up in each document."""
MAX_ENTRIES: Final = 1_000_000
"""Maximum number of texts or id lists in a body, and of ids in a list. No setting changes it."""


def parse_texts_or_ids(value: Any) -> list[Text]:
    """Returns one entry per input for the four forms of OpenAI's `input`: str, [str], [int] and [[int]].

    A flat list of ids is one input. Texts, objects `{"text": ...}` and lists of ids may be mixed in one list.
    """
    inputs: list[Text] = []
    for i, entry in enumerate(parse_inputs(value)):
        if isinstance(entry, Image):
            raise ValueError(f"must hold texts or lists of token ids; entry {i} is an image")
        inputs.append(entry)
    return inputs


def parse_inputs(value: Any) -> list[Input]:
    """Like `parse_texts_or_ids`, but entries may also be images.

    An image is Jina's object `{"image": ...}`, a content part, `{"content": [...]}` of OpenRouter, or a list of content
    parts of Dify.
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
    if dict in kinds or list in kinds:
        value = [_parse_entry(entry, i) if isinstance(entry, dict | list) else entry for i, entry in enumerate(value)]
    inputs: list[Input] = value
    for i, entry in enumerate(value):
        if type(entry) is list and set(map(type, entry)) == {int}:
            _checked_ids(entry)
        elif not isinstance(entry, str | Image):
            raise ValueError(
                'must hold texts, objects {"text": ...} or {"image": ...}, or lists of token ids; '
                f"entry {i} is {_kind(entry)}"
            )
    return inputs


_OTHER_MEDIA: Final = ("audio", "audio_url", "input_audio", "video", "video_url")


def _parse_entry(entry: dict[str, Any] | list[Any], index: int) -> Any:
    if isinstance(entry, dict):
        if media := [key for key in _OTHER_MEDIA if entry.get(key) is not None]:
            raise ValueError(f"holds {media[0]} in entry {index}; penstock reads texts and images only")
        return parse_text_or_image(entry, f"[{index}]", INPUT_KEYS)
    if entry and isinstance(entry[0], dict):
        return _entry_content(entry, f"[{index}]", index)
    return whole_numbers(entry)


def check_length(values: list[Any]) -> None:
    """Raises ValueError if the list is too long: checking its entries would block the event loop for seconds."""
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
    """Returns the list with floats such as 5.0 as integers: JSON does not distinguish 5.0 from 5."""
    if float not in set(map(type, values)):
        return values
    return [int(value) if type(value) is float and value.is_integer() else value for value in values]


def parse_token_ids(value: Any) -> list[int]:
    """Returns the ids of one list, which may be empty. The check is fast for millions of ids."""
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
    """Returns the text of `{"text": ...}`. Other values are returned unchanged; pydantic then checks for a string."""
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        return value["text"]
    return value


def parse_text_or_image(value: Any, path: str, image_keys: Sequence[str] = ("image",)) -> Any:
    """Returns the text or the image of an object. Other values are returned unchanged.

    The object is `{"text": ...}`, `{"image": ...}`, a content part, or `{"content": ...}` with a text or content parts.
    """
    if not isinstance(value, dict):
        return value
    image = parse_image_object(value, path, image_keys) or parse_image_part(value, path)
    if image is not None:
        return image
    text = parse_text(value)
    return parse_content(value["content"], f"{path}.content") if text is value and "content" in value else text


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
    """Returns the texts of a text, `{"text": ...}`, or a list of both."""
    text = parse_text(value)
    return [text] if isinstance(text, str) else parse_texts(value)


def _kind(value: Any) -> str:
    """Describes a JSON value for an error message: its type, and the value if it is short."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        if not value:
            return "an empty list"
        odd = next((entry for entry in value if type(entry) is not int), value[0])
        return f"a list that holds {'a list' if isinstance(odd, list) else _kind(odd)}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)[:60]


Inputs = Annotated[list[Input], Parsed(parse_inputs, json_schema.INPUTS)]
TextsOrIds = Annotated[list[Text], Parsed(parse_texts_or_ids, json_schema.NON_EMPTY_INPUTS)]
TokenIds = Annotated[list[int], Parsed(parse_token_ids, json_schema.ANY_TOKEN_IDS)]
SomeTokenIds = Annotated[list[int], Parsed(parse_some_token_ids, json_schema.TOKEN_IDS)]
TextOrObject = Annotated[str, BeforeValidator(parse_text), WithJsonSchema(json_schema.TEXT)]
Texts = Annotated[list[str], Parsed(parse_texts, json_schema.TEXTS)]
TextOrTexts = Annotated[list[str], Parsed(parse_text_or_texts, json_schema.TEXT_OR_TEXTS)]


Document = str | dict[str, Any]


def parse_contents(value: Any) -> list[str | Image]:
    """Returns the text or image of each entry of a list of objects with `content`."""
    if not isinstance(value, list) or not value:
        raise ValueError('must be a list of objects {"content": [...]} and not empty; texts takes plain texts')
    contents = (entry.get("content") if isinstance(entry, dict) else None for entry in value)
    return [_entry_content(content, f"[{i}].content", i) for i, content in enumerate(contents)]


def parse_images(value: Any) -> list[ImageSource]:
    """Returns the images of a list of data URIs, base64 or URLs, which may be empty."""
    if not isinstance(value, list):
        raise ValueError(f"must be a list of images as data URIs, not {_kind(value)}")
    return [parse_image(entry, f"[{i}]") for i, entry in enumerate(value)]


def _entry_content(content: Any, path: str, index: int) -> str | Image:
    try:
        return parse_content(content, path)
    except ValueError as error:
        raise ValueError(f"{error}, in entry {index}") from None


def parse_documents(value: Any) -> list[Document]:
    """Checks a list of texts and objects, and returns it unchanged.

    An object with `content` alone becomes a list with one document per part, as in vLLM.
    """
    if isinstance(value, dict) and isinstance(value.get("content"), list):
        value = [{"content": [part]} for part in value["content"]]
    if not isinstance(value, list):
        raise ValueError(f"must be a list of texts or objects, not {quote(value)}")
    if not value:
        raise ValueError("is an empty list; give at least one text")
    for i, entry in enumerate(value):
        if not isinstance(entry, str | dict):
            raise ValueError(f'must hold texts or objects {{"text": ...}}; entry {i} is {quote(entry)}')
        if isinstance(entry, dict) and not _can_be_written(entry):
            raise ValueError(f"nests values too deeply in entry {i}")
    return value


def parse_rank_fields(names: list[str]) -> list[str]:
    """Returns the names without repetitions, so that no value of a document is ranked twice."""
    names = list(dict.fromkeys(names))
    if len(names) > MAX_RANK_FIELDS:
        raise ValueError(f"has {len(names)} names; the limit is {MAX_RANK_FIELDS}")
    return names


def document_contents(documents: Sequence[Document], rank_fields: Sequence[str] | None) -> list[str | Image]:
    """Returns each document: the `rank_fields` of an object in this order, or else its text or image.

    Raises:
        InvalidRequestError: An object has none of these fields.
    """
    return [
        document if isinstance(document, str) else _object_content(document, rank_fields, i)
        for i, document in enumerate(documents)
    ]


def _object_content(document: dict[str, Any], rank_fields: Sequence[str] | None, index: int) -> str | Image:
    if rank_fields:
        values = [document[name] for name in rank_fields if document.get(name) is not None]
        if not values:
            raise InvalidRequestError(
                f"documents: entry {index} is an object without any of the rank_fields "
                f"{quote_names(rank_fields)}; it has {quote_names(document)}.",
                param="documents",
            )
        return "\n".join(value if isinstance(value, str) else orjson.dumps(value).decode() for value in values)
    try:
        content = parse_text_or_image(document, f"[{index}]")
        if isinstance(content, str | Image):
            return content
    except ValueError as error:
        raise InvalidRequestError(f"documents: entry {index} {error}.", param="documents") from None
    raise InvalidRequestError(
        f"documents: entry {index} is an object without a text; it has {quote_names(document)}. "
        "Send the text as text, or name the fields to rank in rank_fields.",
        param="documents",
    )


def _can_be_written(value: dict[str, Any]) -> bool:
    """Returns whether orjson can serialise the object for the response: its parser allows deeper nesting."""
    try:
        orjson.dumps({"results": [{"document": value}]})
    except orjson.JSONEncodeError:
        return False
    return True


Images = Annotated[list[ImageSource], Parsed(parse_images, json_schema.IMAGES)]
Contents = Annotated[list[str | Image], Parsed(parse_contents, json_schema.CONTENTS)]
Documents = Annotated[list[Document], Parsed(parse_documents, json_schema.DOCUMENTS)]


TextOrList = TypeVar("TextOrList", bound=str | list[Any])


class Sequences(NamedTuple):
    """Texts and pairs to classify.

    Attributes:
        entries: One or two texts per entry.
        is_batch: True if the body has a list of texts or pairs, false if it has a single one.
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
    reject_empty(["".join(entry) for entry in sequences.entries])
    return sequences


def reject_empty(value: TextOrList) -> TextOrList:
    """Returns the value unchanged. An empty text raises the error that becomes TEI's error type "empty"."""
    if value == "" or (not isinstance(value, str) and "" in value):
        where = "" if isinstance(value, str) else f" in entry {value.index('')}"
        raise PydanticCustomError(EMPTY_TEXT, "holds an empty text{where}; send some text", {"where": where})
    return value


def _sequence(entry: Any, index: int) -> list[str]:
    if not isinstance(entry, list) or len(entry) not in (1, 2) or not all(isinstance(text, str) for text in entry):
        raise ValueError(f"must hold [text] or pairs [text, text]; entry {index} is neither")
    return entry


def lower_case(value: Any) -> Any:
    """Returns a text in lower case: clients send both `Left` and `left`."""
    return value.lower() if isinstance(value, str) else value


NonEmptyInputs = Annotated[TextsOrIds, AfterValidator(reject_empty), WithJsonSchema(json_schema.NON_EMPTY_INPUTS)]
NonEmptyText = Annotated[str, AfterValidator(reject_empty), WithJsonSchema(json_schema.NON_EMPTY_STRING)]
_NonEmptyString = Annotated[str, WithJsonSchema(json_schema.NON_EMPTY_STRING)]
NonEmptyTexts = Annotated[FailFastList[_NonEmptyString], AfterValidator(reject_empty)]
SequenceInputs = Annotated[Sequences, Parsed(parse_sequences, json_schema.SEQUENCES)]
TruncationSide = Annotated[
    Literal["left", "right"],
    BeforeValidator(lower_case),
    WithJsonSchema({"type": "string", "pattern": "^([Ll]eft|[Rr]ight)$"}),
]


def parse_batches(value: Any) -> list[list[int]]:
    """Returns a list of id lists. `ids` may be one list of ids."""
    batches = [value] if isinstance(value, list) and value and not isinstance(value[0], list) else value
    if not isinstance(batches, list) or not batches:
        raise ValueError("must be a list of token ids, or a list of such lists, and not empty")
    check_length(batches)
    batches = [whole_numbers(ids) if isinstance(ids, list) else ids for ids in batches]
    for i, ids in enumerate(batches):
        if not isinstance(ids, list) or set(map(type, ids)) != {int}:
            raise ValueError(f"must hold token ids or lists of them; list {i} does not, or is empty")
    return batches


IdBatches = Annotated[list[list[int]], Parsed(parse_batches, json_schema.ID_BATCHES)]
