"""Routes whose body is JSON: read by orjson, checked by pydantic, documented by FastAPI, and found by their path.

FastAPI finds a route by trying the patterns of all, and then looks for what else its function may depend on. Ours are
fixed paths whose functions take a body and the request: one lookup and one check do, before all layers of FastAPI.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any, ClassVar, Final, get_type_hints

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.engine import EngineError
from penstock.engine.protocol.request import CLIENT

from .json_bodies import JsonBody, dialect_of, invalid_body, parsed
from .json_pieces import PiecewiseResponse, json_bytes, json_pieces
from .json_reader import BODY_ROOM, JsonReader
from .shown_values import shown

JSON_HEADERS: Final = {"content-type": "application/json"}

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
Endpoint = Callable[..., Coroutine[Any, Any, Response]]


class JsonRoute(APIRoute):
    """A route with a JSON body. A missing Content-Type means JSON; see `check_media` for other types.

    Its function takes `body` and `request`, and returns a Response. Routes without a body are FastAPI's own.

    Attributes:
        takes_any_media: Bodies of any Content-Type are read as JSON.
    """

    takes_any_media: ClassVar[bool] = False

    def get_route_handler(self) -> Handler:
        """Returns what answers a request, or raises what a handler of errors answers."""
        if self.body_field is None:
            return super().get_route_handler()
        answer, takes_any_media = self.endpoint, self.takes_any_media
        schema = get_type_hints(answer, include_extras=True)["body"]
        adapter, tag_of = TypeAdapter[Any](schema), dialect_of(schema)
        validate, has_schema = adapter.validator.validate_python, adapter.core_schema["type"] != "dict"

        async def handle_json(request: Request) -> Response:
            reader: JsonReader = request.app.state.json_reader
            value = await _json_value(request, reader, takes_any_media=takes_any_media)
            reader.check_entries(value, tag_of(value))
            try:
                body = validate(value)
            except ValidationError as error:
                raise invalid_body(error, value) from error
            del value  # what is no field of the body need not wait with it
            if has_schema and body.__pydantic_extra__:
                body.check_keys()
            return await answered(answer, body, request) if has_schema else await answer(body=body, request=request)

        return handle_json


async def answered(answer: Endpoint, body: JsonBody, request: Request) -> Response:
    """Returns the answer of a route to a body. The request and the fields in errors are named as the body does."""
    if (name := body.request_name()) is not None:
        request.scope["request_id"] = name
    try:
        return await answer(body=body, request=request)
    except EngineError as error:
        error.name_fields(body.field_names())
        raise


async def passed_on(answer: Endpoint, schema: type[JsonBody], body: dict[str, Any], request: Request) -> Response:
    """Returns the answer of another route, whose bodies have this schema, to a body without one; see `parsed`."""
    return await answered(answer, parsed(schema, body), request)


def routes_by_path(routes: Iterable[BaseRoute]) -> dict[str, JsonRoute]:
    """Returns the JSON routes with a body by their paths; of two with one path the first, which FastAPI would take."""
    found: dict[str, JsonRoute] = {}
    for route in routes:
        if isinstance(route, JsonRoute) and route.body_field is not None:
            found.setdefault(route.path, route)
    return found


class JsonPaths:
    """Answers what is posted to JSON routes. Other methods and paths are left to the application behind it.

    What a request holds is given back here, whoever answers it.

    Args:
        app: What comes next.
        routes: The routes by their paths.
        error_handlers: Makes an answer of an error, by its class.
        on_end: Called with the scope of each request when its answer has gone.
        on_answer: Called with it as soon as the answer, or why there is none, is known: nothing is computed any more.
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: Mapping[str, JsonRoute],
        error_handlers: Mapping[Any, Callable[[Request, Any], Any]],
        on_end: Callable[[Scope], None],
        on_answer: Callable[[Scope], None] = lambda _: None,
    ) -> None:
        self.app = app
        self._routes = {path: (route, route.get_route_handler()) for path, route in routes.items()}
        self._error_handlers = error_handlers
        self._on_end = on_end
        self._on_answer = on_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or passes it on."""
        CLIENT.set(scope.get("api_client", ""))
        found = self._routes.get(scope["path"]) if scope["method"] == "POST" else None
        if found is None:
            try:
                await self.app(scope, receive, send)
            finally:
                self._on_answer(scope)
                self._on_end(scope)
            return
        scope["route"], handle = found
        request = Request(scope, receive, send)
        try:
            try:
                response = await handle(request)
            except Exception as error:
                known = [kind for kind in type(error).__mro__ if kind in self._error_handlers]
                if not known:
                    raise
                response = await self._error_handlers[known[0]](request, error)
            finally:
                self._on_answer(scope)
            await response(scope, receive, send)
        finally:
            self._on_end(scope)


async def _json_value(request: Request, reader: JsonReader, *, takes_any_media: bool) -> Any:
    """Returns the parsed body.

    Raises:
        RequestValidationError: There is none, or it is not valid JSON.
        HTTPException: 415, it is something else, or compressed; 413, it holds too many values; 400, the client has
            gone.
    """
    media = coding = b""
    for name, value in request.scope["headers"]:
        if name == b"content-type":
            media = value
        elif name == b"content-encoding":
            coding = value
    if media != b"application/json":
        origins = request.app.state.context.settings.cors_origins
        check_media(media.decode("latin-1"), request.scope["headers"], origins, takes_any=takes_any_media)
    try:
        if (hold := request.scope.get(BODY_ROOM)) is None:
            return await reader.read(request.receive)
        return await reader.read(request.receive, hold)
    except RequestValidationError:
        named = coding.decode("latin-1").strip().lower()
        if named not in ("", "identity"):
            raise HTTPException(415, f"Content-Encoding is {shown(named)}; send the body uncompressed.") from None
        raise


def check_media(
    content_type: str, headers: Iterable[tuple[bytes, bytes]], origins: Collection[str] = (), *, takes_any: bool
) -> None:
    """Checks that a body may be read as JSON.

    Browsers send requests of some other types, or of none, to any server without a CORS preflight. A web page of
    another origin must therefore send application/json, which needs a preflight, unless its origin is allowed.

    Args:
        content_type: Of the body; "" if there is none.
        headers: Of the request.
        origins: Allowed origins of web pages; "*" allows all.
        takes_any: Other types are accepted too.

    Raises:
        HTTPException: 415, the body may not be read.
    """
    media = content_type.partition(";")[0].strip().lower()
    if media == "application/json" or (media.startswith("application/") and media.endswith("+json")):
        return
    found = f"Content-Type is {shown(media)}" if media else "The request has no Content-Type"
    if is_from_other_origin(headers, origins):
        raise HTTPException(415, f"{found}; a web page of another origin must send application/json.")
    if media and not takes_any:
        raise HTTPException(415, f"{found}; send application/json.")


def is_from_other_origin(headers: Iterable[tuple[bytes, bytes]], allowed: Collection[str]) -> bool:
    """Returns whether a browser sent the request for a page of another origin that is not allowed.

    Sec-Fetch-Site decides if there is one: a proxy may have changed Host. Without it Origin is compared with Host, but
    not the schemes: behind a TLS proxy the server sees http while its pages have https.
    """
    host, origins, sites = b"", list[bytes](), list[bytes]()
    for name, value in headers:
        if name == b"host":
            host = value.strip().lower()
        elif name == b"origin":
            origins.append(value.strip())
        elif name == b"sec-fetch-site":
            sites.append(value.strip().lower())
    if origins and ("*" in allowed or all(origin.decode("latin-1") in allowed for origin in origins)):
        return False
    if sites:
        return any(site not in (b"same-origin", b"none") for site in sites)
    return any(origin.lower().partition(b"://")[2] != host for origin in origins)


def json_response(content: Any, *, in_pieces: bool = False) -> Response:
    """Returns `content` as JSON; numpy arrays and numbers are written as they are, without a Python list between.

    Args:
        content: What `json_pieces` takes.
        in_pieces: It is written piece by piece as it goes out.
    """
    if in_pieces:
        return PiecewiseResponse(json_pieces(content), JSON_HEADERS)
    return Response(json_bytes(content), headers=JSON_HEADERS)
