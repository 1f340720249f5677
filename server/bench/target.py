"""The server under load: finds its dialect and its model, and builds requests."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from ..settings import CommandError, UsageError
from .load_generator import Address

_TIMEOUT_S: Final = 60.0
_LISTS: Final = {
    "openai": ("/v1/models", "/models"),  # Infinity has no /v1
    "tei": ("/info",),
    "ollama": ("/api/tags",),
    "cohere": ("/v1/models",),
}
"""Paths that list the models in each dialect, in the order of detection. cohere is not detected."""

Body = dict[str, Any]
_ROUTES: Final[Mapping[tuple[str, str], tuple[str, Callable[[str, str, list[str], str], Body]]]] = {
    ("openai", "embed"): (
        "/v1/embeddings",
        lambda model, _, texts, form: {"model": model, "input": texts, "encoding_format": form},
    ),
    ("openai", "rerank"): (
        "/v1/rerank",
        lambda model, query, texts, _: {"model": model, "query": query, "documents": texts},
    ),
    ("openai", "classify"): ("/classify", lambda model, _, texts, __: {"model": model, "input": texts}),
    ("cohere", "embed"): (
        "/v2/embed",
        lambda model, _, texts, form: {
            "model": model,
            "texts": texts,
            "input_type": "search_document",
            "embedding_types": [form],
        },
    ),
    ("cohere", "rerank"): (
        "/v2/rerank",
        lambda model, query, texts, _: {"model": model, "query": query, "documents": texts},
    ),
    ("cohere", "classify"): ("/v1/classify", lambda model, _, texts, __: {"model": model, "inputs": texts}),
    ("tei", "embed"): ("/embed", lambda _, __, texts, ___: {"inputs": texts}),
    ("tei", "rerank"): ("/rerank", lambda _, query, texts, __: {"query": query, "texts": texts}),
    ("tei", "classify"): ("/predict", lambda _, __, texts, ___: {"inputs": [[text] for text in texts]}),
    ("ollama", "embed"): ("/api/embed", lambda model, _, texts, __: {"model": model, "input": texts}),
}
"""By dialect and task: the path, and the body by model, query, texts and format of vectors."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and how to send it requests.

    Attributes:
        url: Base URL as the user gave it.
        address: Its TCP address.
        dialect: API of the requests.
        task: embed, rerank or classify.
        model: Name of the model in requests.
        path: Path of the requests.
        encoding_format: Format of vectors: float or base64.
        api_key: Sent as a Bearer token; "" for none.
        listed: Models that the server lists.
    """

    url: str
    address: Address
    dialect: str
    task: str
    model: str
    path: str
    encoding_format: str
    api_key: str = field(default="", repr=False)
    listed: tuple[str, ...] = ()

    def request(self, texts: list[str], query: str = "") -> bytes:
        """Returns a complete HTTP/1.1 request."""
        body = self._body(texts, query)
        head = [f"POST {self.path} HTTP/1.1", f"Host: {urlsplit(self.url).netloc}", "Content-Type: application/json"]
        head += [f"{name}: {value}" for name, value in _authorization(self.api_key).items()]
        return "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body

    def check(self, texts: list[str], query: str) -> None:
        """Sends one request.

        Raises:
            CommandError: The server does not return one result per text.
        """
        body = self._body(texts, query)
        headers = {"Content-Type": "application/json", **_authorization(self.api_key)}
        status, answer = _exchange(self.url, self.address, "POST", self.path, body, headers)
        if status != 200:
            listed = f"; the server lists {', '.join(self.listed)}" if status == 404 and self.listed else ""
            raise CommandError(
                f"{self.url}: POST {self.path} for model {self.model} returned {status}: {_short(answer)}{listed}"
            )
        if (count := _num_results(answer)) != len(texts):
            raise CommandError(f"{self.url}: POST {self.path} returned {count} results for {len(texts)} texts")

    def _body(self, texts: list[str], query: str) -> bytes:
        return json.dumps(_ROUTES[self.dialect, self.task][1](self.model, query, texts, self.encoding_format)).encode()


def find_target(url: str, dialect: str, task: str, model: str | None, encoding_format: str, api_key: str) -> Target:
    """Finds the dialect and the model of a server.

    Args:
        url: Base URL; a path before /v1 is kept.
        dialect: A dialect, or "auto" to detect it.
        task: embed, rerank or classify.
        model: Model to request; None: the first model that the server lists.
        encoding_format: Format of vectors: float or base64.
        api_key: "" for none.

    Raises:
        UsageError: The URL is invalid, or the dialect lacks the task or the format.
        CommandError: The server cannot be reached, is not ready, needs a key, or lists no model.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"URL: {error} (got {url!r})") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"URL: must begin with http:// or https:// and name a host (got {url!r})")
    is_tls = parts.scheme == "https"
    address = Address(parts.hostname, port or (443 if is_tls else 80), is_tls)
    base = parts.path.rstrip("/").removesuffix("/v1")
    dialects = ("openai", "tei", "ollama") if dialect == "auto" else (dialect,)
    found, path, names = _listed_models(url, address, base, dialects, api_key, is_required=model is None)
    if (found, task) not in _ROUTES:
        raise UsageError(f"--task {task}: the dialect {found} has no such route")
    if encoding_format != "float" and (found not in ("openai", "cohere") or task != "embed"):
        raise UsageError(f"--encoding-format {encoding_format}: {task} requests of the dialect {found} have no formats")
    route = _ROUTES[found, task][0]
    route = base + (route.removeprefix("/v1") if path == "/models" else route)
    return Target(url, address, found, task, model or names[0], route, encoding_format, api_key, tuple(names))


