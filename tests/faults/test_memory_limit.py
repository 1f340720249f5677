"""A long prompt at a real memory limit: its chunks shrink before the kernel kills the process."""

import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from ..servers import MIB, Launch, Server
from ..waiting import wait_until

pytestmark = pytest.mark.slow
NUM_TOKENS = 32_000
CHUNK_SIZE = 2048
"""Tokens of the largest chunk on a CPU."""
HEADROOM = 256 * MIB
"""Memory that the ready server may add. A full chunk needs more."""
CGROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))


class MemoryGroup:
    """A control group of version 1 or 2."""

    def __init__(self, folder: Path) -> None:
        is_v1 = (folder / "memory.limit_in_bytes").exists()
        self.processes = folder / "cgroup.procs"
        self.used = folder / ("memory.usage_in_bytes" if is_v1 else "memory.current")
        self.limit = folder / ("memory.limit_in_bytes" if is_v1 else "memory.max")


@pytest.fixture
def memory_group() -> Iterator[MemoryGroup]:
    """Skip the test if this process may create no group with a memory limit."""
    name = f"penstock-test-{uuid.uuid4().hex[:8]}"
    for folder in (parent / name for parent in CGROUPS):
        with contextlib.suppress(OSError):
            folder.mkdir()
        if MemoryGroup(folder).limit.exists():
            break
        with contextlib.suppress(OSError):
            folder.rmdir()
    else:
        pytest.skip("needs root, to create a control group with a memory limit")
    group = MemoryGroup(folder)
    yield group
    for process in group.processes.read_text().split():
        os.kill(int(process), signal.SIGKILL)

    def is_removed() -> bool:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return not folder.exists()

    wait_until(is_removed, 60)


def embed(server: Server, num_tokens: int) -> httpx.Response:
    ids = [1000 + i % 20_000 for i in range(num_tokens)]
    return httpx.post(f"{server.url}/v1/embeddings", json={"input": ids}, timeout=280)


def test_chunks_shrink_at_the_memory_limit(
    launch: Launch, random_model: Callable[..., Path], memory_group: MemoryGroup
) -> None:
    # A token of this model needs much memory and little time.
    sizes = {"hidden_size": 128, "intermediate_size": 32_768, "num_key_value_heads": 1}
    model = random_model("LlamaModel", max_position_embeddings=2 * NUM_TOKENS, **sizes)
    limits = ("--kv-cache-memory", str(64 * MIB), "--max-model-len", str(NUM_TOKENS + 1000))
    server = launch(*limits, model=model)
    for process in (server.process.pid, *server.children()):
        memory_group.processes.write_text(str(process))
    embed(server, 64)  # memory that the first request takes once
    memory_group.limit.write_text(str(int(memory_group.used.read_text()) + HEADROOM))
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(embed(server, NUM_TOKENS)))
    thread.start()
    sizes, pressures = [], []
    while thread.is_alive():
        if size := server.metric("penstock_engine_chunk_size_tokens"):
            sizes.append(size)
            pressures.append(server.metric("penstock_engine_memory_pressure_ratio"))
        time.sleep(0.05)
    assert answers[0].status_code == 200, f"{answers[0].text} {server.log.read_text()[-3000:]}"
    print(f"\nchunks of {min(sizes):.0f} to {max(sizes):.0f} tokens, memory pressure up to {max(pressures):.2f}")
    assert answers[0].json()["usage"]["prompt_tokens"] >= NUM_TOKENS
    assert max(pressures) > 0
    assert max(sizes) < CHUNK_SIZE
    assert server.metric("penstock_engine_restarts_total") == 0
    assert server.metric("penstock_engine_chunked_inputs_completed_total") == 1
