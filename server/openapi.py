"""The OpenAPI document, with the parts that FastAPI cannot derive from the routes: headers, keys and common errors.

Every operation stands in it once, on the path that the clients of its dialect call. Other spellings of a path are left
out; the document's description lists them.
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

In request bodies null means absent, and a key that a request has no use for is refused by its name. Whether a model can
do what a request asks for is seen when it runs: what it cannot do is a 400, or a 424 on the routes of TEI.

Each operation is listed once. The same is found under `/embeddings`, `/models`, `/models/{name}`, `/v1/pooling` and
`/ping`, under every path with a slash at its end, and under `/v1/v1/...` and `/v1/v2/...`. `POST /` answers
TEI's bodies as `/invocations` does. `/api/generate`, `/api/chat`, `/v1/chat/completions` and `/v1/completions` say what
this server has instead of text.
"""
TAGS: Final = [
    {"name": "openai", "description": "Embeddings for the clients of OpenAI, Jina, Voyage and vLLM; the models."},
    {"name": "jina", "description": "Vectors of tokens."},
    {"name": "cohere", "description": "Embed, tokenize and detokenize."},
    {"name": "rerank", "description": "For the clients of Cohere, Jina, Voyage, vLLM and TEI."},
    {"name": "score", "description": "Pairs of texts."},
    {"name": "classify", "description": "For the clients of vLLM and Cohere."},
    {"name": "vllm", "description": "What the model makes of texts, its load, and SageMaker's one route for all."},
    {"name": "tokenize", "description": "For the clients of vLLM, TEI and Cohere."},
    {"name": "tei", "description": "Text Embeddings Inference: answers are bare lists."},
    {"name": "ollama", "description": "Embeddings, and the models that are served."},
    {"name": "penstock", "description": "Several kinds of vectors from one forward."},
    {"name": "operations", "description": "Health, metrics, version."},
]

# Numbers in headers are text with a pattern: clients send text, and generated clients must do so.
_PARAMETERS: Final[Json] = {
    "RequestId": {
        "name": "x-request-id",
        "in": "header",
        "description": "Sent back, and found in logs; replaced unless it is up to 128 visible ASCII characters.",
        "schema": {"type": "string"},
    },
    "TraceParent": {
        "name": "traceparent",
        "in": "header",
        "description": "The span that the request belongs to (W3C), where the server sends traces.",
        "schema": {"type": "string"},
    },
    "RequestTimeout": {
        "name": "x-request-timeout",
        "in": "header",
        "description": "Seconds after which the answer is of no use: the request is given up with 408.",
        "schema": {"type": "string", "pattern": TIMEOUT_PATTERN},
        "example": "2.5",
    },
    "Priority": {
        "name": "x-priority",
        "in": "header",
        "description": (
            f"From -{MAX_PRIORITY} to {MAX_PRIORITY}, or one of {PRIORITY_NAMES}. Lower goes first; a level is worth a "
            "second of waiting. A `priority` in the body wins."
        ),
        "schema": {"type": "string", "pattern": PRIORITY_PATTERN},
        "example": "0",
    },
}
_HEADERS: Final[Json] = {
    "RequestId": {"description": "Of the request, or made for it.", "required": True, "schema": {"type": "string"}},
    "ServerTiming": {
        "description": "Milliseconds of the stages: tokenization, queue, inference, encode (W3C).",
        "schema": {"type": "string"},
    },
}
_SECURITY_SCHEMES: Final[Json] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "`Authorization: Bearer KEY`, or the key alone."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "api-key", "description": "As clients of Azure send it."},
}
_UNAUTHORIZED: Final[Json] = {
    "description": "The API key is missing or wrong.",
    "headers": {"WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}}},
}
_ERRORS_OF_BODIES: Final = ("400", "408", "413", "415", "422", "424", "429", "504")


class DocumentedApp(FastAPI):
    """FastAPI with a complete document.

    Args:
        names: Served names; examples show the first one.
        needs_key: Routes that are not open need an API key.
        routes: All routes.
        options: FastAPI's.
    """

    def __init__(self, *, names: Sequence[str], needs_key: bool, routes: RouteTable, **options: Any) -> None:
        self._names, self._needs_key, self._table = tuple(names), needs_key, routes
        self._document: Json | None = None
        self._encoded: dict[str, bytes] = {}  # by the path below which a proxy serves all of this
        super().__init__(
            description=DESCRIPTION, openapi_tags=TAGS, openapi_url=None, routes=[*routes.routes], **options
        )

    def openapi(self) -> Json:
        """Returns the document; it is made once."""
        if self._document is None:
            self._document = super().openapi()
            _complete(self._document, self._names[:1], self._table, needs_key=self._needs_key)
        return self._document

    def encoded_document(self, root_path: str) -> bytes:
        """Returns the document as JSON for a server below a path of a proxy.

        It is encoded once: FastAPI's own route encodes it anew for every request, which takes 30 ms.
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
    responses, headers = operation["responses"], {"x-request-id": _reference("headers", "RequestId")}
    parameters = [_reference("parameters", "RequestId")]
    if "requestBody" not in operation:
        for status in _ERRORS_OF_BODIES:
            responses.pop(status, None)
    else:
        parameters += [_reference("parameters", "TraceParent")]
        if route.runs_model:
            parameters += [_reference("parameters", "RequestTimeout"), _reference("parameters", "Priority")]
        else:
            for status in ("408", "504"):
                responses.pop(status, None)
        responses["200"].setdefault("headers", {})["Server-Timing"] = _reference("headers", "ServerTiming")
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
