"""The client of `penstock bench` and `penstock eval`, against small fake servers."""

import socket
from collections.abc import Callable
from email.message import Message
from email.utils import formatdate
from pathlib import Path

import pytest

from penstock.server import target_server
from penstock.server.settings import CommandError, TargetSettings, UsageError
from penstock.server.target_server import TargetServer, retry_after_s

from ..tables import cases
from .fake_server import Answered, Received, Serve, openai_server

DIALECTS = ("openai", "tei", "ollama")
NOW_S = 1_700_000_000.0


def listing(path: str, content: object) -> Callable[[Received], Answered]:
    return lambda received: Answered(content) if received.path == path else Answered({"detail": "none"}, 404)


@cases(__file__, "path", "content", "dialect", "name", "route")
def test_dialect_and_model_follow_the_list(
    serve: Serve, path: str, content: object, dialect: str, name: str, route: str
) -> None:
    server = TargetServer(serve(listing(path, content)), TargetSettings())
    model = server.find_model("embed", DIALECTS)
    assert (model.dialect, model.name, server.path("/v1/embeddings", model)) == (dialect, name, route)


def test_first_model_with_the_task_is_chosen(serve: Serve) -> None:
    cards = [{"id": "ranker", "endpoints": ["rerank"]}, {"id": "embedder", "endpoints": ["embed", "rerank"]}]
    url = serve(listing("/v1/models", {"data": cards}))
    server = TargetServer(url, TargetSettings())
    chosen = {task: server.find_model(task, DIALECTS).name for task in ("embed", "rerank")}
    assert chosen == {"embed": "embedder", "rerank": "ranker"}
    message = (
        r"no model has the task classify: ranker \(rerank\); embedder \(embed, rerank\); serve one, or set --model"
    )
    with pytest.raises(CommandError, match=message):
        server.find_model("classify", DIALECTS)
    cards.append({"id": "unknown", "endpoints": []})
    assert server.find_model("classify", DIALECTS).name == "unknown"
    named = TargetServer(url, TargetSettings(model="other")).find_model("embed", DIALECTS)
    assert (named.name, named.listed_names) == ("other", ("ranker", "embedder", "unknown"))


def test_server_without_list_needs_a_model_name(serve: Serve) -> None:
    url = serve(lambda _: Answered(b"<html>", 404))
    with pytest.raises(CommandError, match=r"lists no model: GET /p/v1/models returned 404.* or set --model"):
        TargetServer(f"{url}/p/v1/", TargetSettings()).find_model("embed", ("openai",))
    for body in (b"<html>", b"[1]", b'{"data": [1, {"id": 2}]}'):
        answered = Answered(body)
        with pytest.raises(CommandError, match="lists no model"):
            TargetServer(serve(lambda _, it=answered: it), TargetSettings()).find_model("embed", ("openai",))
    server = TargetServer(f"{url}/p/v1/", TargetSettings(model="m"))
    model = server.find_model("embed", ("openai",))
    assert (model.name, server.path("/v1/embeddings", model)) == ("m", "/p/v1/embeddings")

    with pytest.raises(CommandError, match=r"is ready, or set --dialect and --model$"):
        TargetServer(url, TargetSettings(model="m")).find_model("embed", DIALECTS)


