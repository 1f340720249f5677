"""How a server starts, fails to start, and stops."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from penstock.kernels.cpu.machine import LIBRARY


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def num_requests(url: str) -> float:
    """Requests that the engine has taken and not answered."""
    lines = httpx.get(f"{url}/metrics", timeout=120).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("penstock_engine_requests{"))


def test_sigterm_lets_requests_finish_and_leaves_nothing(launch, default_model) -> None:
    server = launch("--dtype", "float32", "--drain-timeout-s", "120")
    children = children_of(server.process.pid)
    answers = []

    def ask() -> None:
        body = {"input": [f"a text that takes a while {i} " * 20 for i in range(300)]}
        answers.append(httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=120))

    asking = threading.Thread(target=ask)
    asking.start()
    while not num_requests(server.url):
        assert asking.is_alive()
    server.process.send_signal(signal.SIGTERM)
    asking.join(120)
    assert answers[0].status_code == 200
    assert len(answers[0].json()["data"]) == 300
    assert server.process.wait(120) == 0
    assert not any(exists(child) for child in children)
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("drain_timeout_s", ["0", "1"])
def test_requests_that_outlast_the_drain_get_a_503(drain_timeout_s: str, launch, default_model) -> None:
    origin = "https://page.example"
    server = launch("--dtype", "float32", "--drain-timeout-s", drain_timeout_s, "--cors-origins", origin)
    answers = []

    def ask() -> None:
        body = {"input": [f"a text that takes a while {i} " * 40 for i in range(4000)], "truncate_prompt_tokens": -1}
        answers.append(httpx.post(f"{server.url}/v1/embeddings", json=body, headers={"Origin": origin}, timeout=120))

    asking = threading.Thread(target=ask)
    asking.start()
    while not num_requests(server.url):
        assert asking.is_alive()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(120) == 0
    asking.join(120)
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "engine_unavailable"
    assert answers[0].headers["retry-after"]
    assert answers[0].headers["access-control-allow-origin"] == origin
    assert "Traceback" not in server.log.read_text()


def test_a_closed_terminal_stops_the_server_in_peace(launch, default_model, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("t")  # short: the path of a socket has at most 107 letters
    # The engine process warns of the budget.
    flags = ("--max-num-batched-tokens", "64", "--log-format", "json", "--drain-timeout-s", "120")
    server = launch(*flags, TMPDIR=str(folder))
    children = children_of(server.process.pid)
    assert list(folder.iterdir())
    answers = []

    def ask() -> None:
        body = {"input": [f"a text that takes a while {i} " * 20 for i in range(50)]}
        answers.append(httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=120).status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    while asking.is_alive() and not num_requests(server.url):
        time.sleep(0.01)
    server.process.send_signal(signal.SIGHUP)
    server.process.send_signal(signal.SIGHUP)  # the kernel's and the shell's
    asking.join(120)
    assert answers == [200]
    assert server.process.wait(120) == 0
    assert not any(exists(child) for child in children)
    assert not list(folder.iterdir())
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert sum("SIGHUP" in line["message"] for line in lines) == 1
    (budget,) = (line for line in lines if "max_num_batched_tokens is 64" in line["message"])
    assert (budget["logger"], budget["level"]) == ("penstock.engine", "warning")


def test_a_server_that_ignores_hangups_goes_on(launch, default_model) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does; children inherit it
    try:
        server = launch()
    finally:
        signal.signal(signal.SIGHUP, before)
    server.process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert httpx.get(f"{server.url}/health/ready").status_code == 200
    assert server.stop() == 0


def test_a_server_with_closed_standard_streams_serves_and_stops_in_peace(launch, default_model, penstock) -> None:
    server = launch(command=("sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', *penstock))
    (child,) = children_of(server.process.pid)
    for pid in (server.process.pid, child):
        assert {str(Path(f"/proc/{pid}/fd/{number}").readlink()) for number in (1, 2)} == {"/dev/null"}
    assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "a text"}).status_code == 200
    assert server.stop() == 0
    assert not exists(child)


@pytest.mark.parametrize("flags", [(), ("--api-workers", "2")])
def test_a_log_that_nobody_reads_holds_up_nobody(flags, launch, default_model, penstock, tmp_path) -> None:
    pipe = tmp_path / "log"
    os.mkfifo(pipe)
    command = ("sh", "-c", f'exec "$0" "$@" 2>{pipe}', *penstock)
    with contextlib.closing(os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)) as reader:
        server = launch("--access-log", "--log-format", "json", *flags, command=command)
        children = children_of(server.process.pid)

        def ask() -> None:
            with httpx.Client(base_url=server.url, headers={"x-request-id": "i" * 100}) as client:
                for _ in range(400):
                    assert client.get("/v1/models").status_code == 200

        ask()
        text, give_up_s = b"", time.monotonic() + 120
        while text.count(b"penstock.access") < 400 or not text.endswith(b"\n"):
            assert time.monotonic() < give_up_s
            text += reader.read(65536) or b""
        assert len(text) > 2 * 65536
        assert all(json.loads(line) for line in text.splitlines())
        ask()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(120) == 0
        assert not any(exists(child) for child in children)


def test_a_server_that_is_killed_leaves_nothing_behind(launch, default_model, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("t")
    server = launch("--dtype", "float32", TMPDIR=str(folder))
    children = children_of(server.process.pid)
    assert children
    assert list(folder.iterdir())
    server.process.kill()
    server.process.wait()
    give_up_s = time.monotonic() + 120
    while any(exists(child) for child in children):
        assert time.monotonic() < give_up_s, "the engine process outlived its server"
        time.sleep(0.1)
    assert not list(folder.iterdir())


def test_no_process_imports_what_it_does_not_need(launch, default_model) -> None:
    server = launch(PYTHONPROFILEIMPORTTIME="1")
    httpx.post(f"{server.url}/v1/embeddings", json={"input": ["a text"]}, timeout=60).raise_for_status()
    lines = (line.split("|") for line in server.log.read_text().splitlines() if line.startswith("import time:"))
    imported = {parts[2].strip() for parts in lines if len(parts) == 3}
    has_kernels = LIBRARY.is_file()
    runner = "array_runner" if has_kernels else "model_runner"
    assert {"numpy", "fastapi", f"penstock.engine.core.{runner}", "penstock.server.app"} <= imported
    assert not has_kernels or not imported & {"torch", "safetensors"}
    heavy = {"transformers", "huggingface_hub", "sympy", "scipy", "sklearn", "pandas", "PIL", "torchvision", "triton"}
    assert not imported & (heavy | {"torch._dynamo", "torch._inductor", "numpy.testing"})


@pytest.fixture
def beginning(penstock, default_model, tmp_path_factory) -> Iterator[Callable[..., tuple[subprocess.Popen, int, Path]]]:
    """Starts a server; returns it as soon as it has started its engine's process, which is the second, and its folder.

    It imports what it needs for a second then, and has not loaded its own handlers of signals.
    """
    servers = []

    def begin(*flags: str) -> tuple[subprocess.Popen, int, Path]:
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

    yield begin
    for server in servers:
        server.kill()
        server.communicate()


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGTERM, 0, ""), (signal.SIGHUP, 0, ""), (signal.SIGINT, 130, "penstock: interrupted\n")],
)
def test_a_server_that_is_stopped_while_it_starts_leaves_nothing_behind(number, code, said, beginning) -> None:
    server, child, folder = beginning()
    server.send_signal(number)
    assert server.communicate(timeout=240)[1] == said
    assert server.returncode == code
    assert not exists(child)
    assert not list(folder.iterdir())


def test_a_server_that_is_killed_while_it_starts_leaves_nothing_behind(beginning) -> None:
    server, child, folder = beginning()
    server.kill()
    server.wait()
    give_up_s = time.monotonic() + 120
    while exists(child):
        assert time.monotonic() < give_up_s, "the engine process outlived its server"
        time.sleep(0.05)
    assert not list(folder.iterdir())


def test_what_is_refused_after_the_engine_began_ends_in_a_line(beginning, tmp_path) -> None:
    server, child, folder = beginning("--api-key-file", str(tmp_path / "none"))
    said = server.communicate(timeout=240)[1]
    assert server.returncode == 2
    assert said.count("\n") == 1
    assert "--api-key-file" in said
    assert not exists(child)
    assert not list(folder.iterdir())


def test_an_engine_process_that_ends_while_the_server_starts_ends_it(beginning) -> None:
    server, child, _ = beginning()
    os.kill(child, signal.SIGKILL)
    said = server.communicate(timeout=240)[1]
    assert server.returncode == 3
    assert f"the engine process {child} ended with signal 9" in said
    assert "Traceback" not in said


def test_a_model_that_is_none_ends_in_a_line(run, tmp_path) -> None:
    done = run("serve", str(tmp_path), "--port", "0")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "is not a model" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_found_before_the_model_is_loaded(run, default_model) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        done = run("serve", "--host", "127.0.0.1", "--port", str(holder.getsockname()[1]))
    assert done.returncode != 0
    assert "Address already in use" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_is_served_is_logged_once_and_variables_are_read(launch, default_model) -> None:
    server = launch(
        PENSTOCK_SERVED_MODEL_NAME="one,two",
        PENSTOCK_API_KEY="secret-key",
        PENSTOCK_LOG_FORMAT="json",
        PENSTOCK_PROT="1",
    )
    (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert (card["id"], card["aliases"]) == ("one", ["two"])
    assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "some text"}).status_code == 401
    headers = {"authorization": "Bearer secret-key"}
    response = httpx.post(f"{server.url}/v1/embeddings", json={"input": "some text"}, headers=headers)
    assert (response.status_code, response.json()["model"]) == (200, "one")
    server.stop()
    log = server.log.read_text()
    assert log.count("inputs of up to 256 tokens") == 1
    assert log.count("data routes need an API key") == 1
    assert "PENSTOCK_PROT" in log
    assert "secret-key" not in log
    assert "some text" not in log
