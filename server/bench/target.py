"""What a load test sends: the route and the body of each dialect and task."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ..settings import BenchSettings, CommandError, UsageError
from ..target_server import TargetModel, TargetServer

_DETECTED: Final = ("openai", "tei", "ollama")
"""Dialects in the order of detection. cohere must be named."""

Body = dict[str, Any]


class Content(NamedTuple):
    """The content of a request.

    Attributes:
        encoding_format: Format of vectors: float or base64.
    """

    model: str
    texts: list[str]
    query: str
    encoding_format: str


class _Route(NamedTuple):
    path: str
    body: Callable[[Content], Body]
    has_formats: bool = False


def _rerank(content: Content) -> Body:
    return {"model": content.model, "query": content.query, "documents": content.texts}


_ROUTES: Final[Mapping[tuple[str, str], _Route]] = {
    ("openai", "embed"): _Route(
        "/v1/embeddings",
        lambda c: {"model": c.model, "input": c.texts, "encoding_format": c.encoding_format},
        has_formats=True,
    ),
    ("openai", "rerank"): _Route("/v1/rerank", _rerank),
    ("openai", "classify"): _Route("/classify", lambda c: {"model": c.model, "input": c.texts}),
    ("cohere", "embed"): _Route(
        "/v2/embed",
        lambda c: {
            "model": c.model,
            "texts": c.texts,
            "input_type": "search_document",
            "embedding_types": [c.encoding_format],
        },
        has_formats=True,
    ),
    ("cohere", "rerank"): _Route("/v2/rerank", _rerank),
    ("cohere", "classify"): _Route("/v1/classify", lambda c: {"model": c.model, "inputs": c.texts}),
    ("tei", "embed"): _Route("/embed", lambda c: {"inputs": c.texts}),
    ("tei", "rerank"): _Route("/rerank", lambda c: {"query": c.query, "texts": c.texts}),
    ("tei", "classify"): _Route("/predict", lambda c: {"inputs": [[text] for text in c.texts]}),
    ("ollama", "embed"): _Route("/api/embed", lambda c: {"model": c.model, "input": c.texts}),
}
"""Route by dialect and task."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and how to send it the requests of a load test.

    Attributes:
        model: Model of the requests, with the dialect.
        encoding_format: Format of vectors: float or base64.
    """

    server: TargetServer
    model: TargetModel
    task: str
    encoding_format: str

    @classmethod
    def find(cls, url: str, settings: BenchSettings) -> Target:
        """Finds the dialect and the model of a server.

        Raises:
            UsageError: The URL is invalid, or the dialect lacks the task or the format.
            CommandError: The server cannot be reached, is not ready, needs a key, or lists no model.
        """
        server, task = TargetServer(url, settings, settings.timeout), settings.task
        dialects = _DETECTED if settings.dialect == "auto" else (settings.dialect,)
        model = server.find_model(task, dialects)
        route = _ROUTES.get((model.dialect, task))
        if route is None:
            raise UsageError(f"--task {task}: the dialect {model.dialect} has no such route")
        if settings.encoding_format != "float" and not route.has_formats:
            raise UsageError(
                f"--encoding-format {settings.encoding_format}: {task} requests of the dialect {model.dialect} have no "
                "formats"
            )
        return cls(server, model, task, settings.encoding_format)

    @property
    def path(self) -> str:
        """Path of the requests."""
        return self.server.path(self._route.path, self.model)

    def request(self, texts: list[str], query: str = "") -> bytes:
        """Returns a complete HTTP/1.1 request."""
        body = self._body(texts, query)
        head = [f"POST {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in self.server.headers.items())]
        return "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body

    def check(self, texts: list[str], query: str) -> None:
        """Sends one request.

        Raises:
            CommandError: The server does not return one result per text.
        """
        request = f"POST {self.path} for model {self.model.name}"
        reply = self.server.exchange("POST", self.path, self._body(texts, query))
        if reply.status != 200:
            listed = f"; the server lists {', '.join(self.model.listed)}" if self.model.listed else ""
            failure = self.server.failure(request, reply)
            raise CommandError(f"{failure}{listed}") if reply.status == 404 else failure
        if (count := _num_results(reply.body)) != len(texts):
            raise CommandError(f"{self.server.url}: {request} returned {count} results for {len(texts)} texts")

    @property
    def _route(self) -> _Route:
        return _ROUTES[self.model.dialect, self.task]

    def _body(self, texts: list[str], query: str) -> bytes:
        return json.dumps(self._route.body(Content(self.model.name, texts, query, self.encoding_format))).encode()


def _num_results(body: bytes) -> int:
    """Returns the number of results in a response of any dialect; 0 if there are none."""
    try:
        found = json.loads(body)
    except ValueError:
        return 0
    if isinstance(found, dict):
        found = next((found[key] for key in ("data", "results", "embeddings", "classifications") if key in found), [])
    if isinstance(found, dict):  # Cohere: a list for each type of embedding
        found = next(iter(found.values()), [])
    return len(found) if isinstance(found, list) else 0
