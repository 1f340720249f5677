"""A long prompt beside a real memory limit: its chunks shrink before the kernel kills the process."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import MIB, Launch, Server

pytestmark = pytest.mark.slow
NUM_TOKENS = 32_000
CHUNK_SIZE = 2048
"""Tokens. The largest chunk on a CPU, and the fixed one that is killed."""
HEADROOM = 256 * MIB
"""Bytes that the server may take beside what it has once it is ready; a full chunk of `wide_llama` takes more."""
MEMORY_GROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))


@pytest.fixture(scope="session")
def wide_llama(minilm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose layers are narrow and whose MLP is wide: a token takes much memory and little time."""
    transformers: Any = pytest.importorskip("transformers")
    import torch

    folder = tmp_path_factory.mktemp("wide-llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=30_522,
        hidden_size=128,
        intermediate_size=32_768,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2 * NUM_TOKENS,
    )
    transformers.LlamaModel(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (minilm_folder / file).exists():
            shutil.copy(minilm_folder / file, folder)
    return folder


class MemoryGroup:
    """A control group of its own, of version 1 or 2."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_v1 = (folder / "memory.limit_in_bytes").exists()

    def take_in(self, process: int) -> None:
        (self._folder / "cgroup.procs").write_text(str(process))

    def used(self) -> int:
        return int((self._folder / ("memory.usage_in_bytes" if self._is_v1 else "memory.current")).read_text())

    def limit(self, num_bytes: int) -> None:
        (self._folder / ("memory.limit_in_bytes" if self._is_v1 else "memory.max")).write_text(str(num_bytes))


@pytest.fixture
def memory_group() -> Iterator[MemoryGroup]:
    """Skip where this process may make no group with a memory limit."""
    name = f"penstock-test-{uuid.uuid4().hex[:8]}"
    for parent in MEMORY_GROUPS:
        folder = parent / name
        with contextlib.suppress(OSError):
            folder.mkdir()
        if (folder / "memory.limit_in_bytes").exists() or (folder / "memory.max").exists():
            break
        with contextlib.suppress(OSError):
            folder.rmdir()
    else:
        pytest.skip("this process may make no control group with a memory limit")
    yield MemoryGroup(folder)
    for _ in range(100):
        with contextlib.suppress(OSError):
            folder.rmdir()
            break
        time.sleep(0.1)


@pytest.fixture
def limited(launch: Launch, wide_llama: Path, memory_group: MemoryGroup) -> Iterator[Callable[..., Server]]:
    """A server that may take `HEADROOM` more than it has when it is ready."""
    servers: list[Server] = []

    def start(*flags: str) -> Server:
        server = launch(
            "--kv-cache-memory", str(64 * MIB), "--max-model-len", str(NUM_TOKENS + 1000), *flags, model=wide_llama
        )
        servers.append(server)
        for process in (server.process.pid, *server.children()):
            memory_group.take_in(process)
        ask(server, 64)  # what the first request takes once, it takes now
        # What it had before it was taken in does not count, in either version.
        memory_group.limit(memory_group.used() + HEADROOM)
        return server

    yield start
    for server in servers:
        server.process.kill()
        server.process.wait(60)


def ask(server: Server, num_tokens: int, timeout_s: float = 280) -> httpx.Response:
    ids = [1000 + i % 20_000 for i in range(num_tokens)]
    return httpx.post(f"{server.url}/v1/embeddings", json={"input": ids}, timeout=timeout_s)


def test_chunks_shrink_and_a_long_prompt_ends(limited: Callable[..., Server]) -> None:
    server = limited()
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(ask(server, NUM_TOKENS)))
    began_s = time.monotonic()
    asking.start()
    seen: list[tuple[float, float]] = []
    while asking.is_alive():
        if size := server.metric("penstock_engine_chunk_size_tokens"):
            seen.append((server.metric("penstock_engine_memory_pressure"), size))
        time.sleep(0.05)
    asking.join()
    assert answers[0].status_code == 200, f"{answers[0].text} {server.log.read_text()[-3000:]}"
    sizes = [size for _, size in seen]
    print(
        f"\n{NUM_TOKENS} tokens with {HEADROOM // MIB} MiB to take: {time.monotonic() - began_s:.1f} s, chunks of "
        f"{min(sizes):.0f} to {max(sizes):.0f} tokens, memory pressure up to {max(p for p, _ in seen):.2f}"
    )
    assert answers[0].status_code == 200, answers[0].text
    assert answers[0].json()["usage"]["prompt_tokens"] >= NUM_TOKENS
    assert max(pressure for pressure, _ in seen) > 0
    assert max(sizes) < CHUNK_SIZE
    assert server.metric("penstock_engine_restarts_total") == 0
    assert server.metric("penstock_engine_chunked_inputs_completed_total") == 1


def test_a_fixed_chunk_size_is_killed_there(limited: Callable[..., Server]) -> None:
    server = limited("--chunk-size", str(CHUNK_SIZE))
    answer = ask(server, NUM_TOKENS)
    print(f"\nin chunks of {CHUNK_SIZE} tokens: {answer.status_code} {answer.text[:200]}")
    assert answer.status_code == 503
    assert "signal 9" in server.log.read_text()
