r"""Measures a very long prompt with and without chunked prefill: throughput, latency of other requests, memory.

    python benchmarks/long_prompt.py MODEL --output benchmarks/results/long-prompt-cpu.json

MODEL is a causal model that takes 32k tokens. Servers are started one after the other, in alternating rounds, and each
gets the same prompt of token ids: first alone, then with short requests arriving all the while. A last part runs the
prompt alone at several chunk sizes and reads the peak of resident memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from loads import WORDS
from machine import machine
from servers import Server
from tqdm import tqdm

CHUNKED, WHOLE = "chunked", "whole"
FLAGS = {CHUNKED: "", WHOLE: "--no-enable-chunked-prefill"}


def main() -> None:
    """Parses the arguments, measures, prints the tables and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("--tokens", type=int, default=32_000, help="length of the prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--interval", type=float, default=0.2, help="seconds between short requests")
    parser.add_argument("--chunk-sizes", type=int, nargs="*", default=[8192, 2048, 512, 128], help="for the memory")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--port", type=int, default=8110)
    parser.add_argument("--penstock", default=".venv/bin/penstock", help="the program")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    bench = Bench(args)
    report = {
        "machine": machine(),
        "settings": {k: v for k, v in vars(args).items() if k not in ("output", "penstock", "port", "model")}
        | {"model": Path(args.model).name},
        **bench.compare(),
        "memory": bench.memory(),
    }
    show(report)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=1) + "\n")


class Bench:
    """Runs the prompt through servers that it starts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.logs = Path(tempfile.mkdtemp(prefix="long-prompt-"))
        rng = random.Random(0)
        self.prompt = [rng.randrange(10, 5000) for _ in range(args.tokens)]
        print(f"server logs: {self.logs}")

    def compare(self) -> dict[str, Any]:
        """Returns seconds and waits of both ways, by round."""
        found: dict[str, dict[str, list[Any]]] = {n: {"alone_s": [], "beside_s": [], "short_s": []} for n in FLAGS}
        for number in tqdm(range(self.args.rounds * len(FLAGS)), desc="rounds"):
            name = list(FLAGS)[(number + number // len(FLAGS)) % len(FLAGS)]
            server = self._start(name, FLAGS[name])
            try:
                found[name]["alone_s"].append(asyncio.run(self._alone(server.url)))
                beside_s, waits = asyncio.run(self._beside(server.url))
                found[name]["beside_s"].append(beside_s)
                found[name]["short_s"].append([round(w, 4) for w in waits])
            finally:
                server.stop()
        return found

    def memory(self) -> list[dict[str, float]]:
        """Returns the peak of resident memory at each chunk size, in MiB, above that of the idle server."""
        rows = []
        for size in tqdm(self.args.chunk_sizes, desc="memory"):
            flags = f"--chunk-size {size} --max-num-batched-tokens {max(size, 2048)}"
            server = self._start(f"chunks-{size}", flags)
            try:
                idle = server.memory_bytes()
                seconds = asyncio.run(self._alone(server.url))
                peak = server.peak_memory_bytes()
            finally:
                server.stop()
            rows.append(
                {
                    "chunk_size": size,
                    "num_chunks": -(-self.args.tokens // size),
                    "idle_mib": round(idle / 2**20),
                    "peak_mib": round(peak / 2**20),
                    "seconds": round(seconds, 2),
                }
            )
        return rows

    def _start(self, name: str, flags: str) -> Server:
        command = (
            f"{self.args.penstock} serve {self.args.model} --port {self.args.port} --dtype {self.args.dtype} "
            f"--max-model-len {self.args.tokens} --no-enable-prefix-caching {flags}"
        )
        server = Server(name, command, f"http://127.0.0.1:{self.args.port}", self.logs / f"{name}.log")
        server.start()
        return server

    async def _alone(self, url: str) -> float:
        """Returns the seconds of the prompt with nothing beside it."""
        async with httpx.AsyncClient(base_url=url, timeout=None) as client:
            return await self._post(client, self.prompt)

    async def _beside(self, url: str) -> tuple[float, list[float]]:
        """Returns the seconds of the prompt, and of each short request sent meanwhile."""
        rng = random.Random(1)
        waits: list[asyncio.Task[float]] = []
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
            prompt = asyncio.create_task(self._post(client, self.prompt))
            await asyncio.sleep(self.args.interval)
            while not prompt.done():
                text = " ".join(rng.choices(WORDS, k=rng.randint(6, 18)))
                waits.append(asyncio.create_task(self._post(client, text)))
                await asyncio.sleep(self.args.interval)
            return await prompt, list(await asyncio.gather(*waits))

    @staticmethod
    async def _post(client: httpx.AsyncClient, text: str | list[int]) -> float:
        began_s = time.monotonic()
        response = await client.post("/v1/embeddings", json={"input": text, "encoding_format": "base64"})
        response.raise_for_status()
        return time.monotonic() - began_s


def show(report: dict[str, Any]) -> None:
    """Prints the tables."""
    tokens = report["settings"]["tokens"]
    alone = {n: statistics.median(report[n]["alone_s"]) for n in FLAGS}
    ratios = [w / c for c, w in zip(report[CHUNKED]["alone_s"], report[WHOLE]["alone_s"], strict=True)]
    p99 = {n: _p99([w for waits in report[n]["short_s"] for w in waits]) for n in FLAGS}
    print(f"\n{'':10}{'alone s':>10}{'tokens/s':>10}{'beside s':>10}{'short p50':>10}{'short p99':>10}")
    for name in FLAGS:
        waits = [w for part in report[name]["short_s"] for w in part]
        beside = statistics.median(report[name]["beside_s"])
        print(
            f"{name:10}{alone[name]:>10.2f}{tokens / alone[name]:>10.0f}{beside:>10.2f}"
            f"{statistics.median(waits):>10.3f}{p99[name]:>10.3f}"
        )
    report["throughput_ratio"] = round(statistics.median(ratios), 3)
    report["p99_ratio"] = round(p99[WHOLE] / p99[CHUNKED], 1)
    print(f"throughput of chunks: {report['throughput_ratio']:.3f} of whole; p99 of others: 1/{report['p99_ratio']}")
    print(f"\n{'chunk':>8}{'chunks':>8}{'idle MiB':>10}{'peak MiB':>10}{'seconds':>10}")
    for row in report["memory"]:
        print(
            f"{row['chunk_size']:>8}{row['num_chunks']:>8}{row['idle_mib']:>10}{row['peak_mib']:>10}{row['seconds']:>10}"
        )


def _p99(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)]


if __name__ == "__main__":
    main()
