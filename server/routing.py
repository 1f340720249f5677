"""Routes and their properties, the table in which every part of the server looks them up, and JSON routes.

A route declares its dialect, the key that it needs, and whether it runs a model. Middleware, load shedding, batches,
error handlers and the OpenAPI document read these properties, and no list of paths of their own.

FastAPI finds a route by trying the patterns of all, and then resolves the dependencies of its function. JSON routes are
fixed paths whose functions take a body and the request: one lookup and one check are enough for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Final, TypedDict, TypeVar, Unpack, get_type_hints

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.engine import EngineError
from penstock.engine.protocol.request import CLIENT

from .admission import BODY_MEMORY
from .dialects import DIALECT, DIALECTS, OPENAI, SHARED_RESPONSES, Dialect, Responses
from .http.json_bodies import JsonBody, invalid_body, parsed, tag_rule
from .http.json_reader import JsonReader
from .http.shown_values import shown

ACCESS: Final = "penstock.access"
"""The key of a request's scope that holds its Access."""

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
Endpoint = Callable[..., Coroutine[Any, Any, Response]]
E = TypeVar("E", bound=Endpoint)


class Access(Enum):
    """The key that a route needs. Without API keys, only ADMIN_KEY routes need one."""

    OPEN = "open"
    API_KEY = "api_key"
    ADMIN_KEY = "admin_key"


class BatchUse(Enum):
    """Whether lines of batches may call a route. The inputs of EMBEDDING routes count towards the limit of a file."""

    NONE = "none"
    TASK = "task"
    EMBEDDING = "embedding"


class RouteOptions(TypedDict, total=False):
    """Options of a Route; those below `is_probe` are FastAPI's."""

    dialect: Dialect
    access: Access
    runs_model: bool
    batch_use: BatchUse
    by_key: Mapping[str, Dialect]
    limits_body: bool
    is_probe: bool
    tags: list[str | Enum] | None
    responses: Responses
    response_model: Any
    response_model_exclude_unset: bool
    response_class: type[Response]
    include_in_schema: bool
    operation_id: str | None
    openapi_extra: dict[str, Any]


def operation_id(route: APIRoute) -> str:
    """Returns the path as a name: clients are generated from it, and paths outlive the functions behind them."""
    return "_".join(part.strip("{}").replace(":path", "").replace("-", "_") for part in route.path.split("/") if part)


class Route(APIRoute):
    """A route with its properties. The function of a JSON route takes `body` and `request` and returns a Response.

    A missing Content-Type means JSON; see `check_media` for other types.

    Args:
        path: May have parameters.
        endpoint: Its function.
        dialect: Of its error bodies.
        access: The key that it needs.
        runs_model: Its requests wait for a forward. A full engine refuses them unread, they have a deadline, and
            batches give way to them.
        batch_use: Whether lines of batches may call it.
        by_key: Keys of a body that tell another dialect than `dialect`.
        limits_body: False for a route that limits its bodies itself.
        is_probe: It is called every few seconds: neither logged nor traced.
        options: FastAPI's.

    Attributes:
        json_handler: Answers requests with a JSON body, or raises an error that a handler answers. None: the route
            takes no JSON body, and FastAPI calls it.
    """

    def __init__(
        self,
        path: str,
        endpoint: Endpoint,
        *,
        dialect: Dialect = OPENAI,
        access: Access = Access.API_KEY,
        runs_model: bool = False,
        batch_use: BatchUse = BatchUse.NONE,
        by_key: Mapping[str, Dialect] | None = None,
        limits_body: bool = True,
        is_probe: bool = False,
        **options: Any,
    ) -> None:
        self.dialect = dialect
        self.access = access
        self.runs_model = runs_model
        self.batch_use = batch_use
        self.by_key = by_key or {}
        self.limits_body = limits_body
        self.is_probe = is_probe
        self.json_handler: Handler | None = None
        super().__init__(path, endpoint, generate_unique_id_function=operation_id, **options)

    def get_route_handler(self) -> Handler:
        """Returns the function that answers a request, or raises an error that a handler answers."""
        if self.body_field is None:
            return super().get_route_handler()
        answer, takes_any_media, by_key = self.endpoint, self.dialect.takes_any_media, self.by_key
        schema = get_type_hints(answer, include_extras=True)["body"]
        adapter, tag_of = TypeAdapter[Any](schema), tag_rule(schema)
        validate, has_schema = adapter.validator.validate_python, adapter.core_schema["type"] != "dict"

        async def handle_json(request: Request) -> Response:
            reader: JsonReader = request.app.state.json_reader
            value = await _json_value(request, reader, takes_any_media=takes_any_media)
            if by_key and isinstance(value, dict):
                for key, dialect in by_key.items():
                    if value.get(key) is not None:
                        request.scope[DIALECT] = dialect
            reader.check_entries(value, tag_of(value))
            try:
                body = validate(value)
            except ValidationError as error:
                raise invalid_body(error, value) from error
            del value  # free unknown fields early: the parsed body may stay in the queue for seconds
            if has_schema and body.__pydantic_extra__:
                body.check_keys()
            return await answer_body(answer, body, request) if has_schema else await answer(body=body, request=request)

        self.json_handler = handle_json
        return handle_json


