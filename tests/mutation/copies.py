"""A copy of the checkout, in which one file may be changed, and a process beside it that runs its tests."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TEST_TIMEOUT_S = 60
"""Seconds that one test may take."""
MEMORY_BYTES = 8 << 30
"""Bytes that a run may hold: a loop without end must not take all that the machine has."""
_INSIDE = Path(__file__).resolve().parent / "inside"
_NOT_COPIED = (".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
# Asserts stay as they are written: what was loaded before cannot be rewritten any more.
_OPTIONS = ("-x", "-q", "--tb=no", "-rfE", "--assert=plain", f"--timeout={TEST_TIMEOUT_S}")
_PLUGINS = ("-p", "no:cacheprovider", "-p", "examples_for_mutants")
_MARKS = ("-m", "not gpu and not slow")


@dataclass(frozen=True)
class Run:
    """How a run of tests ended.

    Attributes:
        code: Status of pytest; None where it was stopped: the time was over, or it held too much.
        failed: The first test that failed; "" where none did.
        output: What pytest printed.
        seconds: What it took.
    """

    code: int | None
    failed: str
    output: str
    seconds: float


class Copy:
    """A copy of the checkout. Nothing is compiled into it once `changed` is used.

    Python takes a changed file of the same size, written in the same second, for the one that it has compiled before;
    so the compiled one is removed, and none takes its place.

    Args:
        origin: The checkout, or another copy, whose compiled files this one takes over.
        folder: Where it goes.
    """

    def __init__(self, origin: Path, folder: Path) -> None:
        self.folder = folder
        ignored = _NOT_COPIED if (origin / ".git").exists() else ()
        shutil.copytree(origin, folder, symlinks=True, ignore=shutil.ignore_patterns(*ignored))
        self._output = folder.with_suffix(".output")
        # The same every time: no set's order is left to chance, and no library keeps a thread that a fork would lack.
        fixed = {"PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        paths = {"PYTHONPATH": f"{folder / '.typing'}{os.pathsep}{_INSIDE}"}
        self._environment = {**os.environ, **fixed, **paths}
        self._server = subprocess.Popen(
            [sys.executable, _INSIDE / "fork_server.py"],
            cwd=folder,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """Ends the process that runs the tests."""
        self._server.kill()
        self._server.communicate()

    def check_import(self) -> None:
        """Makes sure that the tests import the copy, not what is installed."""
        command = [sys.executable, "-c", "import penstock.engine; print(penstock.engine.__file__)"]
        found = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=True)
        if not Path(found.stdout.strip()).resolve().is_relative_to(self.folder.resolve()):
            raise SystemExit(f"`penstock` is imported from {found.stdout.strip()}, not from the copy.")

    @contextmanager
    def changed(self, file: str, text: str) -> Iterator[None]:
        """Gives a file another text for a while."""
        path = self.folder / file
        unchanged = path.read_text()
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
        path.write_text(text)
        try:
            yield
        finally:
            path.write_text(unchanged)

    def test(self, files: Sequence[str], *, limit_s: float | None, compile_files: bool = False) -> Run:
        """Runs tests up to the first that fails.

        Args:
            files: Of the tests, in the order in which they are run.
            limit_s: Seconds after which they are stopped.
            compile_files: Keep what is compiled on the way.
        """
        order = {"memory_bytes": MEMORY_BYTES, "output": str(self._output), "compile_files": compile_files}
        options = [*_OPTIONS, *_PLUGINS, *_MARKS, *files]
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        began_s = time.monotonic()
        print(json.dumps({**order, "options": options, "limit_s": limit_s}), file=self._server.stdin, flush=True)
        code = json.loads(self._server.stdout.readline())["code"]
        output = self._output.read_text(errors="replace")
        found = _FAILED.search(output)
        last_line = next(iter(output.strip().splitlines()[-1:]), "")
        failed = found[1] if found else f"status {code}: {last_line}" if code else ""
        return Run(code, failed, output, time.monotonic() - began_s)
