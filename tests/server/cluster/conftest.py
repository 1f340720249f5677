"""Ray clusters of several nodes on this machine, and commands that use them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from penstock.server.commands.model_arguments import default_model_folder

from ...waiting import wait_until

HERE = Path(__file__).resolve().parent
END_S = 60


@dataclass
class Nodes:
    """A running cluster with its address and the process of nodes.py."""

    address: str
    process: subprocess.Popen[str]

    def kill(self, number: int) -> None:
        """Kill all processes of a node. Node 0 is the head, which cannot be killed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"kill {number}\n")
        self.process.stdin.flush()
        assert json.loads(self.process.stdout.readline()) == {"killed": number}


Starting = Callable[..., AbstractContextManager[Nodes]]


@pytest.fixture
def nodes(tmp_path: Path) -> Starting:
    """Start a cluster: the number of cores of each node, the head first."""
    if find_spec("ray") is None:
        pytest.skip("needs Ray: make test-ray, or pip install 'penstock[ray]'")

    @contextlib.contextmanager
    def start(*cpus: int) -> Iterator[Nodes]:
        command = (sys.executable, "-P", str(HERE / "nodes.py"), *map(str, cpus))
        with ended(command, tmp_path / "nodes.log", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, (tmp_path / "nodes.log").read_text()
            yield Nodes(json.loads(line)["address"], process)
            assert process.stdin is not None
            process.stdin.close()
            process.wait(END_S)

    return start


@contextlib.contextmanager
def ended(command: tuple[str, ...], log: Path, **pipes: int) -> Iterator[subprocess.Popen[str]]:
    """Run a program in its own session, and kill all of its processes at the end."""
    environment = {**os.environ, "RAY_COLOR_PREFIX": "0", "NO_COLOR": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stderr=file, cwd="/", text=True, start_new_session=True, env=environment, **pipes
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in filter(None, (process.stdin, process.stdout)):
                pipe.close()


def wait_until_ready(url: str, process: subprocess.Popen[str], log: Path) -> None:
    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{url}/health", timeout=5).status_code == 200
        return False

    wait_until(is_ready)


@pytest.fixture
def model() -> str:
    """The embedded model's folder."""
    return str(default_model_folder())