async def answer_body(answer: Endpoint, body: JsonBody, request: Request) -> Response:
    """Returns the answer of a route to a body. The request and the fields in errors are named as the body does."""
    if (name := body.request_name()) is not None:
        request.scope["request_id"] = name
    try:
        return await answer(body=body, request=request)
    except EngineError as error:
        error.name_fields(body.field_names())
        raise


async def answer_as(answer: Endpoint, schema: type[JsonBody], body: dict[str, Any], request: Request) -> Response:
    """Returns the answer of another route to a body that is checked by the schema of that route; see `parsed`."""
    return await answer_body(answer, parsed(schema, body), request)


class Router:
    """Collects routes of one dialect.

    Args:
        dialect: Of the routes, unless a route names another.
        tag: Of the routes in the OpenAPI document.
        responses: Errors in the OpenAPI document; by default those of the dialect.
        in_schema: Whether the OpenAPI document has the routes.

    Attributes:
        routes: In the order of their declaration.
    """

    def __init__(
        self, dialect: Dialect, *, tag: str | None = None, responses: Responses | None = None, in_schema: bool = True
    ) -> None:
        self.routes: list[Route] = []
        self._dialect = dialect
        self._tag = tag
        self._responses = responses
        self._in_schema = in_schema

    def task(self, path: str, *, aliases: Sequence[str] = (), **options: Unpack[RouteOptions]) -> Callable[[E], E]:
        """Declares a POST route that runs a model. Aliases of its path are for no batch and in no document."""
        options["runs_model"] = True
        return self.route(["POST"], path, aliases=aliases, **options)

    def post(self, path: str, *, aliases: Sequence[str] = (), **options: Unpack[RouteOptions]) -> Callable[[E], E]:
        """Declares a POST route that runs no model."""
        return self.route(["POST"], path, aliases=aliases, **options)

    def get(
        self, path: str, *, aliases: Sequence[str] = (), has_head: bool = False, **options: Unpack[RouteOptions]
    ) -> Callable[[E], E]:
        """Declares a GET route; with `has_head`, HEAD requests are answered, too."""
        declare_get = self.route(["GET"], path, aliases=aliases, **options)
        if not has_head:
            return declare_get
        hidden: RouteOptions = {**options, "include_in_schema": False}
        declare_head = self.route(["HEAD"], path, aliases=aliases, **hidden)
        return lambda endpoint: declare_get(declare_head(endpoint))

    def route(
        self, methods: Sequence[str], path: str, *, aliases: Sequence[str] = (), **options: Unpack[RouteOptions]
    ) -> Callable[[E], E]:
        """Declares a route of several methods."""
        options = {"dialect": self._dialect, "tags": [self._tag] if self._tag else None, **options}
        responses = self._responses
        if responses is None:
            responses = SHARED_RESPONSES if options.get("by_key") else options["dialect"].responses
        options["responses"] = {**responses, **options.get("responses", {})}
        in_schema = options.pop("include_in_schema", self._in_schema)

        def declare(endpoint: E) -> E:
            for place in (path, *aliases):
                shown_here = in_schema and place == path
                if place != path:
                    options["batch_use"] = BatchUse.NONE
                route = Route(
                    place,
                    endpoint,
                    methods=[*methods],
                    include_in_schema=shown_here,
                    **options,  # pyright: ignore[reportCallIssue]
                )
                self.routes.append(route)
            return endpoint

        return declare


