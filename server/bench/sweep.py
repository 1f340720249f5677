"""Runs the rounds of a load test: every load on every server, in alternating order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import uvloop

from .. import penstock_version
from ..settings import BenchSettings, CommandError, UsageError, public_values
from .load_generator import Round, run_round
from .report import LoadPoint, LoadTestResult, check_plot, pairs_of, plot, ratios, table
from .workload import BenchTarget, Workload

_DRAW_EVERY_S: Final = 0.5


class Sweep:
    """A load test of one server, or of two servers that take turns.

    Args:
        urls: One or two base URLs.

    Attributes:
        results: Finished and interrupted rounds, in order of the loads.

    Raises:
        UsageError: A URL or the file of texts is invalid, or the dialect lacks the task.
        CommandError: A server cannot be reached, or does not answer a first request with one result per text.
    """

    def __init__(self, urls: Sequence[str], settings: BenchSettings) -> None:
        if len(urls) > 2 or len(set(urls)) < len(urls):
            raise UsageError(f"URL: give one URL, or two different ones to compare (got {' '.join(urls)})")
        self._settings = settings
        self._workload = Workload.open(settings.load, settings.batch_size, settings.max_words)
        if settings.json is not None and not settings.json.absolute().parent.is_dir():
            raise UsageError(f"--json: the folder {settings.json.parent} does not exist")
        if settings.plot is not None:
            check_plot(settings.plot)
        self._targets = [BenchTarget.find(url, settings) for url in urls]
        for target in self._targets:
            target.check([self._workload.longest_text()] * settings.batch_size, self._workload.query(0))
        self._points = [LoadPoint(max(settings.connections), rate) for rate in settings.rate] or [
            LoadPoint(number, None) for number in settings.connections
        ]
        self.results: list[LoadTestResult] = []
        self._is_complete = False

    def run(self) -> None:
        """Measures all loads, and writes the JSON file, also after an interruption.

        Raises:
            KeyboardInterrupt: The user has interrupted it. `results` has the rounds so far.
            CommandError: A server is lost, or no request succeeded.
        """
        started_at = datetime.now(UTC)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._measure())
            self._is_complete = True
        finally:
            self.results = [result for result in self.results if result.rounds]
            if self._settings.json is not None and self.results:
                self._settings.json.write_text(json.dumps(self._as_json(started_at), indent=1) + "\n", "utf-8")
        if not any(result.total.latencies_s for result in self.results):
            raise CommandError("no request succeeded")

    def draw(self) -> None:
        """Writes the file of `--plot`; nothing without the flag or without a successful request.

        Raises:
            CommandError: The file cannot be written.
        """
        if self._settings.plot is None or not any(result.total.latencies_s for result in self.results):
            return
        names = {target.server.url: f"{target.model.name}, {target.server.url}" for target in self._targets}
        try:
            plot(self.results, names, f"penstock bench: {self._conditions()}", self._settings.plot)
        except OSError as error:
            raise CommandError(f"--plot: {self._settings.plot} cannot be written: {error}") from error

    def report(self) -> str:
        """Returns the servers and the table of results."""
        several = len(self._targets) > 1
        names = {target.server.url: f", {'ab'[i]}" if several else "" for i, target in enumerate(self._targets)}
        lines = [
            f"{'ab'[i] + ': ' if several else ''}{target.server.url}, {target.model.dialect} {target.path}, "
            f"{target.model.name}"
            for i, target in enumerate(self._targets)
        ]
        return "\n".join([*lines, self._conditions(), "", table(self.results, names)])

    def _conditions(self) -> str:
        settings = self._settings
        rounds = f"{settings.rounds} round{'s' * (settings.rounds > 1)} of {settings.seconds:g} s"
        note = "" if self._is_complete else "; interrupted, with the rounds so far"
        return f"{settings.load}, {settings.batch_size} per request, {rounds}{note}"

    async def _measure(self) -> None:
        for point in self._points:
            own = {target.server.url: LoadTestResult(point, target.server.url) for target in self._targets}
            self.results += own.values()
            for number in range(self._settings.rounds):
                texts, query = self._workload.requests(number), self._workload.query(number)
                for target in self._targets if number % 2 == 0 else reversed(self._targets):
                    label = f"{point}, round {number + 1} of {self._settings.rounds}, {target.server.url}"
                    requests = [target.request(each, query) for each in texts]
                    if self._settings.warm_up:
                        await self._round(target, point, requests, self._settings.warm_up, Round())
                    counted = Round()
                    try:
                        async with _progress(label, counted):
                            await self._round(target, point, requests, self._settings.seconds, counted)
                    finally:
                        if counted.latencies_s or counted.errors:
                            own[target.server.url].rounds.append(counted)

    async def _round(
        self, target: BenchTarget, point: LoadPoint, requests: list[bytes], seconds: float, counted: Round
    ) -> None:
        try:
            await run_round(
                target.server.address,
                requests,
                self._settings.batch_size,
                connections=point.connections,
                seconds=seconds,
                timeout_s=self._settings.timeout,
                rate=point.rate,
                result=counted,
            )
        except OSError as error:
            raise CommandError(f"{target.server.url} does not accept connections any more: {error}") from error

    def _as_json(self, started_at: datetime) -> dict[str, Any]:
        servers = [
            {
                "url": target.server.url,
                "dialect": target.model.dialect,
                "path": target.path,
                "model": target.model.name,
            }
            for target in self._targets
        ]
        found = [
            {"connections": a.point.connections, "rate": a.point.rate}
            | {name: ratio._asdict() for name, ratio in ratios(a, b).items()}
            for a, b in pairs_of(self.results)
        ]
        settings = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in public_values(self._settings).items()
        }
        return {
            "penstock": penstock_version(),
            "started_at": started_at.isoformat(timespec="seconds"),
            "client": {"platform": platform.platform(), "cores": len(os.sched_getaffinity(0))},
            "is_complete": self._is_complete,
            "settings": settings,
            "servers": servers,
            "results": [result.as_json() for result in self.results],
            "ratios": found,
        }


@contextlib.asynccontextmanager
async def _progress(label: str, counted: Round) -> AsyncIterator[None]:
    """Shows the running round on stderr: a line that changes on a terminal, otherwise one line after the round."""
    is_terminal = sys.stderr.isatty()
    began_s = time.monotonic()

    def draw(start: str, end: str) -> None:
        elapsed_s = max(time.monotonic() - began_s, 1e-9)
        errors = f", {counted.errors.total()} errors" if counted.errors else ""
        rate = counted.num_texts / elapsed_s
        sys.stderr.write(f"{start}{label}: {elapsed_s:.1f} s, {rate:.0f} texts/s{errors}{end}")
        sys.stderr.flush()

    async def draw_often() -> None:
        while True:
            draw("\r", "\x1b[K")
            await asyncio.sleep(_DRAW_EVERY_S)

    task = asyncio.create_task(draw_often()) if is_terminal else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
        draw("\r" if is_terminal else "", "\x1b[K\n" if is_terminal else "\n")
