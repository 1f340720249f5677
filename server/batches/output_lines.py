"""The lines of the two files that a batch makes: an answer of a route, or why there is none, beside its `custom_id`."""

from __future__ import annotations

from typing import Any

import msgspec

from .journal import Answer
from .records import LineError
from .routes_inside import RouteAnswer


def answered(name: str, number: int, custom_id: str, answer: RouteAnswer) -> Answer:
    """Returns a line with what a route answered, under the name of its request."""
    is_error = answer.status >= 400
    head = _as_json({"status_code": answer.status, "request_id": answer.request_id})
    if answer.is_json:
        text = _output_line(name, custom_id, b'%b,"body":%b}' % (head[:-1], answer.body), b"null")
        return Answer(number, text, is_error, answer.num_tokens, answer.model)
    error = LineError("unsupported_answer", "The answer is no JSON; ask for float or base64.", "encoding_format")
    return unanswered(name, number, custom_id, error)


def unanswered(name: str, number: int, custom_id: str, error: LineError) -> Answer:
    """Returns a line with the reason why it has no answer."""
    return Answer(number, _output_line(name, custom_id, b"null", _as_json(error)), is_error=True)


def _output_line(name: str, custom_id: str, response: bytes, error: bytes) -> bytes:
    names = _as_json({"id": name, "custom_id": custom_id})
    return b'%b,"response":%b,"error":%b}\n' % (names[:-1], response, error)


def _as_json(value: dict[str, Any] | LineError) -> bytes:
    return msgspec.json.encode(value)