class RouteTable:
    """The routes of an application, found by method and path as FastAPI finds them.

    Args:
        routes: All routes.

    Attributes:
        routes: Fixed paths first, so that no path with parameters takes their requests.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = sorted(routes, key=lambda route: bool(route.param_convertors))
        self._fixed: dict[str, list[Route]] = {}
        self._with_parameters = [route for route in self.routes if route.param_convertors]
        for route in self.routes:
            if not route.param_convertors:
                self._fixed.setdefault(route.path, []).append(route)

    def find(self, method: str, path: str) -> Route | None:
        """Returns the route that answers a request, None where there is none."""
        for route in self._fixed.get(path, ()):
            if method in (route.methods or ()):
                return route
        return next((route for route in self._matching(path) if method in (route.methods or ())), None)

    def enter(self, scope: Scope) -> None:
        """Notes the route of a request in its scope, with its dialect and the key that it needs.

        An unknown path needs an API key. A path that is open with all of its methods is open with any other, too.
        """
        method, path = scope["method"], scope["path"]
        route = self.find(method, path)
        if route is not None:
            scope["route"], scope[DIALECT], scope[ACCESS] = route, route.dialect, route.access
            return
        there = [*self._fixed.get(path, ()), *self._matching(path)]
        is_open = bool(there) and all(route.access is Access.OPEN for route in there)
        scope[ACCESS] = Access.OPEN if is_open else Access.API_KEY
        below = [dialect for dialect in DIALECTS if dialect.prefix and path.startswith(dialect.prefix)]
        scope[DIALECT] = there[0].dialect if there else next(iter(below), OPENAI)

    def json_routes(self) -> dict[str, Route]:
        """Returns the routes with a JSON body by their paths."""
        return {route.path: route for route in reversed(self.routes) if route.json_handler is not None}

    def batch_uses(self) -> dict[str, BatchUse]:
        """Returns the paths that lines of batches may call."""
        return {route.path: route.batch_use for route in self.routes if route.batch_use is not BatchUse.NONE}

    def _matching(self, path: str) -> Iterator[Route]:
        return (route for route in self._with_parameters if route.path_regex.match(path))


def route_of(scope: Scope) -> Route | None:
    """Returns the route of a request, None for an unknown path or method."""
    route = scope.get("route")
    return route if isinstance(route, Route) else None


def runs_model(scope: Scope) -> bool:
    """Returns whether a request waits for a forward."""
    route = route_of(scope)
    return route is not None and route.runs_model


class JsonDispatcher:
    """Answers requests to JSON routes, and passes other requests on to the application behind it.

    Gives back everything that a request holds, no matter what answered it.

    Args:
        app: The next application.
        error_handlers: Turn an error into a response, by its class.
        on_end: Called with the scope of each request when its response has been sent.
        on_answer: Called with it as soon as the response or the error is known: nothing is computed any more.
    """

    def __init__(
        self,
        app: ASGIApp,
        error_handlers: Mapping[Any, Callable[[Request, Any], Any]],
        on_end: Callable[[Scope], None],
        on_answer: Callable[[Scope], None] = lambda _: None,
    ) -> None:
        self.app = app
        self._error_handlers = error_handlers
        self._on_end = on_end
        self._on_answer = on_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or passes it on."""
        CLIENT.set(scope.get("api_client", ""))
        route = route_of(scope)
        if route is None or route.json_handler is None:
            try:
                await self.app(scope, receive, send)
            finally:
                self._on_answer(scope)
                self._on_end(scope)
            return
        request = Request(scope, receive, send)
        try:
            try:
                response = await route.json_handler(request)
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
        return await reader.read(request.receive, request.scope.get(BODY_MEMORY))
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
