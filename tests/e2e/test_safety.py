"""A server as it is put on a network: HTTPS, a file of keys, web pages of one origin. What it logs holds none of it."""

import os
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ..ports import free_port
from .test_lifecycle import children_of

PAGE = "https://app.example.com"
BODY = {"input": "a text that nobody else may read"}


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


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# two clients\nfirst-secret\nsecond-secret\n")
    return file


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "log.txt"


@pytest.fixture(scope="module")
def starting(penstock, default_model, certificate, keys, log) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """A server that has just been started, on torch so that it is not ready at once, and a client that trusts it."""
    port = free_port()
    files = ("--ssl-certfile", str(certificate[0]), "--ssl-keyfile", str(certificate[1]), "--api-key-file", str(keys))
    flags = ("--host", "127.0.0.1", "--port", str(port), "--cpu-kernels", "torch", "--cors-origins", PAGE, *files)
    with log.open("wb") as stderr:
        process = subprocess.Popen([*penstock, "serve", *flags], stdout=subprocess.DEVNULL, stderr=stderr)
    trust = ssl.create_default_context(cafile=str(certificate[0]))
    with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trust, timeout=120) as client:
        yield process, client
    process.terminate()
    process.wait(60)


def ask(client: httpx.Client, key: str) -> httpx.Response:
    return client.post("/v1/embeddings", json=BODY, headers={"authorization": f"Bearer {key}", "origin": PAGE})


def is_engine(pid: int) -> bool:
    """Whether a process runs the engine; its parent waits until it does."""
    try:
        return b"penstock.engine.core.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


def test_live_then_ready_then_guarded_then_silent(starting, keys: Path, log: Path) -> None:
    process, client = starting
    while not (engines := [child for child in children_of(process.pid) if is_engine(child)]):
        assert process.poll() is None, log.read_text()
    os.kill(engines[0], signal.SIGSTOP)  # its model is not loaded before this test has seen that it is not ready
    seen = []
    give_up_s = time.monotonic() + 240
    while time.monotonic() < give_up_s:
        assert process.poll() is None, log.read_text()
        try:
            live, ready = client.get("/health/live").status_code, client.get("/health/ready").status_code
        except httpx.ConnectError:
            time.sleep(0.02)
            continue
        seen.append((live, ready))
        if ready == 200:
            break
        if len(seen) == 1:
            early = ask(client, "first-secret")
            assert (early.status_code, early.headers["retry-after"]) == (503, "1")
            os.kill(engines[0], signal.SIGCONT)
        time.sleep(0.05)
    assert set(seen) == {(200, 503), (200, 200)}

    answer = ask(client, "second-secret")
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    assert ask(client, "wrong-secret").status_code == 401
    keys.write_text("third-secret\n")
    give_up_s = time.monotonic() + 120
    while ask(client, "third-secret").status_code != 200:
        assert time.monotonic() < give_up_s, log.read_text()
        time.sleep(0.1)
    assert ask(client, "first-secret").status_code == 401
    for body in (b'{"input": "' + BODY["input"].encode(), b'{"input": {"text": "' + BODY["input"].encode() + b'"}}'):
        assert client.post("/v1/embeddings", content=body, headers={"api-key": "third-secret"}).status_code == 400

    client.close()  # over TLS a connection that the client keeps open outlasts a server that wants to close it
    process.terminate()
    assert process.wait(60) == 0
    text = log.read_text()
    assert "secret" not in text
    assert "nobody else" not in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--ssl-keyfile", "{key}"), "--ssl-keyfile: needs --ssl-certfile"),
        (("--ssl-certfile", "/no/such/file"), "--ssl-certfile: /no/such/file cannot be read"),
        (("--ssl-certfile", "{certificate}"), "no PEM certificate with its key"),
        (("--ssl-certfile", "{key}", "--ssl-keyfile", "{key}"), "no PEM certificate with its key"),
        (("--api-key-file", "/no/such/file"), "--api-key-file: /no/such/file cannot be read"),
    ],
)
def test_files_that_do_not_fit_end_in_a_line(
    flags: tuple[str, ...], part: str, certificate: tuple[Path, Path], default_model, monkeypatch, capsys
) -> None:
    from penstock.server.commands import cli, serve

    monkeypatch.setattr(serve, "configure_logging", lambda *_: None)
    given = [flag.format(certificate=certificate[0], key=certificate[1]) for flag in flags]
    assert cli.main(["serve", "--host", "127.0.0.1", "--port", "0", *given]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert part in lines[0]
