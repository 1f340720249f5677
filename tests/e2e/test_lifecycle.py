"""Start, failed start and stop of servers."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from ..servers import Server, children_of, exists
from ..waiting import wait_until

Begin = Callable[..., tuple[subprocess.Popen, int, Path]]


@contextmanager
def running_request(server: Server, num_texts: int, **headers: str) -> Iterator[list[httpx.Response]]:
    """Run the block while the engine has a request, and wait for the response. Yields a list of the response."""
    body = {"input": [f"a text that takes a while {i} " * 20 for i in range(num_texts)]}
    responses: list[httpx.Response] = []
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(server.post, "/v1/embeddings", body, **headers)
        wait_until(lambda: server.metric("penstock_engine_requests") or sending.done())
        yield responses
        responses.append(sending.result(120))


def test_sigterm_drains_requests_and_leaves_nothing(launch, default_model, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("t")  # short: the path of a socket has at most 107 characters
    # The engine process warns about this token budget.
    flags = ("--max-num-batched-tokens", "64", "--log-format", "json", "--drain-timeout-s", "120")
    server = launch(*flags, TMPDIR=str(folder))
    children = server.children()
    assert list(folder.iterdir())
    with running_request(server, 20) as responses:
        server.process.send_signal(signal.SIGTERM)
    assert responses[0].status_code == 200
    assert len(responses[0].json()["data"]) == 20
    assert server.process.wait(120) == 0
    assert not any(map(exists, children))
    assert not list(folder.iterdir())
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    (budget,) = (line for line in lines if "max_num_batched_tokens is 64" in line["message"])
    assert (budget["logger"], budget["level"]) == ("penstock.engine", "warning")


@pytest.mark.parametrize("drain_timeout_s", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_request_that_outlasts_the_drain_gets_503(drain_timeout_s: str, launch, default_model) -> None:
    origin = "https://page.example"
    server = launch("--num-threads", "1", "--drain-timeout-s", drain_timeout_s, "--cors-origins", origin)
    with running_request(server, 1500, Origin=origin) as responses:
        assert server.stop() == 0
    assert responses[0].status_code == 503
    assert responses[0].json()["error"]["code"] == "engine_unavailable"
    assert responses[0].headers["retry-after"]
    assert responses[0].headers["access-control-allow-origin"] == origin
    assert "Traceback" not in server.log.read_text()


def test_daemon_serves_after_sighup(launch, default_model, penstock) -> None:
    """Without streams, and started with SIGHUP ignored, as by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited by children
    try:
        server = launch(command=("sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', *penstock))
    finally:
        signal.signal(signal.SIGHUP, before)
    (child,) = server.children()
    for pid in (server.process.pid, child):
        assert {str(Path(f"/proc/{pid}/fd/{number}").readlink()) for number in (1, 2)} == {"/dev/null"}
    server.process.send_signal(signal.SIGHUP)
    assert server.embed("a text").status_code == 200
    assert server.stop() == 0
    assert not exists(child)


@pytest.fixture
def begin(penstock, default_model, tmp_path_factory) -> Iterator[Begin]:
    """Start a server and return it as soon as its engine process exists, with that process and the folder of sockets.

    The server still imports modules then and has not installed its signal handlers.
    """
    servers = []

    def start(*flags: str) -> tuple[subprocess.Popen, int, Path]:
        folder = tmp_path_factory.mktemp("t")
        server = subprocess.Popen(
            [*penstock, "serve", "--port", "0", *flags],
            env={**os.environ, "TMPDIR": str(folder)},
            stderr=subprocess.PIPE,
            text=True,
        )
        servers.append(server)
        while not (children := children_of(server.pid)):
            assert server.poll() is None
        return server, children[0], folder

    yield start
    for server in servers:
        server.kill()
        server.communicate()


@pytest.mark.parametrize(
    ("number", "code", "output"),
    [(signal.SIGTERM, 0, ""), (signal.SIGINT, 130, "penstock: interrupted\n"), (signal.SIGKILL, -9, "")],
)
def test_server_stopped_while_it_starts_leaves_nothing(number: int, code: int, output: str, begin: Begin) -> None:
    server, child, folder = begin()
    server.send_signal(number)
    assert server.communicate(timeout=240)[1] == output
    assert server.returncode == code
    if number == signal.SIGKILL:
        wait_until(lambda: not exists(child))
    assert not exists(child)
    assert not list(folder.iterdir())


def test_engine_killed_while_the_server_starts_ends_it(begin: Begin) -> None:
    server, child, _ = begin()
    os.kill(child, signal.SIGKILL)
    output = server.communicate(timeout=240)[1]
    assert server.returncode == 3
    assert f"the engine process {child} ended with signal 9" in output
    assert "Traceback" not in output


def test_port_in_use_is_one_line(run, default_model) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        done = run("serve", "--host", "127.0.0.1", "--port", str(holder.getsockname()[1]))
    assert done.returncode != 0
    assert "Address already in use" in done.stderr
    assert len(done.stderr.splitlines()) == 1
