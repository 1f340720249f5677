"""A side: a peer that runs, over HTTP or as a worker process that calls a library."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import select
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import processes
from closed_loop import Round, run_round
from loads import Load, request_body
from numpy.typing import NDArray
from servers import Server

PATIENCE_S = 600.0
"""Seconds beyond its length after which a round counts as hung: 64 requests of 8 long texts take minutes."""
START_TIMEOUT_S = 600.0
WORKER = Path(__file__).with_name("inside") / "worker.py"
TEXTS_PER_ANSWER = 32


class SideError(Exception):
    """A side did not start, ended, or sent a wrong response. The message contains its output."""


class Side(Protocol):
    """The operations of a side that the measurement calls."""

    name: str
    ready_s: float

    def start(self) -> None:
        """Starts it and waits until it is ready. `ready_s` holds how long that took.

        Raises:
            SideError: It ended, or is not ready in time.
        """

    @property
    def pid(self) -> int | None:
        """Its process, the parent of its other processes; None for a server that ran already."""

    def embed(self, texts: list[str]) -> NDArray[np.float32]:
        """Returns [N, D] embeddings of `texts`."""

    def run(self, load: Load, requests: list[list[str]], seconds: float) -> Round:
        """Runs `requests` over and over for `seconds`, with `load.concurrency` under way at once.

        Raises:
            SideError: It ended, hung or answered with an error.
        """

    def stop(self) -> None:
        """Ends it and everything that it started."""


class HttpSide:
    """A server, spoken to over HTTP as its clients do.

    Args:
        server: Not started yet, or without a command if it runs already.
    """

    def __init__(self, server: Server) -> None:
        self.name = server.name
        self.ready_s = 0.0
        self._server = server
        self._model = ""

    def start(self) -> None:
        """Starts it and waits until it is ready."""
        try:
            self._server.start(START_TIMEOUT_S)
            self._model = self._server.served_name()
        except (RuntimeError, OSError) as error:  # a TimeoutError is an OSError
            raise SideError(f"{error}\n{last_lines(self._server.log)}") from error
        self.ready_s = self._server.ready_s

    @property
    def pid(self) -> int | None:
        """The server's process; None if it ran already."""
        return self._server.pid if self._server.is_started else None

    def embed(self, texts: list[str]) -> NDArray[np.float32]:
        """Returns [N, D] embeddings of `texts`."""
        rows: list[list[float]] = []
        for start in range(0, len(texts), TEXTS_PER_ANSWER):
            fields = json.loads(request_body(texts[start : start + TEXTS_PER_ANSWER], self._model, "float"))
            body = json.dumps(fields | {"truncate_prompt_tokens": -1}).encode()  # penstock and vLLM; others truncate
            request = urllib.request.Request(
                f"{self._server.url}/v1/embeddings", body, {"Content-Type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                    rows.extend(row["embedding"] for row in json.load(response)["data"])
            except urllib.error.HTTPError as error:
                raise SideError(f"{error.code}: {error.read(300)!r}") from error
            except OSError as error:
                raise SideError(str(error)) from error
        return np.array(rows, np.float32)

    def run(self, load: Load, requests: list[list[str]], seconds: float) -> Round:
        """Runs `requests` in a closed loop."""
        bodies = [request_body(texts, self._model, "float") for texts in requests]
        try:
            return asyncio.run(
                asyncio.wait_for(run_round(self._server.url, load, bodies, seconds, PATIENCE_S), seconds + PATIENCE_S)
            )
        except TimeoutError:
            raise SideError(f"no answer for {PATIENCE_S:.0f} s") from None
        except (RuntimeError, OSError, EOFError) as error:
            raise SideError(f"{type(error).__name__}: {error}") from error

    def stop(self) -> None:
        """Ends it and everything that it started."""
        self._server.stop()


class WorkerSide:
    """A library, called in a process of its own environment; texts and answers pass as lines of JSON.

    Args:
        name: Name in tables.
        python: The interpreter of its environment.
        options: Arguments of inside/worker.py: backend, model, dtype, threads and more.
        log: File for its stderr.
    """

    def __init__(self, name: str, python: Path, options: dict[str, Any], log: Path) -> None:
        self.name = name
        self.ready_s = 0.0
        self._command = [str(python), str(WORKER), json.dumps(options)]
        self._threads = str(options["threads"])
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it and waits until the model is loaded."""
        env = dict(os.environ) | {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": self._threads,
            "RAYON_NUM_THREADS": self._threads,
        }
        env.pop("PYTHONSAFEPATH", None)
        began_s = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._answer(START_TIMEOUT_S)
        self.ready_s = time.monotonic() - began_s

    @property
    def pid(self) -> int:
        """The worker's process."""
        return self._running.pid

    def embed(self, texts: list[str]) -> NDArray[np.float32]:
        """Returns [N, D] embeddings of `texts`."""
        return np.array(self._ask({"do": "embed", "texts": texts}, PATIENCE_S)["vectors"], np.float32)

    def run(self, load: Load, requests: list[list[str]], seconds: float) -> Round:
        """Calls the library with as many texts at once as a server would have under way."""
        calls = [
            list(itertools.chain.from_iterable(requests[start : start + load.concurrency]))
            for start in range(0, len(requests) - load.concurrency + 1, load.concurrency)
        ]
        answer = self._ask({"do": "run", "calls": calls, "seconds": seconds}, seconds + PATIENCE_S)
        return Round(num_texts=answer["num_texts"], seconds=answer["seconds"], latencies_s=answer["latencies_s"])

    def stop(self) -> None:
        """Ends it and everything that it started."""
        if self._process is None:
            return
        processes.kill_group(self._process.pid)
        self._process.communicate()  # waits, and closes the pipes
        self._process = None

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._process

    def _ask(self, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        pipe = self._running.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(question).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            raise SideError(f"the worker ended\n{last_lines(self._log)}") from None
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        pipe = self._running.stdout
        assert pipe is not None
        if not select.select([pipe], [], [], timeout_s)[0]:
            raise SideError(f"no answer for {timeout_s:.0f} s\n{last_lines(self._log)}")
        line = pipe.readline()
        if not line:
            raise SideError(f"the worker ended\n{last_lines(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SideError(answer["error"])
        return answer


def last_lines(log: Path, count: int = 6) -> str:
    """Returns the end of a log, which says why its process ended."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])