def _listed_models(
    url: str, address: Address, base: str, dialects: Sequence[str], api_key: str, *, is_required: bool
) -> tuple[str, str, list[str]]:
    """Returns the dialect of a server, the path of its list of models, and their names.

    Raises CommandError if there is no list, unless a single dialect is given and the list is not required.
    """
    tried = []
    for dialect in dialects:
        for path in _LISTS[dialect]:
            status, answer = _exchange(url, address, "GET", base + path, b"", _authorization(api_key))
            if status in (401, 403):
                raise CommandError(f"{url}: GET {base + path} returned {status}; set --api-key or --api-key-file")
            if status == 200 and (names := _model_names(answer)):
                return dialect, path, names
            tried.append(f"GET {base + path} returned {status}")
    if is_required or len(dialects) > 1:
        raise CommandError(
            f"{url} lists no model: {', '.join(tried)}; check the URL, wait until the server is ready, or set "
            "--dialect and --model"
        )
    return dialects[0], _LISTS[dialects[0]][0], []


def _authorization(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _exchange(
    url: str, address: Address, method: str, path: str, body: bytes, headers: Mapping[str, str]
) -> tuple[int, bytes]:
    """Returns status and body of a response. Raises CommandError if the server cannot be reached."""
    kind = http.client.HTTPSConnection if address.is_tls else http.client.HTTPConnection
    connection = kind(address.host, address.port, timeout=_TIMEOUT_S)
    try:
        connection.request(method, path, body or None, dict(headers))
        response = connection.getresponse()
        return response.status, response.read()
    except ssl.SSLError as error:
        raise CommandError(f"{url}: {error}") from error
    except (OSError, http.client.HTTPException) as error:
        raise CommandError(
            f"{url} cannot be reached: {str(error) or type(error).__name__}; check that the server runs and is ready"
        ) from error
    finally:
        connection.close()


def _model_names(answer: bytes) -> list[str]:
    """Returns the names in a list of models; empty for any other response."""
    try:
        content = json.loads(answer)
    except ValueError:
        return []
    if not isinstance(content, dict):
        return []
    rows: Sequence[Any] = content.get("data") or content.get("models") or [content]
    names = [row.get("id") or row.get("name") or row.get("model_id") for row in rows if isinstance(row, dict)]
    return [name for name in names if isinstance(name, str)]


def _num_results(answer: bytes) -> int:
    """Returns the number of results in a response of any dialect; 0 if there are none."""
    try:
        found = json.loads(answer)
    except ValueError:
        return 0
    if isinstance(found, dict):
        found = next((found[key] for key in ("data", "results", "embeddings", "classifications") if key in found), [])
    if isinstance(found, dict):  # Cohere: a list for each type of embedding
        found = next(iter(found.values()), [])
    return len(found) if isinstance(found, list) else 0


def _short(answer: bytes) -> str:
    text = " ".join(answer.decode("utf-8", "replace").split())
    return text if len(text) <= 300 else text[:297] + "..."
