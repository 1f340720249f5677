"""Routes, their properties, and the table of all routes.

A route declares its dialect, the key that it needs, and whether it runs a model. Middleware, batches, error
handlers and the OpenAPI document read these properties instead of having lists of paths.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Final, TypedDict, TypeVar, Unpack, get_type_hints

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import Scope

from penstock.engine import EngineError

from .dialects import DIALECTS, OPENAI, SHARED_RESPONSES, Dialect, Responses
from .http.json_body import BodyParser, JsonBody, parse_as
from .request_state import state_of

UNSUPPORTED_FIELDS: Final = frozenset({"mm_processor_kwargs", "preset", "relevant_spans"})
"""Fields of vLLM, Cohere and Voyage that change the response but are fields of no body. They are rejected."""

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
    """Options of a Route. The options after `is_probe` are FastAPI's."""

    dialect: Dialect
    access: Access
    runs_model: bool
    batch_use: BatchUse
    by_key: Mapping[str, Dialect]
    cancels_on_disconnect: bool
    is_probe: bool
    tags: list[str | Enum] | None
    responses: Responses
    response_model: Any
    response_class: type[Response]
    include_in_schema: bool
    operation_id: str | None
    openapi_extra: dict[str, Any]


def operation_id(route: APIRoute) -> str:
    """Returns an id made of the path. Generated clients use it, and paths change less often than function names."""
    return "_".join(part.strip("{}").replace(":path", "").replace("-", "_") for part in route.path.split("/") if part)


class Route(APIRoute):
    """A route with its properties. The function of a JSON route takes `body` and `request` and returns a Response.

    A missing Content-Type means JSON; see `check_content_type` for other types.

    Args:
        runs_model: Whether its requests wait for a forward. Such requests are rejected before their body is read if
            the engine is full, have a deadline, and take precedence over batches.
        by_key: Body keys that select a dialect other than `dialect`.
        cancels_on_disconnect: Whether the request is cancelled when its client disconnects.
        is_probe: Whether it is a health check, called every few seconds: not logged, not traced.
        options: Arguments of APIRoute.

    Attributes:
        body_parser: Parses the body of a JSON route. JsonDispatcher uses it. None: FastAPI calls the function.
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
        cancels_on_disconnect: bool = True,
        is_probe: bool = False,
        **options: Any,
    ) -> None:
        self.dialect = dialect
        self.access = access
        self.runs_model = runs_model
        self.batch_use = batch_use
        self.by_key = by_key or {}
        self.cancels_on_disconnect = cancels_on_disconnect
        self.is_probe = is_probe
        super().__init__(path, endpoint, generate_unique_id_function=operation_id, **options)
        annotation = None if self.body_field is None else get_type_hints(endpoint, include_extras=True)["body"]
        self.body_parser = None if annotation is None else BodyParser(annotation)


async def respond_as(endpoint: Endpoint, schema: type[JsonBody], content: dict[str, Any], request: Request) -> Response:
    """Validates a body with the schema of another route and returns that route's response; see `parse_as`."""
    body = parse_as(schema, content, request.scope)
    if (request_id := body.body_request_id()) is not None:
        state_of(request.scope).request_id = request_id
    try:
        return await endpoint(body=body, request=request)
    except EngineError as error:
        error.name_fields(body.field_names())
        raise


