"""Hits and misses of the cache of one model, and changes of its files."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.client.dispatcher import Dispatcher
from penstock.engine.client.queue_admission import LookupRateLimit
from penstock.engine.client.vector_cache import model_cache
from penstock.engine.client.vector_cache.cache import VectorCache
from penstock.engine.client.vector_cache.model_cache import ModelCache, truncate_embeddings
from penstock.engine.pooling.row_ops import VectorTransform
from penstock.engine.pooling.tensor_ops import TensorOps
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import (
    EngineOverloadedError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelExecutionError,
)
from penstock.engine.protocol.messages import RequestFailed, SubmitRequest
from penstock.engine.protocol.model_info import ModelInfo, ModelKind
from penstock.engine.protocol.multi_vector import MultiVector, SparseKind, SparsePooling
from penstock.engine.protocol.params import PoolingParams, RequestOptions
from penstock.engine.protocol.tasks import PoolingTask
from penstock.kernels.cpu import CpuLibrary, shared_library

from ....clock import Clock
from ....tables import cases
from ..word_model import WordCore, info as info_of, tokenizer_pool

PARAMS = PoolingParams()
EVERY_TASK = (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.SPARSE_EMBED, PoolingTask.SCORE)
SPARSE = {"tasks": EVERY_TASK, "sparse": SparsePooling(kind=SparseKind.TOKEN_WEIGHTS)}
Made = tuple[AsyncEngine, WordCore, ModelCache]
Make = Callable[..., Awaitable[Made]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"words")
    return folder


@pytest.fixture
async def make(folder: Path) -> AsyncIterator[Make]:
    tokenizers = []

    async def made(rows: VectorCache | None = None, max_queued_tokens: int = 1_000, **changes: Any) -> Made:
        tokenizers.append(tokenizer_pool())
        info = info_of(path=str(folder), **changes)
        cache = ModelCache(VectorCache(2**20) if rows is None else rows)
        dispatcher = Dispatcher(max_queued_tokens, cache=cache)
        dispatcher.admission.lookups = LookupRateLimit(Clock())
        core = WordCore(dispatcher)
        await load(cache, folder, info)
        config = EngineConfig(model=str(folder))
        return AsyncEngine(config, info, tokenizers[-1], dispatcher, Mock()), core, cache

    yield made
    for tokenizer in tokenizers:
        tokenizer.close()


async def load(
    cache: ModelCache, expected: Path | str, info: ModelInfo, content: bytes | None = None, **options: Any
) -> None:
    """Opens the cache as a core does that loads `expected`; `content` replaces the weights before the end."""
    cache.record_files(str(expected))
    if content is not None:
        (Path(info.path) / "model.safetensors").write_bytes(content)
    cache.open(info.path, info, **options)
    await cache.wait()


# Hits and misses


async def test_repeated_text_runs_once_and_hits_have_the_same_bits(make: Make) -> None:
    engine, core, cache = await make()
    first = await engine.embed(["a b", "c"], PARAMS)
    again = await engine.embed(["c", "a b", "d", "d"], PARAMS)
    assert core.num_inputs == 3
    assert again.embeddings[0].tobytes() == first.embeddings[1].tobytes()
    assert again.embeddings[1].tobytes() == first.embeddings[0].tobytes()
    assert again.embeddings[2].tobytes() == again.embeddings[3].tobytes()
    assert again.num_tokens == [1, 2, 1, 1]
    stats = engine.stats().vectors
    assert stats is cache.stats
    assert (stats.is_open, stats.num_memory_hits, stats.num_disk_hits, stats.num_misses) == (True, 2, 0, 3)
    assert (engine.stats().num_tokens, engine.stats().num_requests) == (0, 0)
    await engine.embed([[1, 2]], PARAMS)  # the ids of "a b"
    assert core.num_inputs == 3


async def test_truncated_input_is_reported_on_a_hit(make: Make) -> None:
    engine, core, _ = await make()
    params, truncated = PoolingParams(truncate_prompt_tokens=2), []
    for _ in range(2):
        await engine.embed(["a b c", "a b", [1, 2, 3]], params, RequestOptions(on_truncated=truncated.append))
    assert (truncated, core.num_inputs) == ([2, 2], 1)


@cases(__file__, "params", "options", "is_hit")
async def test_request_is_a_hit_if_tokens_and_namespace_are_equal(
    make: Make, params: dict[str, Any], options: dict[str, Any], is_hit: bool
) -> None:
    engine, core, _ = await make(matryoshka_dimensions=(2,), prompts={"query": "query: "})
    await engine.embed(["a b"], PARAMS, RequestOptions(namespace="one", client="a"))
    await engine.embed(["a b"], PoolingParams(**params), RequestOptions(**options))
    assert core.num_inputs == (1 if is_hit else 2)


async def call_everything(engine: AsyncEngine) -> list[bytes]:
    """Makes every call that embeds, and returns the values of the results."""
    long = " ".join("abcde"[n % 5] for n in range(60))
    results = [
        (await engine.embed(["a", long], PARAMS)).embeddings,
        (await engine.embed_late(["a b", "c"], PARAMS)).embeddings,
        (await engine.embed_late(["a b", "c"], PoolingParams(normalize=False))).embeddings,
        (await engine.score(["a"], ["b", "c d"], PARAMS)).scores,
        (await engine.zero_shot(["a", "b"], ["c", "d"], PARAMS)).scores,
        (await engine.few_shot(["a"], [("b", "x"), ("c", "y")], PARAMS)).scores,
        (await engine.embed_combined(["a e"], (PoolingTask.EMBED,), PARAMS)).embeddings,
    ]
    combined = await engine.embed_combined(["b e"], (PoolingTask.EMBED, PoolingTask.SPARSE_EMBED), PARAMS)
    assert combined.sparse is not None
    sparse = await engine.sparse_embed(["c e"], PARAMS)
    results += [combined.embeddings, combined.sparse[0].values, combined.sparse[0].indices, sparse.vectors[0].values]
    return [np.asarray(result).tobytes() for result in results]


async def test_every_call_that_embeds_uses_the_cache(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, core, _ = await make(**SPARSE, enable_chunked_processing=True, max_embed_len=100)
    first = await call_everything(engine)
    num_inputs = core.num_inputs
    assert num_inputs > 10
    monkeypatch.setattr(model_cache, "_MANY_TOKENS", 1)  # keys and truncations are computed in threads
    monkeypatch.setattr(model_cache, "_MANY_NUMBERS", 1)
    assert await call_everything(engine) == first
    assert core.num_inputs == num_inputs


async def test_token_vectors_and_classes_are_not_cached(make: Make) -> None:
    tasks = (*EVERY_TASK, PoolingTask.CLASSIFY)
    engine, core, cache = await make(tasks=tasks, labels=("x", "y"), sparse=SPARSE["sparse"])
    for _ in range(2):
        await engine.token_embed(["a b"], PARAMS)
        await engine.classify(["a b"], PARAMS)
        await engine.embed_combined(["a b"], (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED), PARAMS)
    assert core.num_inputs == 6
    assert (cache.stats.num_misses, cache.stats.num_memory_hits) == (0, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": ModelKind.CROSS_ENCODER, "tasks": (PoolingTask.SCORE,)},
        {"multi_vector": MultiVector(), "tasks": (PoolingTask.TOKEN_EMBED, PoolingTask.SCORE)},
        {"packed": False, "config": {"auto_map": {"AutoModel": "owner/code--modeling.Model"}}},
    ],
)
async def test_model_without_embeddings_or_identity_has_no_cache(
    make: Make, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    _, _, cache = await make(**changes)
    assert not cache.stats.is_open
    assert ("not cached: it runs code" in caplog.text) is ("config" in changes)


async def test_failed_and_cancelled_requests_are_not_cached(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, core, cache = await make()

    def fail(request: SubmitRequest) -> None:
        core.dispatcher.replicas[0].receive(RequestFailed(request.request_id, "ModelExecutionError", "No."), [])

    with monkeypatch.context() as patched:
        patched.setattr(core, "_answer", fail)
        with pytest.raises(ModelExecutionError):
            await engine.embed(["a b"], PARAMS)
    with monkeypatch.context() as patched:
        patched.setattr(core, "_answer", lambda *_: None)
        task = asyncio.create_task(engine.embed(["a b"], PARAMS))
        while len(core.sent) == 1:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert cache._cache.stats()[0].num_bytes == 0
    await engine.embed(["a b"], PARAMS)
    assert cache.stats.num_misses == 3


# A full queue


async def test_hits_are_answered_while_the_queue_is_full(make: Make) -> None:
    engine, core, _ = await make(max_queued_tokens=10)
    await engine.embed(["a b"], PARAMS)
    admission = engine._dispatcher.admission
    admission.enter(10)
    assert not engine.is_full
    assert (await engine.embed(["a b", "a b"], PARAMS)).num_tokens == [2, 2]
    with pytest.raises(EngineOverloadedError):
        await engine.embed(["a b", "c"], PARAMS)
    with pytest.raises(EngineOverloadedError):
        await engine.token_embed(["a b"], PARAMS)
    admission.leave(10)
    assert (await engine.embed(["c"], PARAMS)).num_tokens == [1]
    assert core.num_inputs == 2
    admission.closed_message = "The engine is being started again."
    with pytest.raises(EngineUnavailableError):
        await engine.embed(["a b"], PARAMS)


@pytest.mark.parametrize("kind", ["miss", "invalid", "cancelled"])
async def test_rejected_requests_use_up_the_lookups_of_a_full_queue(make: Make, kind: str) -> None:
    engine, core, cache = await make(max_queued_tokens=10)
    await engine.embed(["a b"], PARAMS)
    engine._dispatcher.admission.enter(10)
    num_requests = 0
    while not engine.is_full:
        num_requests += 1
        assert num_requests <= 150
        if kind == "cancelled":
            task = asyncio.create_task(engine.embed(["a b"] * 50, PARAMS))  # so many are tokenized in a thread
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            with pytest.raises(InvalidRequestError if kind == "invalid" else EngineOverloadedError):
                await engine.embed(["c" if kind == "miss" else "a " * 30], PARAMS)  # 30 tokens are too long
    assert num_requests > 100
    num_misses = cache.stats.num_misses
    with pytest.raises(EngineOverloadedError):
        engine.check_queue()
    with pytest.raises(EngineOverloadedError):
        await engine.embed(["c"], PARAMS)
    assert cache.stats.num_misses == num_misses  # rejected before its tokenization
    engine._dispatcher.admission.leave(10)
    assert not engine.is_full
    await engine.embed(["a b"], PARAMS)
    assert core.num_inputs == 1


# Several models, folders and cores


async def test_next_model_of_an_engine_finds_no_old_vectors(make: Make, folder: Path) -> None:
    engine, core, cache = await make()
    await engine.embed(["a b"], PARAMS)
    (folder / "model.safetensors").write_bytes(b"others")
    cache.record_files(str(folder))
    cache.open(str(folder), engine.info)
    assert not cache.stats.is_open
    await engine.embed(["a b"], PARAMS)
    await cache.wait()
    await engine.embed(["a b"], PARAMS)
    assert core.num_inputs == 3


async def test_replicas_with_different_files_have_no_cache(make: Make, folder: Path, caplog: Any) -> None:
    engine, _, cache = await make()
    for content, is_open in ((b"words", True), (b"others", False)):
        (folder / "model.safetensors").write_bytes(content)
        await load(cache, folder, engine.info, has_one_replica=False)
        assert cache.stats.is_open is is_open
    assert "have changed" in caplog.text


async def test_files_that_change_during_the_load_are_not_cached(make: Make, folder: Path, caplog: Any) -> None:
    engine, core, cache = await make()
    await load(cache, folder, engine.info, b"words")
    assert not cache.stats.is_open
    assert "have changed while it was loaded" in caplog.text
    for _ in range(2):
        await engine.embed(["a b"], PARAMS)
    assert core.num_inputs == 2


# Whole rows

TOLERANCE = 2.5e-7
"""Of the norm of a row: two roundings of float32."""


@pytest.fixture(params=["library", "numpy"])
def truncating_library(request: pytest.FixtureRequest) -> CpuLibrary | None:
    library = shared_library()
    if request.param == "library" and library is None:
        pytest.skip("needs the C library: make native")
    return library if request.param == "library" else None


def resolved(**changes: Any) -> PoolingParams:
    return PoolingParams(task=PoolingTask.EMBED, normalize=True, use_activation=True).clone(**changes)


@pytest.mark.parametrize("width", [7, None])
@pytest.mark.parametrize("normalize", [True, False])
def test_truncated_rows_equal_those_of_the_pooler_head(
    truncating_library: CpuLibrary | None, width: int | None, normalize: bool
) -> None:
    rows = np.random.default_rng(2).normal(scale=3, size=(9, 384)).astype(np.float32)
    rows[4] = 0
    rows.flags.writeable = False
    params = resolved(dimensions=width, normalize=normalize)
    outputs = [{"embedding": row, "sparse": np.ones((2, 2), np.float32)} for row in rows]
    truncated = truncate_embeddings(outputs, params, truncating_library)
    expected = TensorOps().transform(torch.from_numpy(rows.copy()), VectorTransform.of([params] * 9, 384)).numpy()
    values = np.stack([output["embedding"] for output in truncated])
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, expected, rtol=0, atol=TOLERANCE if normalize else 0)
    assert all(new["sparse"] is old["sparse"] for new, old in zip(truncated, outputs, strict=True))
    for place, output in enumerate(outputs):  # alone, each row has the same bits
        (alone,) = truncate_embeddings([output], params, truncating_library)
        assert alone["embedding"].tobytes() == values[place].tobytes()
        assert np.array_equal(output["embedding"], rows[place])
