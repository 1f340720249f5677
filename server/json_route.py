"""Request bodies and answers through orjson, with FastAPI's checks and OpenAPI schema on the way in."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final

import orjson
from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

JSON_HEADERS: Final = {"content-type": "application/json"}


class JsonRequest(Request):
    """A request whose JSON body is parsed by orjson."""

    async def json(self) -> Any:
        """Returns the parsed body.

        Raises:
            json.JSONDecodeError: The body is not valid JSON.
        """
        return orjson.loads(await self.body())


class JsonRoute(APIRoute):
    """A route whose body is JSON. A missing Content-Type is taken for JSON; a wrong one is a 415."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns FastAPI's handler on a JsonRequest."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            scope, content_type = request.scope, request.headers.get("content-type")
            if content_type is None:
                scope = {**scope, "headers": [*scope["headers"], (b"content-type", b"application/json")]}
            else:
                refuse_other_media(content_type)
            return await handle(JsonRequest(scope, request.receive))

        return handle_json


def refuse_other_media(content_type: str) -> None:
    """Raises HTTPException 415 unless `content_type` is JSON."""
    media = content_type.partition(";")[0].strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        raise HTTPException(415, f"Content-Type is {media}; send application/json.")


def json_response(content: Any) -> Response:
    """Returns `content` as JSON; numpy arrays and numbers are written as they are, without a Python list between."""
    body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, headers=JSON_HEADERS)