class Router:
    """Collects the routes of one dialect, as the routers of starlette and FastAPI do.

    Args:
        dialect: Dialect of the routes, unless a route states another one.
        tag: Tag of the routes in the OpenAPI document.
        responses: Error responses in the OpenAPI document. Default: the errors of the dialect.
        in_schema: Whether the OpenAPI document has the routes.
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
        """Declares a POST route that runs a model. Aliases are not in the OpenAPI document and not for batches."""
        options["runs_model"] = True
        return self.route(["POST"], path, aliases=aliases, **options)

    def post(self, path: str, *, aliases: Sequence[str] = (), **options: Unpack[RouteOptions]) -> Callable[[E], E]:
        """Declares a POST route that runs no model."""
        return self.route(["POST"], path, aliases=aliases, **options)

    def get(
        self, path: str, *, aliases: Sequence[str] = (), has_head: bool = False, **options: Unpack[RouteOptions]
    ) -> Callable[[E], E]:
        """Declares a GET route. With `has_head`, it also handles HEAD requests."""
        declare_get = self.route(["GET"], path, aliases=aliases, **options)
        if not has_head:
            return declare_get
        hidden: RouteOptions = {**options, "include_in_schema": False}
        declare_head = self.route(["HEAD"], path, aliases=aliases, **hidden)
        return lambda endpoint: declare_get(declare_head(endpoint))

    def route(
        self, methods: Sequence[str], path: str, *, aliases: Sequence[str] = (), **options: Unpack[RouteOptions]
    ) -> Callable[[E], E]:
        """Declares a route with several methods."""
        tags: list[str | Enum] | None = [self._tag] if self._tag else None
        options = {"dialect": self._dialect, "tags": tags, "include_in_schema": self._in_schema, **options}
        responses = self._responses
        if responses is None:
            responses = SHARED_RESPONSES if options.get("by_key") else options["dialect"].responses
        options["responses"] = {**responses, **options.get("responses", {})}

        def declare(endpoint: E) -> E:
            for route_path in (path, *aliases):
                own: RouteOptions = options
                if route_path != path:
                    own = {**options, "include_in_schema": False, "batch_use": BatchUse.NONE}
                self.routes.append(Route(route_path, endpoint, methods=[*methods], **own))
            return endpoint

        return declare


class RouteTable:
    """The routes of an application by method and path, with FastAPI's matching rules.

    Attributes:
        root_path: Path prefix under which a proxy serves the routes, such as /penstock; "" for none.
        routes: Routes with fixed paths first, so that they have precedence over paths with parameters.
        field_keys: Keys of the fields of all bodies, and UNSUPPORTED_FIELDS.
    """

    def __init__(self, routes: Iterable[Route], root_path: str = "") -> None:
        self.root_path = root_path
        self.routes = sorted(routes, key=lambda route: bool(route.param_convertors))
        self._fixed: dict[str, list[Route]] = {}
        self._with_parameters = [route for route in self.routes if route.param_convertors]
        for route in self.routes:
            if not route.param_convertors:
                self._fixed.setdefault(route.path, []).append(route)
        parsers = [route.body_parser for route in self.routes if route.body_parser is not None]
        self.field_keys = UNSUPPORTED_FIELDS.union(*(parser.field_keys for parser in parsers))

    def find(self, method: str, path: str) -> Route | None:
        """Returns the route of a request, or None."""
        for route in self._fixed.get(path, ()):
            if method in (route.methods or ()):
                return route
        return next((route for route in self._matching(path) if method in (route.methods or ())), None)

    def match(self, scope: Scope) -> None:
        """Stores the route of a request in the scope, and its dialect and its Access in the RequestState.

        An unknown path needs an API key. If all methods of a path are open, all other methods are open too.
        """
        method = scope["method"]
        path = scope["path"]
        state = state_of(scope)
        route = self.find(method, path)
        if route is not None:
            scope["route"] = route
            state.dialect = route.dialect
            state.access = route.access
            return
        other_methods = [*self._fixed.get(path, ()), *self._matching(path)]
        is_open = bool(other_methods) and all(route.access is Access.OPEN for route in other_methods)
        state.access = Access.OPEN if is_open else Access.API_KEY
        by_prefix = (dialect for dialect in DIALECTS if dialect.prefix and path.startswith(dialect.prefix))
        state.dialect = other_methods[0].dialect if other_methods else next(by_prefix, OPENAI)

    def batch_uses(self) -> dict[str, BatchUse]:
        """Returns the paths that lines of batches may call."""
        return {route.path: route.batch_use for route in self.routes if route.batch_use is not BatchUse.NONE}

    def _matching(self, path: str) -> Iterator[Route]:
        return (route for route in self._with_parameters if route.path_regex.match(path))


def route_of(scope: Scope) -> Route | None:
    """Returns the route of a request, or None for an unknown path or method."""
    route = scope.get("route")
    return route if isinstance(route, Route) else None


def runs_model(scope: Scope) -> bool:
    """Returns whether a request waits for a forward."""
    route = route_of(scope)
    return route is not None and route.runs_model
