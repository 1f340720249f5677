"""The server that `penstock bench` and `penstock eval` send requests to: URL, API key, TLS, models, retries.

Both commands connect directly, without a proxy.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import math
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from .settings import CommandError, TargetSettings, UsageError

MAX_WAIT_S: Final = 300.0
"""Seconds that a request waits in total while the server is full (429) or starts (503)."""
TIMEOUT_S: Final = 660.0
"""Longer than penstock's default timeout of a request, whose 504 states the reason."""
_SHORTEST_WAIT_S: Final = 0.1
_USUAL_WAIT_S: Final = 1.0
"""Wait after a 429 or 503 without a Retry-After that can be read."""
_MODEL_LISTS: Final[Mapping[str, tuple[str, ...]]] = {
    "openai": ("/v1/models", "/models"),  # Infinity has no /v1
    "tei": ("/info",),
    "ollama": ("/api/tags",),
    "cohere": ("/v1/models",),
}
"""Paths that list the models in each dialect."""


class Address(NamedTuple):
    """TCP address of a server.

    Attributes:
        host: Name or IP address.
        tls: Certificates that the client trusts; None for HTTP without TLS.
    """

    host: str
    port: int
    tls: ssl.SSLContext | None = None


class Reply(NamedTuple):
    """Response of the server."""

    status: int
    headers: Message
    body: bytes


@dataclass(frozen=True, slots=True)
class TargetModel:
    """A model of the server.

    Attributes:
        dialect: API of the list of models: openai, tei, ollama or cohere.
        name: Name of the model in requests.
        listed_names: Names of all models that the server lists.
        has_v1: Whether paths of OpenAI's API begin with /v1.
    """

    dialect: str
    name: str
    listed_names: tuple[str, ...]
    has_v1: bool


class TargetServer:
    """A server under test.

    Args:
        url: Base URL, with or without /v1. A path before /v1 is kept.
        timeout_s: Seconds after which a request fails.

    Attributes:
        url: As the user gave it.
        base_path: Path before the paths of the API; without a slash at the end.

    Raises:
        UsageError: The URL, the key file or the file of certificates is invalid.
    """

    def __init__(self, url: str, settings: TargetSettings, timeout_s: float = TIMEOUT_S) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UsageError(f"URL: {error} (got {url!r})") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"URL: must begin with http:// or https:// and name a host (got {url!r})")
        is_tls = parts.scheme == "https"
        if settings.ca_file is not None and not is_tls:
            raise UsageError(f"--ca-file: needs a URL with https:// (got {url!r})")
        self.url = url
        self.address = Address(parts.hostname, port or (443 if is_tls else 80), _tls(settings) if is_tls else None)
        self.base_path = parts.path.rstrip("/").removesuffix("/v1")
        self.headers = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json"}
        if key := settings.key():
            self.headers["Authorization"] = f"Bearer {key}"
        self._model = settings.model
        self._timeout_s = timeout_s

    def request(self, method: str, path: str, body: bytes | None = None) -> Reply:
        """Sends one request and returns the response.

        Raises:
            CommandError: The server cannot be reached, or its certificate is not trusted.
        """
        host, port, tls = self.address
        connection = (
            http.client.HTTPConnection(host, port, timeout=self._timeout_s)
            if tls is None
            else http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=tls)
        )
        try:
            connection.request(method, path, body, self.headers)
            response = connection.getresponse()
            return Reply(response.status, response.headers, response.read())
        except ssl.SSLCertVerificationError as error:
            raise CommandError(
                f"{self.url}: the certificate is not trusted ({error.verify_message}); name its issuer with --ca-file"
            ) from error
        except ssl.SSLError as error:
            raise CommandError(f"{self.url}: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            raise CommandError(
                f"{self.url} cannot be reached: {str(error) or type(error).__name__}; check that the server runs and "
                "is ready"
            ) from error
        finally:
            connection.close()

    def post(self, path: str, body: bytes) -> dict[str, Any]:
        """Sends a request and returns the JSON object of its response. Waits while the server is full or starts.

        Raises:
            CommandError: The server cannot be reached, rejects the request, or is full or starting for longer than
                MAX_WAIT_S.
        """
        give_up_s = time.monotonic() + MAX_WAIT_S
        while (reply := self.request("POST", path, body)).status in (429, 503):
            wait_s = retry_after_s(reply.headers, time.time())
            if time.monotonic() + wait_s > give_up_s:
                break
            time.sleep(wait_s)
        if reply.status != 200:
            raise self.rejection_error(f"POST {path}", reply)
        try:
            answer = json.loads(reply.body)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise CommandError(f"{self.url}: POST {path} returned no JSON object; check the URL")
        return answer

    def rejection_error(self, request: str, reply: Reply) -> CommandError:
        """Returns the error of a request that the server rejected.

        Args:
            request: Name of the request in the message.
            reply: Response of the server.
        """
        reason = _reason(reply.body)
        if reply.status in (401, 403):
            reason = f"{reason.removesuffix('.')}; set --api-key or --api-key-file"
        return CommandError(f"{self.url}: {request} returned {reply.status}: {reason}")

    def find_model(self, task: str, dialects: Sequence[str]) -> TargetModel:
        """Detects the dialect of the server, and the model for a task.

        Args:
            task: embed, rerank or classify. The first model with this task in `endpoints` is taken, or else the first
                one without `endpoints`. `--model` has precedence.
            dialects: Dialects to try, in this order.

        Raises:
            CommandError: The server cannot be reached, needs a key, lists no model, or no model has the task. With
                --model and one dialect no list is needed.
        """
        tried = []
        for dialect in dialects:
            for path in _MODEL_LISTS[dialect]:
                reply = self.request("GET", self.base_path + path)
                if reply.status in (401, 403):
                    raise self.rejection_error(f"GET {self.base_path + path}", reply)
                if reply.status == 200 and (cards := _model_cards(reply.body)):
                    name = self._model or self._first_model(cards, task)
                    return TargetModel(dialect, name, tuple(name for name, _ in cards), path != "/models")
                tried.append(f"GET {self.base_path + path} returned {reply.status}")
        if self._model is None or len(dialects) > 1:
            raise CommandError(
                f"{self.url} lists no model: {', '.join(tried)}; check the URL, wait until the server is ready, or set "
                f"{'--dialect and ' if len(dialects) > 1 else ''}--model"
            )
        return TargetModel(dialects[0], self._model, (), has_v1=True)

    def _first_model(self, cards: Sequence[tuple[str, Sequence[str]]], task: str) -> str:
        fitting = [name for name, tasks in cards if task in tasks] or [name for name, tasks in cards if not tasks]
        if not fitting:
            listed_names = "; ".join(f"{name} ({', '.join(tasks)})" for name, tasks in cards)
            raise CommandError(f"{self.url}: no model has the task {task}: {listed_names}; serve one, or set --model")
        return fitting[0]

    def path(self, route: str, model: TargetModel) -> str:
        """Returns the path of a route of the API, such as /v1/embeddings, on this server."""
        return self.base_path + (route if model.has_v1 else route.removeprefix("/v1"))


