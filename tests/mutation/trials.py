"""Tries wrong changes: runs the tests that may see each, in as many copies of the checkout as there are jobs."""

from __future__ import annotations

import queue
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from copies import Copy
from mutants import Mutant
from rooms import mirror_tests, other_tests

LEAST_LIMIT_S = 60.0
SLOWER = 4.0
"""A run of tests may take so many times as long as it took without a change; then it counts as hanging."""


class Verdict(StrEnum):
    """What the tests made of a wrong change."""

    KILLED = "KILLED"
    TIMEOUT = "TIMEOUT"
    SURVIVED = "SURVIVED"


@dataclass(frozen=True)
class Trial:
    """One mutant, tried.

    Attributes:
        mutant: What was changed.
        verdict: Whether a test saw it.
        by: The test that saw it first; "" where none did.
        seconds: What that took.
    """

    mutant: Mutant
    verdict: Verdict
    by: str
    seconds: float


class Trials:
    """Runs of the tests on wrong changes.

    Args:
        root: The checkout.
        jobs: Copies of it that are tested at a time.
        mirror_only: Run no tests but those that mirror the changed file.
    """

    def __init__(self, root: Path, *, jobs: int, mirror_only: bool) -> None:
        self._root = root
        self._jobs = jobs
        self._mirror_only = mirror_only
        self._free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        self._limits_s: dict[frozenset[str], float] = {}

    def run(self, mutants: Sequence[Mutant]) -> Iterator[Trial]:
        """Yields the trials as they end.

        Raises:
            SystemExit: A test fails without a change: what it says of changes would mean nothing.
        """
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-")))
            first = stack.enter_context(closing(Copy(self._root, folder / "0")))
            self._root = first.folder  # its tests are those that are run, whatever is written meanwhile
            self._check_unchanged(first, dict.fromkeys(mutant.key.file for mutant in mutants))
            self._free.put(first)
            for number in range(1, self._jobs):
                self._free.put(stack.enter_context(closing(Copy(first.folder, folder / str(number)))))
            executor = stack.enter_context(ThreadPoolExecutor(self._jobs))
            futures = [executor.submit(self._try, mutant) for mutant in mutants]
            try:
                for future in as_completed(futures):
                    yield future.result()
            finally:
                executor.shutdown(cancel_futures=True)

    def _check_unchanged(self, copy: Copy, files: Iterable[str]) -> None:
        copy.check_import()
        for suite in (suite for file in files for suite in self._suites(file)):
            if (name := frozenset(suite)) not in self._limits_s:
                run = copy.test(suite, limit_s=None, compile_files=True)
                if run.code:
                    raise SystemExit(f"Without a change, {run.failed} fails:\n{run.output}")
                self._limits_s[name] = max(LEAST_LIMIT_S, SLOWER * run.seconds)

    def _try(self, mutant: Mutant) -> Trial:
        copy = self._free.get()
        began_s = time.monotonic()
        verdict, by = Verdict.SURVIVED, ""
        try:
            with copy.changed(mutant.key.file, mutant.text):
                for suite in self._suites(mutant.key.file):
                    run = copy.test(suite, limit_s=self._limits_s[frozenset(suite)])
                    if run.code != 0:
                        verdict, by = (Verdict.TIMEOUT if run.code is None else Verdict.KILLED), run.failed
                        break
        finally:
            self._free.put(copy)
        return Trial(mutant, verdict, by, time.monotonic() - began_s)

    def _suites(self, file: str) -> list[list[str]]:
        others = [] if self._mirror_only else other_tests(self._root, file)
        return [suite for suite in (mirror_tests(self._root, file), others) if suite]
