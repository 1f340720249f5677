"""JSON responses, written as a whole or piece by piece."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from ..admission import has_large_response
from ..wire.json_pieces import json_response


def is_large(request: Request) -> bool:
    """Returns whether the response to a request is written piece by piece."""
    return has_large_response(request.scope)


def json_answer(request: Request, content: Any) -> Response:
    """Returns the JSON of a response for which memory has been reserved.

    Args:
        request: The request.
        content: What `json_pieces` takes.
    """
    return json_response(content, in_pieces=is_large(request))
