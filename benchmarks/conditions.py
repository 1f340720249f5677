"""Measures a server under conditions of real use: `make bench-conditions`.

    python benchmarks/conditions.py --only busy quota length requests idle --output conditions.json

- busy: one short request after another, alone and beside a process that takes a whole core. Aim: p50 at most 1.5 times.
- quota: a server with a CPU quota of one core on two cores, against one thread on one core. Aim: 0.9 of its rate.
- length: tokens per second with texts of 32 tokens up to the model's limit. Aim: within 15 % of the mean.
- requests: the same with 8 to 64 concurrent requests. Aim: within 15 % of the mean.
- idle: processor time of every thread in 10 s without a request, after a load. Aim: no tick of the kernel's clock.

Each part starts and stops its own `penstock serve`. Client and server share the processors. The result contains the
load average before each part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import processes
from closed_loop import Round, run_round
from loads import LOADS, WORDS, Load
from machine import machine
from servers import Server
from tokenizers import Tokenizer

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
PORT = 8121
AROUND = 2
"""Tokens that the tokenizer puts around a text."""
IDLE_S = 10.0
BURN = "while True: pass"

Row = dict[str, Any]


def main() -> None:
    """Parses the arguments, measures, prints the tables and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--model", default="", help="folder or hub id; default: the embedded model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a round")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    bench = Bench(args.model, args.dtype, args.rounds, args.seconds, Path(tempfile.mkdtemp(prefix="conditions-")))
    report: Row = {"machine": machine(), "model": bench.name, "dtype": args.dtype, "parts": {}}
    for name in args.only:
        before = os.getloadavg()[0]
        try:
            rows = PARTS[name](bench)
        except processes.NoCgroupError as error:
            rows = [{"blocked": str(error)}]
        report["parts"][name] = {"load_average_before": round(before, 2), "rows": rows}
        print(f"\n{name} (load average before: {before:.2f})")
        for row in rows:
            print("   " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class SizedLoad(Load):
    """A load of texts with a fixed number of tokens.

    Attributes:
        words: Those of one token.
    """

    words: tuple[str, ...] = ()

    def _text(self, rng: random.Random) -> str:
        return " ".join(rng.choices(self.words, k=self.min_words))

    @property
    def num_tokens(self) -> int:
        """Tokens of a text."""
        return self.min_words + AROUND


class Bench:
    """Starts servers and sends them loads.

    Args:
        model: Folder or hub id; "" for the embedded one.
        dtype: Of the servers.
        rounds: Rounds of each measurement.
        seconds: Length of one.
        logs: Folder for the logs of the servers.
    """

    def __init__(self, model: str, dtype: str, rounds: int, seconds: float, logs: Path) -> None:
        command = [PENSTOCK, "info", "--json", *filter(None, [model])]
        info = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        self.name: str = info["name"]
        self.max_tokens: int = info["fields"]["max_model_len"]["value"]
        tokenizer = Tokenizer.from_file(str(Path(info["path"]) / "tokenizer.json"))
        tokenizer.no_padding()
        self.words = tuple(word for word in WORDS if len(tokenizer.encode(word, add_special_tokens=False).ids) == 1)
        self._serve = f"{PENSTOCK} serve {model} --host 127.0.0.1 --dtype {dtype} --max-queue-s 0"
        self._rounds, self._seconds, self._logs = rounds, seconds, logs

    def server(self, name: str, flags: str = "", prefix: str = "", port: int = PORT) -> Server:
        """Starts a server; the caller stops it."""
        command = f"{prefix} {self._serve} --port {port} {flags}"
        server = Server(name, command.strip(), f"http://127.0.0.1:{port}", self._logs / f"{name}.log")
        try:
            server.start()
        except BaseException:
            server.stop()
            raise
        return server

    def rounds(self, sides: dict[str, tuple[Server, Load]]) -> dict[str, list[Round]]:
        """Runs every side in turn, some rounds."""
        found: dict[str, list[Round]] = {name: [] for name in sides}
        for number in range(self._rounds):
            for name, (server, load) in sides.items():
                found[name].append(self.run(server, load, seed=number))
        return found

    def run(self, server: Server, load: Load, seed: int = 0, seconds: float | None = None) -> Round:
        """Runs one round after a short warm-up."""
        bodies = load.bodies(self.name, "base64", seed=seed)
        asyncio.run(run_round(server.url, load, bodies, 0.3))
        return asyncio.run(run_round(server.url, load, bodies, seconds or self._seconds))

    def busy(self) -> list[Row]:
        """Measures beside a busy process on any core, and beside a busy process that is pinned to the last core."""
        load, core = LOADS["single"], max(os.sched_getaffinity(0))
        kinds = {"quiet": None, "beside a busy process": [], "beside a busy core": ["taskset", "-c", str(core)]}
        p50: dict[str, list[float]] = {name: [] for name in kinds}
        server = self.server("busy")
        try:
            for number in range(self._rounds):
                for name, prefix in kinds.items():
                    burner = None if prefix is None else subprocess.Popen([*prefix, sys.executable, "-c", BURN])
                    try:
                        p50[name].append(self.run(server, load, seed=number).latency_ms(0.5))
                    finally:
                        if burner is not None:
                            burner.kill()
                            burner.wait()
        finally:
            server.stop()
        quiet = statistics.median(p50["quiet"])
        return [
            {"": name, "p50_ms": round(statistics.median(own), 2), "times": round(statistics.median(own) / quiet, 2)}
            for name, own in p50.items()
        ]

    def quota(self) -> list[Row]:
        """Two servers with the time of one core: one by its quota, one by its threads and affinity."""
        rows = []
        with processes.quota(1.0) as entering:
            limited = self.server("quota", prefix=entering)
            try:
                single = self.server("one-lane", "--num-threads 1", "taskset -c 0", PORT + 1)
                try:
                    for load in (LOADS["query"], LOADS["mixed"]):
                        found = self.rounds({"quota": (limited, load), "one lane": (single, load)})
                        ratios = [a.texts_per_s / b.texts_per_s for a, b in zip(*found.values(), strict=True)]
                        rates = {n: round(statistics.median(r.texts_per_s for r in own)) for n, own in found.items()}
                        rows.append({"load": load.name, **rates, "ratio": round(statistics.median(ratios), 3)})
                finally:
                    single.stop()
            finally:
                limited.stop()
            said = next((line for line in limited.log.read_text().splitlines() if "lane" in line), "nothing of lanes")
            return [*rows, {"the server with the quota says": said.strip()}]

    def length(self) -> list[Row]:
        """Eight texts a request, eight requests at once."""
        sizes = [size for size in (32, 64, 128, 256, 512) if size <= self.max_tokens]
        return self._flat([self._sized(size, 8, 8) for size in sizes])

    def requests(self) -> list[Row]:
        """One text of 64 tokens a request."""
        return self._flat([self._sized(64, 1, number) for number in (8, 16, 32, 64)])

    def idle(self) -> list[Row]:
        """After a mixed load."""
        server = self.server("idle")
        try:
            self.run(server, LOADS["mixed"], seconds=5.0)
            time.sleep(2.0)
            ticks, before = processes.processor_seconds(server.pid), processes.thread_seconds(server.pid)
            time.sleep(IDLE_S)
            after = processes.thread_seconds(server.pid)
            ticks = processes.processor_seconds(server.pid) - ticks
            taken = {thread: 1e3 * (after[thread] - before.get(thread, 0.0)) for thread in after}
            rows: list[Row] = [
                {"process": pid, "thread": number, "name": name, "ms": round(ms, 2)}
                for (pid, number, name), ms in sorted(taken.items(), key=lambda item: -item[1])
                if ms > 0
            ]
            facts = {
                "ticks": round(ticks * os.sysconf("SC_CLK_TCK")),
                "ms": round(sum(taken.values()), 2),
                "threads": len(after),
                "ready_s": round(server.ready_s, 2),
                "resident_mib": round(server.memory_bytes() / 2**20),
            }
            return [facts, *rows]
        finally:
            server.stop()

    def _sized(self, num_tokens: int, num_texts: int, concurrency: int) -> SizedLoad:
        count = num_tokens - AROUND
        return SizedLoad(f"{num_tokens}-{concurrency}", count, count, num_texts, concurrency, self.words)

    def _flat(self, loads: list[SizedLoad]) -> list[Row]:
        server = self.server("flat")
        try:
            found = self.rounds({load.name: (server, load) for load in loads})
        finally:
            server.stop()
        rates = {n: statistics.median(r.texts_per_s for r in found[n]) * own.num_tokens for n, own in by_name(loads)}
        mean = statistics.mean(rates.values())
        return [
            {
                "tokens": load.num_tokens,
                "texts a request": load.texts_per_request,
                "at once": load.concurrency,
                "tokens_per_s": round(rates[name]),
                "of the mean": round(rates[name] / mean, 3),
            }
            for name, load in by_name(loads)
        ]


def by_name(loads: list[SizedLoad]) -> list[tuple[str, SizedLoad]]:
    """Returns loads with their names."""
    return [(load.name, load) for load in loads]


PARTS: dict[str, Callable[[Bench], list[Row]]] = {
    "busy": Bench.busy,
    "quota": Bench.quota,
    "length": Bench.length,
    "requests": Bench.requests,
    "idle": Bench.idle,
}


if __name__ == "__main__":
    main()
