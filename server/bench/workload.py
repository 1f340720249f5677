"""Texts of a load test, and the route and request body of each dialect and task."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ..settings import BenchSettings, CommandError, UsageError
from ..target_server import TargetModel, TargetServer

WORDS: Final = tuple(Path(__file__).with_name("words.txt").read_text("utf-8").split())
"""Frequent English words. English tokenizers make one token of each."""
_SHARES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_LENGTHS: Final = {
    "queries": (2, 6, 7, 10, 13, 22, 29, 43, 79),
    "documents": (33, 127, 158, 204, 260, 309, 356, 473, 1541),
    "mixed": (1, 5, 10, 18, 44, 142, 366, 1424, 4096),
}
"""Words per text at _SHARES: questions of Banking77, abstracts of SciFact, human turns of ShareGPT (tokens there)."""
BUILT_IN_WORKLOADS: Final = tuple(_LENGTHS)
_MOST_TEXTS: Final = 8192
"""Distinct texts in one round, so that a cache of the server finds few of them."""
_MIN_REQUESTS: Final = 64
_DETECTED: Final = ("openai", "tei", "ollama")
"""Dialects in the order of detection. cohere must be named."""
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a load test.

    Attributes:
        name: One of BUILT_IN, or the path of a file.
        texts_per_request: Texts, or documents of a query, in each request.
        max_words: Maximum length of the texts of a built-in workload.
        texts: The texts of the file; empty for a built-in workload.
    """

    name: str
    texts_per_request: int
    max_words: int
    texts: tuple[str, ...] = ()

    @classmethod
    def open(cls, name: str, texts_per_request: int, max_words: int) -> Workload:
        """Returns a built-in workload, or one with the texts of a file.

        Raises:
            UsageError: The file cannot be read, or a line has no text.
        """
        return cls(name, texts_per_request, max_words, () if name in BUILT_IN_WORKLOADS else _texts_of(Path(name)))

    def requests(self, seed: int) -> list[list[str]]:
        """Returns the texts of many requests, the same for the same seed."""
        rng = random.Random(f"{self.name}-{seed}")
        count = max(_MOST_TEXTS // self.texts_per_request, _MIN_REQUESTS)
        return [[self._text(rng) for _ in range(self.texts_per_request)] for _ in range(count)]

    def query(self, seed: int) -> str:
        """Returns a query for rerank requests: a text of the length of "queries"."""
        return replace(self, name="queries", texts=())._text(random.Random(seed))

    def longest_text(self) -> str:
        """Returns a text of the maximum length, which a server must accept before the load starts."""
        if self.texts:
            return max(self.texts, key=len)
        return " ".join(random.Random(0).choices(WORDS, k=min(_LENGTHS[self.name][-1], self.max_words)))

    def _text(self, rng: random.Random) -> str:
        if self.texts:
            return rng.choice(self.texts)
        length = round(float(np.interp(rng.random(), _SHARES, _LENGTHS[self.name])))
        return " ".join(rng.choices(WORDS, k=min(length, self.max_words)))


def _texts_of(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(BUILT_IN_WORKLOADS)
        raise UsageError(f"--load: {path} is not one of {known}, and cannot be read as a file: {error}") from error
    texts = [
        _json_text(line, f"--load: line {number} of {path}") if path.suffix == ".jsonl" else line
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not texts:
        raise UsageError(f"--load: {path} has no text; write one text per line")
    return tuple(texts)


def _json_text(line: str, place: str) -> str:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{place} is not JSON: {error}") from error
    text = row.get("text") if isinstance(row, dict) else row
    if not isinstance(text, str) or not text:
        raise UsageError(f'{place} has no text; write {{"text": "..."}}')
    return text


class RequestContent(NamedTuple):
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
    body: Callable[[RequestContent], Body]
    has_formats: bool = False


def _rerank(content: RequestContent) -> Body:
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
class BenchTarget:
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
    def find(cls, url: str, settings: BenchSettings) -> BenchTarget:
        """Finds the dialect and the model of a server.

        Raises:
            UsageError: The URL is invalid, or the dialect lacks the task or the format.
            CommandError: The server cannot be reached, is not ready, needs a key, or lists no model.
        """
        server = TargetServer(url, settings, settings.timeout)
        task = settings.task
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
        reply = self.server.request("POST", self.path, self._body(texts, query))
        if reply.status != 200:
            listed = f"; the server lists {', '.join(self.model.listed_names)}" if self.model.listed_names else ""
            failure = self.server.rejection_error(request, reply)
            raise CommandError(f"{failure}{listed}") if reply.status == 404 else failure
        if (count := _num_results(reply.body)) != len(texts):
            raise CommandError(f"{self.server.url}: {request} returned {count} results for {len(texts)} texts")

    @property
    def _route(self) -> _Route:
        return _ROUTES[self.model.dialect, self.task]

    def _body(self, texts: list[str], query: str) -> bytes:
        return json.dumps(
            self._route.body(RequestContent(self.model.name, texts, query, self.encoding_format))
        ).encode()


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
