"""Texts inside objects: entries of contents, and documents whose fields are to be ranked.

Every parser raises ValueError for anything else than it returns; the message names the entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from pydantic import PlainValidator, WithJsonSchema

from penstock.engine.protocol.errors import InvalidRequestError

from ...wire import json_schema
from ...wire.shown_values import shown, shown_names

Document = str | dict[str, Any]


def content_text(content: Any) -> str:
    """Returns the text of `content`: a text, or a list of parts `{"type": "text", "text": ...}` as its lines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError('has no content; send {"content": [{"type": "text", "text": ...}]}')
    lines: list[str] = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if kind in ("image_url", "image"):
            raise ValueError("holds an image, but the served models read text only")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError('has a content that is no {"type": "text", "text": ...}')
        lines.append(part["text"])
    return "\n".join(lines)


def parse_contents(value: Any) -> list[str]:
    """Returns the text of each entry of a list of objects with `content`."""
    if not isinstance(value, list) or not value:
        raise ValueError('must be a list of objects {"content": [...]} and not empty; texts takes plain texts')
    texts: list[str] = []
    for i, entry in enumerate(value):
        try:
            texts.append(content_text(entry.get("content") if isinstance(entry, dict) else None))
        except ValueError as error:
            raise ValueError(f"{error}, in entry {i}") from None
    return texts


def parse_documents(value: Any) -> list[Document]:
    """Returns a list of texts and objects as it is."""
    if not isinstance(value, list):
        raise ValueError(f"must be a list of texts or objects, not {shown(value)}")
    if not value:
        raise ValueError("is an empty list; give at least one text")
    for i, entry in enumerate(value):
        if not isinstance(entry, str | dict):
            raise ValueError(f'must hold texts or objects {{"text": ...}}; entry {i} is {shown(entry)}')
        if isinstance(entry, dict) and not _can_be_written(entry):
            raise ValueError(f"nests values too deeply in entry {i}")
    return value


def document_texts(documents: Sequence[Document], rank_fields: Sequence[str] | None) -> list[str]:
    """Returns what is to be ranked of each document: of an object the `rank_fields` in their order, or its text.

    Raises:
        InvalidRequestError: An object has none of them.
    """
    return [
        document if isinstance(document, str) else _object_text(document, rank_fields, i)
        for i, document in enumerate(documents)
    ]


def _object_text(document: dict[str, Any], rank_fields: Sequence[str] | None, index: int) -> str:
    if rank_fields:
        values = [document[name] for name in rank_fields if document.get(name) is not None]
        if not values:
            raise InvalidRequestError(
                f"documents: entry {index} is an object without any of the rank_fields "
                f"{shown_names(rank_fields)}; it has {shown_names(document)}.",
                param="documents",
            )
        return "\n".join(value if isinstance(value, str) else orjson.dumps(value).decode() for value in values)
    text = document.get("text")
    if isinstance(text, str):
        return text
    if "content" in document:
        try:
            return content_text(document["content"])
        except ValueError as error:
            raise InvalidRequestError(f"documents: entry {index} {error}.", param="documents") from None
    raise InvalidRequestError(
        f"documents: entry {index} is an object without a text; it has {shown_names(document)}. "
        "Send the text as text, or name the fields that are to be read in rank_fields.",
        param="documents",
    )


def _can_be_written(value: dict[str, Any]) -> bool:
    """Returns whether orjson, which reads deeper than it writes, can write an object back: as one of the results."""
    try:
        orjson.dumps({"results": [{"document": value}]})
    except orjson.JSONEncodeError:
        return False
    return True


Contents = Annotated[list[str], PlainValidator(parse_contents), WithJsonSchema(json_schema.CONTENTS)]
Documents = Annotated[list[Document], PlainValidator(parse_documents), WithJsonSchema(json_schema.DOCUMENTS)]
