r"""Measures a hit of the vector cache: CPU time of the server process in addition to tokenization.

    python benchmarks/vector_cache.py MODEL --output benchmarks/results/vector-cache.json

One engine of MODEL, in a process of its own, answers lists of texts that it has answered before: with their rows in
memory, and with their rows on disk alone. CPU time is that of all threads of this process, the least of many rounds, so
that other work on the machine counts little. Measures tokenization in alternating rounds and subtracts it. The
rows of each list are compared bit for bit with computed rows.

The last table is one look-up on disk in the turn of the event loop and in a thread, by the number of rows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from loads import WORDS
from machine import machine

from penstock.engine import AsyncEngine, EngineConfig, PoolingParams, RequestOptions
from penstock.engine.client.vector_cache.cache import VectorCache
from penstock.engine.client.vector_cache.disk import DiskTier

MIB: Final = 2**20
NUM_TEXTS: Final = (1, 32, 256)
NUM_WORDS: Final = (8, 100)
LOOKUPS: Final = (1, 8, 32, 128, 512)
PARAMS: Final = PoolingParams()
DEFAULTS: Final = RequestOptions()


def main() -> None:
    """Parses the arguments, measures, prints the tables and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-cache-") as folder:
        results = asyncio.run(measure(arguments.model, arguments.dtype, arguments.rounds, Path(folder)))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps({"machine": machine(), **results}, indent=2) + "\n")


async def measure(model: str, dtype: str, num_rounds: int, folder: Path) -> dict[str, Any]:
    """Returns the milliseconds of CPU time a text, by list and place, and the microseconds of look-ups."""
    chance = random.Random(0)
    lists = {
        (num_texts, num_words): [" ".join(chance.choices(WORDS, k=num_words)) for _ in range(num_texts)]
        for num_texts in NUM_TEXTS
        for num_words in NUM_WORDS
    }
    rows: list[dict[str, Any]] = []
    computed: dict[tuple[int, int], bytes] = {}
    print("ms of CPU time per text: tokenization, and a cache hit in addition")
    for place, max_bytes in (("memory", 64 * MIB), ("disk", 0)):
        cache = VectorCache(max_bytes, folder / "cache", 64 * MIB)
        engine = await AsyncEngine.start(EngineConfig(model=model, dtype=dtype), cache=cache)
        figures = engine.stats().vectors
        assert figures is not None
        assert engine._dispatcher.cache is not None
        await engine._dispatcher.cache.wait()
        for (num_texts, num_words), texts in lists.items():
            answer = (await engine.embed(texts, PARAMS)).embeddings.tobytes()
            assert computed.setdefault((num_texts, num_words), answer) == answer, "cached vectors differ"
            before = figures.num_misses
            tokenizes, hits = await least_ms(
                num_rounds,
                partial(engine._encoder.encode, texts, PARAMS, DEFAULTS),
                partial(engine.embed, texts, PARAMS),
            )
            assert figures.num_misses == before, "not every text was found"
            own_ms = (hits - tokenizes) / num_texts
            rows.append(
                {
                    "place": place,
                    "num_texts": num_texts,
                    "num_words": num_words,
                    "tokenization_ms": tokenizes / num_texts,
                    "hit_ms": own_ms,
                }
            )
            print(
                f"  {place:6}  {num_texts:3} texts of {num_words:3} words: {tokenizes / num_texts:.4f} + {own_ms:.4f}"
            )
        await engine.close()
        cache.close()
    return {"model": Path(model).name, "hits": rows, "lookups": await look_ups(folder / "lookups", num_rounds)}


async def least_ms(num_rounds: int, *works: Callable[[], Awaitable[object]]) -> list[float]:
    """Returns the least CPU time of each work, in turns."""
    least = [float("inf")] * len(works)
    for _ in range(num_rounds):
        for place, work in enumerate(works):
            began_s = time.process_time()
            await work()
            least[place] = min(least[place], 1000 * (time.process_time() - began_s))
    return least


async def look_ups(folder: Path, num_rounds: int) -> list[dict[str, float]]:
    """Returns the microseconds to read rows of 384 floats, by tier."""
    tier = DiskTier(folder, 64 * MIB)
    keys = [number.to_bytes(32, "big") for number in range(max(LOOKUPS))]
    tier.write([(key, bytes(1552)) for key in keys])
    rows = []
    print("us of a look-up on disk: in the turn (CPU time, wall time), in a thread (CPU time, wall time)")
    for number in LOOKUPS:
        least = {name: float("inf") for name in ("turn_cpu", "turn", "thread_cpu", "thread")}
        for _ in range(num_rounds):
            for name in ("turn", "thread"):
                began_s, began_cpu_s = time.perf_counter(), time.process_time()
                if name == "turn":
                    tier.read(keys[:number])
                else:
                    await asyncio.to_thread(tier.read, keys[:number])
                least[f"{name}_cpu"] = min(least[f"{name}_cpu"], 1e6 * (time.process_time() - began_cpu_s))
                least[name] = min(least[name], 1e6 * (time.perf_counter() - began_s))
        rows.append({"num_rows": number, **least})
        print(f"  {number:4} rows: " + ", ".join(f"{value:.0f}" for value in least.values()))
    tier.close()
    return rows


if __name__ == "__main__":
    main()