@pytest.mark.parametrize(("source", "status"), [("setting", 401), ("file", 403), ("variable", 401)])
def test_key_is_sent_and_its_lack_is_explained(
    serve: Serve, source: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(received: Received) -> Answered:
        has_key = received.headers.get("Authorization") == "Bearer secret"
        return openai_server(received) if has_key else Answered({"message": "no key."}, status)

    url, file = serve(answer), tmp_path / "key"
    message = f"GET /v1/models returned {status}: no key; set --api-key or --api-key-file"
    with pytest.raises(CommandError, match=message):
        TargetServer(url, TargetSettings()).find_model("embed", DIALECTS)
    file.write_text("\ufeff# Keys of the server.\nsecret\nother\n", "utf-8")
    if source == "variable":
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
    settings = {"setting": TargetSettings(api_key=("secret", "b")), "file": TargetSettings(api_key_file=file)}
    server = TargetServer(url, settings.get(source, TargetSettings()))
    assert server.find_model("embed", DIALECTS).name == "m"
    assert server.post("/v1/embeddings", b'{"model": "m", "input": ["a"]}')["model"] == "m"


def test_self_signed_certificate_needs_ca_file(serve: Serve, certificate: tuple[Path, Path]) -> None:
    url = serve(openai_server, certificate)
    with pytest.raises(CommandError, match=r"not trusted \(self-signed certificate\); name its issuer with --ca-file"):
        TargetServer(url, TargetSettings()).find_model("embed", DIALECTS)
    assert TargetServer(url, TargetSettings(ca_file=certificate[0])).find_model("embed", DIALECTS).name == "m"
    with pytest.raises(UsageError, match=r"--ca-file: .* is no PEM file with certificates"):
        TargetServer(url, TargetSettings(ca_file=Path(__file__)))


@cases(__file__, "url", "address", "host", "path")
def test_url_has_an_address_and_a_base_path(url: str, address: list[str | int], host: str, path: str) -> None:
    server = TargetServer(url, TargetSettings())
    assert (list(server.address[:2]), server.headers["Host"], server.base_path) == (address, host, path)
    assert (server.address.tls is not None) is url.startswith("https:")


@cases(__file__, "url", "settings", "message")
def test_wrong_url_or_file_is_a_usage_error(url: str, settings: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TargetServer(url, TargetSettings(**{name: Path(file) for name, file in settings.items()}))


@cases(__file__, "retry_after", "date", "seconds")
def test_retry_after_is_seconds_or_a_date(retry_after: str | None, date: str | None, seconds: float) -> None:
    headers = Message()
    for name, value in (("Retry-After", retry_after), ("Date", date)):
        if value is not None:
            headers[name] = value
    assert retry_after_s(headers, NOW_S) == seconds


@pytest.mark.parametrize("status", [429, 503])
def test_full_server_is_asked_again(serve: Serve, status: int) -> None:
    waits = iter(["0", formatdate(0, usegmt=True)])

    def answer(received: Received) -> Answered:
        wait = next(waits, None)
        return openai_server(received) if wait is None else Answered({}, status, (("Retry-After", wait),))

    server = TargetServer(serve(answer), TargetSettings())
    assert server.post("/v1/embeddings", b'{"model": "m", "input": ["a"]}')["model"] == "m"
    assert next(waits, None) is None


def test_wait_ends_before_it_exceeds_the_maximum(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_server, "MAX_WAIT_S", 0.15)
    statuses = []

    def answer(_: Received) -> Answered:
        statuses.append(429)
        return Answered({"error": {"message": "queue full"}}, 429, (("Retry-After", "0.1"),))

    with pytest.raises(CommandError, match="POST /x returned 429: queue full"):
        TargetServer(serve(answer), TargetSettings()).post("/x", b"{}")
    assert len(statuses) == 2


@cases(__file__, "body", "status", "message")
def test_rejected_request_states_the_reason(serve: Serve, body: object, status: int, message: str) -> None:
    answered = Answered(body.encode() if isinstance(body, str) else body, status)
    with pytest.raises(CommandError, match=message):
        TargetServer(serve(lambda _: answered), TargetSettings()).post("/x", b"{}")


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_silent_server_ends_at_the_timeout(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"{scheme}://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(CommandError, match=f"{url} cannot be reached: .*timed out"):
            TargetServer(url, TargetSettings(), 0.05).request("GET", "/")


def test_unreachable_server_is_named(serve: Serve) -> None:
    url = serve(openai_server).replace("http:", "https:")
    with pytest.raises(CommandError, match=rf"^{url}: \[SSL"):
        TargetServer(url, TargetSettings()).request("GET", "/")
    with pytest.raises(CommandError, match=r"http://127.0.0.1:9 cannot be reached: .*Connection refused"):
        TargetServer("http://127.0.0.1:9", TargetSettings()).request("GET", "/")
