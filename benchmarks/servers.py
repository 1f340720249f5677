"""Starts the servers under test and reads what they use."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
import urllib.request
from pathlib import Path


class Server:
    """A server process: started by a command, ready when its health route answers.

    Args:
        name: What it is called in tables.
        command: A shell-like command line; leading NAME=VALUE words go to its environment.
        url: Where it listens, such as "http://127.0.0.1:8000".
        log: File that gets its output.
    """

    def __init__(self, name: str, command: str, url: str, log: Path) -> None:
        self.name = name
        self.url = url
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.ready_s = 0.0

    def start(self, timeout_s: float = 300.0) -> None:
        """Starts the process and waits until it answers. `ready_s` holds how long that took."""
        words = shlex.split(self._command)
        env = dict(os.environ)
        while "=" in words[0]:
            name, value = words.pop(0).split("=", 1)
            env[name] = value
        began_s = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(words, env=env, stdout=log, stderr=log, start_new_session=True)
        while not self._is_ready():
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self._process.returncode}; see {self._log}")
            if time.monotonic() - began_s > timeout_s:
                raise TimeoutError(f"{self.name} is not ready after {timeout_s} s; see {self._log}")
            time.sleep(0.02)
        self.ready_s = time.monotonic() - began_s

    def memory_bytes(self) -> int:
        """Bytes. Resident memory of the process and all its descendants."""
        if self._process is None:
            raise RuntimeError(f"{self.name} has not been started")
        return sum(_resident_bytes(pid) for pid in _family(self._process.pid))

    def peak_memory_bytes(self) -> int:
        """Bytes. The most that the process and its descendants have had resident, each at its own time."""
        if self._process is None:
            raise RuntimeError(f"{self.name} has not been started")
        return sum(_peak_bytes(pid) for pid in _family(self._process.pid))

    def stop(self) -> None:
        """Ends the process and everything that it started."""
        if self._process is None:
            return
        family = _family(self._process.pid)
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            for pid in family:
                _kill(pid)
            self._process.wait()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1) as response:
                return bool(response.status == 200)
        except OSError:
            return False


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _family(pid: int) -> list[int]:
    """Returns `pid` and all its descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    family = [pid]
    for member in family:
        family.extend(children.get(member, []))
    return family


def _peak_bytes(pid: int) -> int:
    """Bytes. Largest resident set size so far; 0 for a process that has ended."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0


def _resident_bytes(pid: int) -> int:
    """Bytes. Resident set size, shared pages included; 0 for a process that has ended."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Rss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0
