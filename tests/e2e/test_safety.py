"""A server on a network: HTTPS, a file of API keys, web pages of one origin, and no secrets in its log."""

import os
import shutil
import signal
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from penstock.server.commands import cli, serve

from ..waiting import wait_until

PAGE = "https://app.example.com"
BODY = {"input": "a private text"}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for localhost, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


def is_engine(pid: int) -> bool:
    try:
        return b"penstock.engine.core.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


def test_https_server_guards_its_routes_and_its_log(launch, default_model, certificate, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# two clients\nfirst-secret\nsecond-secret\n")
    files = ("--ssl-certfile", str(certificate[0]), "--ssl-keyfile", str(certificate[1]), "--api-key-file", str(keys))
    server = launch("--cors-origins", PAGE, *files, ready=False)
    wait_until(lambda: any(map(is_engine, server.children())))
    (engine,) = filter(is_engine, server.children())
    os.kill(engine, signal.SIGSTOP)
    trust = ssl.create_default_context(cafile=str(certificate[0]))
    with httpx.Client(base_url=f"https://127.0.0.1:{server.port}", verify=trust, timeout=120) as client:

        def embed(key: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}", "origin": PAGE}
            return client.post("/v1/embeddings", json=BODY, headers=headers)

        def health() -> tuple[int, int]:
            assert server.process.poll() is None, server.log.read_text()
            try:
                return client.get("/health/live").status_code, client.get("/health/ready").status_code
            except httpx.ConnectError:
                return 0, 0

        wait_until(lambda: health() != (0, 0))
        assert health() == (200, 503)
        early = embed("first-secret")
        assert (early.status_code, early.headers["retry-after"]) == (503, "1")
        os.kill(engine, signal.SIGCONT)
        wait_until(lambda: health() != (200, 503))
        assert health() == (200, 200)

        answer = embed("second-secret")
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        assert embed("wrong-secret").status_code == 401
        keys.write_text("third-secret\n")
        wait_until(lambda: embed("third-secret").status_code == 200)
        assert embed("first-secret").status_code == 401
        for body in (b'{"input": "a private text', b'{"input": {"text": "a private text"}}'):
            response = client.post("/v1/embeddings", content=body, headers={"api-key": "third-secret"})
            assert response.status_code == 400

    # An open TLS connection would delay the end of the server.
    assert server.stop() == 0
    for part in ("secret", "private", "Traceback"):
        assert part not in server.log.read_text()


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--ssl-keyfile", "{key}"), "--ssl-keyfile: needs --ssl-certfile"),
        (("--ssl-certfile", "{certificate}"), "must be a PEM certificate with its unencrypted key"),
        (("--ssl-certfile", "{key}", "--ssl-keyfile", "{key}"), "must be a PEM certificate with its unencrypted key"),
    ],
)
def test_unusable_files_are_one_line(
    flags: tuple[str, ...], part: str, certificate: tuple[Path, Path], default_model, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(serve, "configure_logging", lambda *_: None)
    given = [flag.format(certificate=certificate[0], key=certificate[1]) for flag in flags]
    assert cli.main(["serve", "--host", "127.0.0.1", "--port", "0", *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert part in line
