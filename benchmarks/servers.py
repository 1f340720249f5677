"""Starts the servers under test and reads their CPU time and memory."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import processes


class Server:
    """A server process: started by a command, ready when its health route answers.

    Args:
        name: Name in tables.
        command: A shell-like command line; leading NAME=VALUE words go to its environment. "": it runs already.
        url: Base URL, such as "http://127.0.0.1:8000".
        log: File that gets its output.
    """

    def __init__(self, name: str, command: str, url: str, log: Path) -> None:
        self.name = name
        self.url = url
        self._command = command
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.ready_s = 0.0

    def start(self, timeout_s: float = 300.0) -> None:
        """Starts the process and waits until it answers. `ready_s` holds how long that took."""
        words = shlex.split(self._command)
        if not words:
            if not self._is_ready():
                raise RuntimeError(f"{self.url}/health does not respond with 200")
            return
        env = dict(os.environ)
        while "=" in words[0]:
            name, value = words.pop(0).split("=", 1)
            env[name] = value
        began_s = time.monotonic()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(words, env=env, stdout=log, stderr=log, start_new_session=True)
        while not self._is_ready():
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self._process.returncode}; see {self.log}")
            if time.monotonic() - began_s > timeout_s:
                raise TimeoutError(f"{self.name} is not ready after {timeout_s} s; see {self.log}")
            time.sleep(0.02)
        self.ready_s = time.monotonic() - began_s

    @property
    def pid(self) -> int:
        """The started process, the parent of its other processes."""
        if self._process is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._process.pid

    @property
    def is_started(self) -> bool:
        """Whether `start` has started a process."""
        return self._process is not None

    def memory_bytes(self) -> int:
        """Bytes. Resident memory of the process and all its descendants."""
        return processes.memory_bytes(self.pid)

    def peak_memory_bytes(self) -> int:
        """Bytes. The most that the process and its descendants have had resident, each at its own time."""
        return processes.peak_memory_bytes(self.pid)

    def served_name(self) -> str:
        """Returns the name under which it serves its model; "model" if it has no list of models."""
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=10) as response:
                return str(json.load(response)["data"][0]["id"])
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return "model"

    def stop(self) -> None:
        """Ends the process and everything that it started."""
        if self._process is None:
            return
        family = processes.family(self._process.pid)
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            processes.kill(self._process.pid)
            self._process.wait()
        processes.kill_group(self._process.pid)
        for pid in family[1:]:  # descendants in their own process groups
            processes.kill(pid)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1) as response:
                return bool(response.status == 200)
        except OSError:
            return False
