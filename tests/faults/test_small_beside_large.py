"""Small requests beside large ones, on a model that is slow: they wait for forwards, never for whole large requests.

`pytest -s tests/faults/test_small_beside_large.py` prints the figures.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

LARGE = {"input": ["word " * 248] * 100}
"""100 texts of 250 tokens."""
MAX_FORWARDS = 3
"""A small request waits for the running forward, may be passed over once by texts of similar length, and runs."""


@pytest.fixture(scope="module")
def slow_bert(minilm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT a third of the base size: on one thread it does less than 2,000 tokens a second."""
    transformers: Any = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("slow-bert")
    transformers.BertModel(transformers.BertConfig(vocab_size=30_522, num_hidden_layers=4)).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        if (minilm_folder / file).exists():
            (folder / file).write_bytes((minilm_folder / file).read_bytes())
    return folder


@pytest.fixture(scope="module")
def slow_server(launch, slow_bert: Path):
    # Without a bound of the queue's time, which would refuse the third large request.
    return launch("--num-threads", "1", "--max-queue-s", "0", model=slow_bert)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_large", "num_small"), [(1, 1), (3, 1), (2, 4)])
def test_small_requests_wait_for_forwards_and_not_for_large_ones(slow_server, num_large: int, num_small: int) -> None:
    """`num_small` clients ask for a few words at a time, one request after the other, while large requests run."""
    server = slow_server
    seconds: list[float] = []

    def forwards() -> tuple[float, float, float]:
        names = ("steps_total", "step_seconds_total", "batched_tokens_total")
        steps, step_s, tokens = (server.metric(f"penstock_engine_{name}") for name in names)
        return steps, step_s, tokens

    async def run() -> float:
        async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:

            async def ask(body: dict[str, Any]) -> float:
                began_s = time.monotonic()
                answer = await client.post("/v1/embeddings", json=body)
                assert answer.status_code == 200, answer.text
                return time.monotonic() - began_s

            async def ask_small() -> None:
                await asyncio.sleep(0.5)
                while not all(task.done() for task in large):
                    seconds.append(await ask({"input": "a few words"}))
                    await asyncio.sleep(0.01)

            await ask({"input": ["word " * 248] * 16})  # so that the server knows how fast it is
            large = [asyncio.create_task(ask(LARGE)) for _ in range(num_large)]
            await asyncio.gather(*(ask_small() for _ in range(num_small)))
            return max([await task for task in large])

    before = forwards()
    large_s = asyncio.run(run())
    steps, step_s, tokens = np.subtract(forwards(), before)
    p50, p99 = np.percentile(seconds, [50, 99])
    forward_s = step_s / steps
    print(
        f"{num_large} large, {num_small} small at once: {tokens / step_s:.0f} tokens/s, forwards of {forward_s:.2f} s; "
        f"{len(seconds)} small ones took {p50:.2f} s (median), {p99:.2f} s (p99, {p99 / forward_s:.1f} forwards), "
        f"{max(seconds):.2f} s (most); the large ones {large_s:.1f} s"
    )
    assert p99 <= MAX_FORWARDS * forward_s
