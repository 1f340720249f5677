"""A server on a network: HTTPS, a file of API keys, web pages of one origin, and no secrets in its log."""

import os
import shutil
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from penstock.server.commands import cli, serve

from ..ports import free_port
from ..servers import Launch, Server
from ..waiting import wait_until

PAGE = "https://app.example.com"
BODY = {"input": "a private text"}


def is_engine(pid: int) -> bool:
    try:
        return b"penstock.engine.core.core_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


class SecureServer(NamedTuple):
    """A server with HTTPS, two API keys and one allowed origin.

    Attributes:
        server: The server.
        keys: Its file of API keys.
        certificate: Its certificate and key.
        client: A client that trusts its certificate.
        early: Its response while the engine loads.
    """

    server: Server
    keys: Path
    certificate: tuple[Path, ...]
    client: httpx.Client
    early: httpx.Response

    def embed(self, key: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}", "origin": PAGE}
        return self.client.post("/v1/embeddings", json=BODY, headers=headers)

    def add_key(self, key: str) -> str:
        """Appends a key to the file and waits until the server accepts it."""
        self.keys.write_text(f"{self.keys.read_text()}{key}\n")
        wait_until(lambda: self.embed(key).status_code == 200)
        return key


@pytest.fixture(scope="module")
def secure(
    launch: Launch,
    default_model,
    certificate: tuple[Path, Path],
    renewed_certificate: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SecureServer]:
    folder = tmp_path_factory.mktemp("keys")
    keys = folder / "keys"
    copied = tuple(shutil.copy(file, folder / file.name) for file in certificate)
    keys.write_text("# two clients\nfirst-secret\nsecond-secret\n")
    files = ("--ssl-certfile", str(copied[0]), "--ssl-keyfile", str(copied[1]), "--api-key-file", str(keys))
    server = launch("--cors-origins", PAGE, *files, "--metrics-port", str(free_port()), ready=False)
    wait_until(lambda: any(map(is_engine, server.children())))
    (engine,) = filter(is_engine, server.children())
    os.kill(engine, signal.SIGSTOP)
    trust = ssl.create_default_context(cafile=str(certificate[0]))
    trust.load_verify_locations(renewed_certificate[0])
    with httpx.Client(base_url=f"https://127.0.0.1:{server.port}", verify=trust, timeout=120) as client:

        def health() -> tuple[int, int]:
            assert server.process.poll() is None, server.log.read_text()
            try:
                return client.get("/health/live").status_code, client.get("/health/ready").status_code
            except httpx.ConnectError:
                return 0, 0

        wait_until(lambda: health() != (0, 0))
        assert health() == (200, 503)
        early = client.post("/v1/embeddings", json=BODY, headers={"authorization": "Bearer first-secret"})
        os.kill(engine, signal.SIGCONT)
        wait_until(lambda: health() != (200, 503))
        assert health() == (200, 200)
        yield SecureServer(server, keys, copied, client, early)
    # An open TLS connection would delay the end of the server, so the client is closed first.
    assert server.stop() == 0
    assert_log_is_clean(server)


def assert_log_is_clean(server: Server) -> None:
    log = server.log.read_text()
    for part in ("secret", "private", "Traceback"):
        assert part not in log


def test_loading_server_answers_503_over_https(secure: SecureServer) -> None:
    assert (secure.early.status_code, secure.early.headers["retry-after"]) == (503, "1")


def test_metrics_port_serves_metrics_and_health_in_plain_http(secure: SecureServer) -> None:
    key = secure.add_key("counted-secret")
    assert secure.client.get("/metrics", headers={"api-key": key}).status_code == 404
    assert secure.server.metric("penstock_inputs_total") >= 1
    with httpx.Client(base_url=f"http://127.0.0.1:{secure.server.metrics_port}", timeout=120) as client:
        assert client.get("/health/ready").json()["status"] == client.get("/ping").json()["status"] == "ok"
        missing = client.post("/v1/embeddings", json=BODY)
        assert (missing.status_code, missing.json()["error"]["message"][-14:]) == (404, " on this port.")
        assert client.post("/metrics").status_code == 405


def test_sighup_reads_certificate_and_keys_again(
    secure: SecureServer, certificate: tuple[Path, Path], renewed_certificate: tuple[Path, Path]
) -> None:
    trust = ssl.create_default_context(cafile=str(certificate[0]))
    trust.load_verify_locations(renewed_certificate[0])

    def connect() -> ssl.SSLSocket:
        # Without a host name, as clients that connect to an IP address.
        return trust.wrap_socket(
            socket.create_connection(("127.0.0.1", secure.server.port), 120), server_hostname="127.0.0.1"
        )

    old, new = (ssl.PEM_cert_to_DER_cert(pair[0].read_text()) for pair in (certificate, renewed_certificate))
    with connect() as before:
        assert before.getpeercert(binary_form=True) == old
        before.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n")  # a request that has begun
        for source, target in zip(renewed_certificate, secure.certificate, strict=True):
            Path(shutil.copy(source, target.with_suffix(".new"))).replace(target)
        secure.keys.write_text("fifth-secret\n")
        secure.server.process.send_signal(signal.SIGHUP)
        secure.server.wait_for_log("--ssl-certfile: read again")
        assert "--api-key-file: read again; valid keys: 1" in secure.server.log.read_text()
        with connect() as after:
            assert after.getpeercert(binary_form=True) == new
        before.sendall(b"\r\n")
        assert before.recv(15) == b"HTTP/1.1 200 OK"
    assert secure.embed("fifth-secret").status_code == 200


@pytest.mark.parametrize("body", [b'{"input": "a private text', b'{"input": {"text": "a private text"}}'])
def test_rejected_text_is_not_in_the_log(secure: SecureServer, body: bytes) -> None:
    headers = {"api-key": secure.add_key("third-secret")}
    assert secure.client.post("/v1/embeddings", content=body, headers=headers).status_code == 400
    assert_log_is_clean(secure.server)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--ssl-keyfile", "{key}"), "--ssl-keyfile: needs --ssl-certfile"),
        (("--ssl-certfile", "{certificate}"), "{certificate} must be a PEM certificate with its unencrypted key"),
        (("--ssl-certfile", "{key}", "--ssl-keyfile", "{key}"), "{key} and {key} must be a PEM certificate with its"),
    ],
)
def test_unusable_files_are_one_line(
    flags: tuple[str, ...], part: str, certificate: tuple[Path, Path], default_model, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(serve, "configure_logging", lambda *_: None)
    given = [flag.format(certificate=certificate[0], key=certificate[1]) for flag in flags]
    assert cli.main(["serve", "--host", "127.0.0.1", "--port", "0", *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert part.format(certificate=certificate[0], key=certificate[1]) in line
