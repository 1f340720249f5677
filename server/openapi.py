"""The OpenAPI document. Adds headers, API keys and common errors, which FastAPI cannot derive from the routes.

Every operation is listed once, with the path that the clients of its dialect use. The document's description lists the
aliases of paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson
from fastapi import FastAPI

from .http.request_head import MAX_PRIORITY, PRIORITY_NAMES, PRIORITY_PATTERN, TIMEOUT_PATTERN
from .routing import Access, Route, RouteTable

Json = dict[str, Any]

DESCRIPTION: Final = """\
OpenAI- and Cohere-compatible server for embedding, reranking, scoring and classification models.

In request bodies null means absent. Unknown keys are ignored and named in the header `x-ignored-fields`, unless the
server was started with `--unknown-fields`; a misspelt key is a 400. If a model does not support a request, the response
is a 400, or a 424 on the routes of TEI.

Each operation is listed once. Aliases are `/embeddings`, `/models`, `/models/{name}`, `/v1/pooling` and `/ping`, every
path with a trailing slash, and `/v1/v1/...` and `/v1/v2/...`. `POST /` accepts TEI's bodies, as `/invocations` does.
`/api/generate`, `/api/chat`, `/v1/chat/completions` and `/v1/completions` respond with an error that names the routes
of this server.
"""
TAGS: Final = [
    {"name": "openai", "description": "Embeddings for clients of OpenAI, Jina, Voyage and vLLM; list of models."},
    {"name": "jina", "description": "Token vectors."},
    {"name": "cohere", "description": "Embed, tokenize and detokenize."},
    {"name": "rerank", "description": "Rerank routes for clients of Cohere, Jina, Voyage, vLLM and TEI."},
    {"name": "score", "description": "Scores of text pairs."},
    {"name": "classify", "description": "Classification for clients of vLLM and Cohere."},
    {"name": "vllm", "description": "Raw model outputs, server load, and SageMaker's route for all bodies."},
    {"name": "tokenize", "description": "Tokenization for clients of vLLM, TEI and Cohere."},
    {"name": "tei", "description": "Text Embeddings Inference. Responses are bare lists."},
    {"name": "ollama", "description": "Embeddings and the served models."},
    {"name": "penstock", "description": "Several kinds of vectors from one forward."},
    {"name": "operations", "description": "Health, metrics, version."},
]

# Numbers in headers are strings with a pattern, because generated clients must send strings.
_PARAMETERS: Final[Json] = {
    "RequestId": {
        "name": "x-request-id",
        "in": "header",
        "description": "Request id for response and logs: up to 128 visible ASCII characters. Others are replaced.",
        "schema": {"type": "string"},
    },
    "TraceParent": {
        "name": "traceparent",
        "in": "header",
        "description": "The parent span of the request (W3C), if the server sends traces.",
        "schema": {"type": "string"},
    },
    "RequestTimeout": {
        "name": "x-request-timeout",
        "in": "header",
        "description": "Deadline in seconds. After it the response is a 408.",
        "schema": {"type": "string", "pattern": TIMEOUT_PATTERN},
        "example": "2.5",
    },
    "Priority": {
        "name": "x-priority",
        "in": "header",
        "description": (
            f"From -{MAX_PRIORITY} to {MAX_PRIORITY}, or one of {PRIORITY_NAMES}. Lower runs first; one level "
            "counts like "
            "one second of waiting. A `priority` in the body has precedence."
        ),
        "schema": {"type": "string", "pattern": PRIORITY_PATTERN},
        "example": "0",
    },
}
_HEADERS: Final[Json] = {
    "RequestId": {
        "description": "Id of the request: the client's or a new one.",
        "required": True,
        "schema": {"type": "string"},
    },
    "IgnoredFields": {
        "description": "Unknown fields of the body that the server ignored, separated by commas.",
        "schema": {"type": "string"},
    },
    "TruncatedInputs": {
        "description": "Number of inputs that were truncated; absent if it is 0.",
        "schema": {"type": "integer", "minimum": 1},
    },
    "ServerTiming": {
        "description": "Milliseconds of the stages: tokenization, queue, inference, encode (W3C).",
        "schema": {"type": "string"},
    },
}
_SECURITY_SCHEMES: Final[Json] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "`Authorization: Bearer KEY`, or the key alone."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "api-key", "description": "The header of Azure clients."},
}
_UNAUTHORIZED: Final[Json] = {
    "description": "The API key is missing or wrong.",
    "headers": {"WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}}},
}
_ERRORS_OF_BODIES: Final = ("400", "408", "413", "415", "422", "424", "429", "504")


class DocumentedApp(FastAPI):
    """FastAPI with a complete OpenAPI document.

    Args:
        names: Served names. Examples contain the first one.
        needs_key: Whether routes that are not open need an API key.
        options: Arguments of FastAPI.
    """

    def __init__(self, *, names: Sequence[str], needs_key: bool, routes: RouteTable, **options: Any) -> None:
        self._names = tuple(names)
        self._needs_key = needs_key
        self._table = routes
        self._document: Json | None = None
        self._encoded: dict[str, bytes] = {}  # by the path prefix of a proxy
        super().__init__(
            description=DESCRIPTION, openapi_tags=TAGS, openapi_url=None, routes=[*routes.routes], **options
        )

    def openapi(self) -> Json:
        """Returns the document. It is built once."""
        if self._document is None:
            self._document = super().openapi()
            _complete(self._document, self._names[:1], self._table, needs_key=self._needs_key)
        return self._document

    def encoded_document(self, root_path: str) -> bytes:
        """Returns the document as JSON for a server below a path prefix of a proxy.

        It is encoded once. FastAPI's own route encodes it for every request, which takes 30 ms.
        """
        root_path = root_path.rstrip("/")
        if root_path not in self._encoded:
            servers = {"servers": [{"url": root_path}]} if root_path else {}
            self._encoded[root_path] = orjson.dumps({**self.openapi(), **servers})
        return self._encoded[root_path]


def _complete(document: Json, name: Sequence[str], table: RouteTable, *, needs_key: bool) -> None:
    routes = {(method, route.path_format): route for route in table.routes for method in route.methods or ()}
    components = document["components"]
    components["parameters"], components["headers"] = _PARAMETERS, _HEADERS
    if needs_key:
        components["securitySchemes"] = _SECURITY_SCHEMES
    for path, item in document["paths"].items():
        for method, operation in item.items():
            _complete_operation(routes[method.upper(), path], operation, needs_key=needs_key)
    if (batch := components["schemas"].get("BatchRequest")) is not None:
        batch["properties"]["endpoint"]["enum"] = [*table.batch_uses()]
    for schema in components["schemas"].values():
        for example in schema.get("examples", ()):
            if name and isinstance(example, dict) and "model" in example:
                example["model"] = name[0]
    for parameter in document["paths"]["/v1/models/{name}"]["get"]["parameters"]:
        if name and parameter.get("name") == "name":
            parameter["example"] = name[0]


def _complete_operation(route: Route, operation: Json, *, needs_key: bool) -> None:
    responses = operation["responses"]
    headers = {"x-request-id": _reference("headers", "RequestId")}
    parameters = [_reference("parameters", "RequestId")]
    if "requestBody" not in operation:
        for status in _ERRORS_OF_BODIES:
            responses.pop(status, None)
    else:
        parameters += [_reference("parameters", "TraceParent")]
        documented = responses["200"].setdefault("headers", {})
        documented["Server-Timing"] = _reference("headers", "ServerTiming")
        documented["x-ignored-fields"] = _reference("headers", "IgnoredFields")
        if route.runs_model:
            parameters += [_reference("parameters", "RequestTimeout"), _reference("parameters", "Priority")]
            documented["x-truncated-inputs"] = _reference("headers", "TruncatedInputs")
        else:
            for status in ("408", "504"):
                responses.pop(status, None)
    if needs_key and route.access is not Access.OPEN:
        operation["security"] = [{scheme: []} for scheme in _SECURITY_SCHEMES]
        schema = _reference("schemas", route.dialect.error_model.__name__)
        responses["401"] = {**_UNAUTHORIZED, "content": {"application/json": {"schema": schema}}}
    for response in responses.values():
        response["headers"] = {**response.get("headers", {}), **headers}
    operation["parameters"] = [*operation.get("parameters", ()), *parameters]
    operation["responses"] = dict(sorted(responses.items()))


def _reference(kind: str, name: str) -> Json:
    return {"$ref": f"#/components/{kind}/{name}"}
