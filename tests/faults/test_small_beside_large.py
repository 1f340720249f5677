"""Small requests beside large ones on a slow model: they wait for single forwards, not for large requests.

`pytest -s tests/faults/test_small_beside_large.py` prints the measurements.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ..servers import Launch, Server
from .load import Load, request

MAX_FORWARDS = 3
"""A small request waits for the running forward, may be passed over once by texts of similar length, and runs."""


@pytest.fixture(scope="module")
def slow_server(launch: Launch, random_model: Callable[..., Path]) -> Server:
    """A model that does less than 2,000 tokens per second on one thread, and a queue without a time limit."""
    sizes = {"hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12, "intermediate_size": 3072}
    return launch("--num-threads", "1", "--max-queue-s", "0", model=random_model("BertModel", **sizes))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_large", "num_small"), [(1, 1), (3, 1), (2, 4)])
async def test_small_requests_wait_for_few_forwards(slow_server: Server, num_large: int, num_small: int) -> None:
    large = Load(slow_server, request({"input": ["word " * 248] * 100}))
    small = Load(slow_server, request({"input": "a few words"}))
    await asyncio.to_thread(slow_server.embed, ["word " * 248] * 16)  # the server measures its speed

    def forwards() -> list[float]:
        return [slow_server.metric(f"penstock_engine_{name}") for name in ("steps_total", "step_seconds_total")]

    before = forwards()
    running = [asyncio.create_task(large.send()) for _ in range(num_large)]
    await asyncio.sleep(0.5)

    async def send_small() -> None:
        while not all(task.done() for task in running):
            await small.send()
            await asyncio.sleep(0.01)

    await asyncio.gather(*running, *(send_small() for _ in range(num_small)))
    for load in (large, small):
        load.close()
    steps, step_s = np.subtract(forwards(), before)
    p99_s = np.quantile(small.seconds[200], 0.99)
    print(
        f"{num_large} large, {num_small} small at once: forwards of {step_s / steps:.2f} s, p99 of a small request "
        f"{p99_s:.2f} s, large requests up to {max(large.seconds[200]):.1f} s"
    )
    assert set(large.seconds) == set(small.seconds) == {200}
    assert p99_s <= MAX_FORWARDS * step_s / steps