def retry_after_s(headers: Message, now_s: float) -> float:
    """Returns the seconds to wait after a 429 or 503.

    Args:
        headers: Of the response. Retry-After is a number of seconds or an HTTP date (RFC 9110, section 10.2.3).
        now_s: Unix time, which a date is compared with if the response has no Date.
    """
    value = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", value, re.ASCII):
        return max(float(value), _SHORTEST_WAIT_S)
    at_s = _unix_time(value)
    if math.isnan(at_s):
        return _USUAL_WAIT_S
    date_s = _unix_time(headers.get("Date", ""))
    return max(at_s - (now_s if math.isnan(date_s) else date_s), _SHORTEST_WAIT_S)


def _unix_time(date: str) -> float:
    """Returns the Unix time of an HTTP date; NaN if it is none."""
    parsed = email.utils.parsedate_tz(date)
    if parsed is None:
        return math.nan
    try:
        return email.utils.mktime_tz(parsed)
    except (ValueError, OverflowError):
        return math.nan


def _tls(settings: TargetSettings) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if settings.ca_file is not None:
        try:
            context.load_verify_locations(settings.ca_file)
        except OSError as error:  # an SSLError is one
            raise UsageError(f"--ca-file: {settings.ca_file} is no PEM file with certificates: {error}") from error
    return context


def _model_cards(body: bytes) -> list[tuple[str, Sequence[str]]]:
    """Returns the name and the tasks of each model in a list of models; empty for any other response."""
    try:
        content = json.loads(body)
    except ValueError:
        return []
    if not isinstance(content, dict):
        return []
    rows: Sequence[Any] = content.get("data") or content.get("models") or [content]
    named = [(row.get("id") or row.get("name") or row.get("model_id"), row) for row in rows if isinstance(row, dict)]
    return [(name, row.get("endpoints") or ()) for name, row in named if isinstance(name, str)]


def _reason(body: bytes) -> str:
    """Returns the message of an error body, or the start of another body, in one line."""
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    for key in ("error", "message", "detail"):  # OpenAI, TEI and Ollama; Cohere; FastAPI
        if isinstance(found, dict) and key in found:
            found = found[key]
    text = " ".join((found if isinstance(found, str) else body.decode("utf-8", "replace")).split())
    return text if len(text) <= 300 else text[:297] + "..."
