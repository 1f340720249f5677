"""What passes the cache, and what a hit is: the same bits, without the core, without room in its queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.client.admission import LookupRateLimit
from penstock.engine.client.dispatcher import Dispatcher
from penstock.engine.client.vector_cache.cache import VectorCache
from penstock.engine.client.vector_cache.model_cache import ModelCache
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import (
    EngineOverloadedError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelExecutionError,
)
from penstock.engine.protocol.messages import RequestFailed
from penstock.engine.protocol.model_info import ModelInfo, ModelKind
from penstock.engine.protocol.multi_vector import MultiVector, SparseKind, SparsePooling
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.request import RequestOptions, TokenizedInput
from penstock.engine.protocol.tasks import PoolingTask, PoolingType

from ..word_model import SubmitRequest, WordCore, info as info_of, tokenizer_pool

PARAMS = PoolingParams()
EVERY = (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.SPARSE_EMBED, PoolingTask.SCORE)
SPARSE = {"tasks": EVERY, "sparse": SparsePooling(kind=SparseKind.TOKEN_WEIGHTS)}
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
        dispatcher.admission.lookups = LookupRateLimit(lambda: 0.0)  # time adds nothing to it
        core = WordCore(dispatcher)
        await opened(cache, info)
        config = EngineConfig(model=str(folder))
        return AsyncEngine(config, info, tokenizers[-1], dispatcher, Mock()), core, cache

    yield made
    for tokenizer in tokenizers:
        tokenizer.close()


async def opened(cache: ModelCache, info: ModelInfo) -> None:
    cache.expect(info.path)
    cache.open(info.path, info)
    await cache.wait()


def num_run(core: WordCore) -> int:
    return sum(len(inputs) for _, inputs in core.sent)


async def test_a_text_is_computed_once_and_the_hit_has_the_same_bits(make: Make) -> None:
    engine, core, cache = await make()
    first = await engine.embed(["a b", "c"], PARAMS)
    again = await engine.embed(["c", "a b", "d", "d"], PARAMS)
    assert num_run(core) == 3
    assert again.embeddings[0].tobytes() == first.embeddings[1].tobytes()
    assert again.embeddings[1].tobytes() == first.embeddings[0].tobytes()
    assert again.embeddings[2].tobytes() == again.embeddings[3].tobytes()
    assert again.num_tokens == [1, 2, 1, 1]
    stats = engine.stats().vectors
    assert stats is cache.stats
    assert (stats.is_open, stats.num_memory_hits, stats.num_disk_hits, stats.num_misses) == (True, 2, 0, 3)
    assert (engine.stats().num_tokens, engine.stats().num_requests) == (0, 0)


async def test_ids_and_their_text_are_the_same(make: Make) -> None:
    engine, core, _ = await make()
    await engine.embed(["a b"], PARAMS)
    await engine.embed([[1, 2]], PARAMS)
    assert num_run(core) == 1


@pytest.mark.parametrize(
    ("params", "options", "is_hit"),
    [
        (PARAMS, RequestOptions(namespace="one"), True),
        (PoolingParams(truncate_prompt_tokens=5), RequestOptions(namespace="one", priority=3, timeout_s=9), True),
        (PoolingParams(normalize=True), RequestOptions(namespace="one", client="b"), True),
        (PARAMS, RequestOptions(namespace="two"), False),
        (PARAMS, RequestOptions(), False),
        (PoolingParams(normalize=False), RequestOptions(namespace="one"), True),
        (PoolingParams(dimensions=2), RequestOptions(namespace="one"), True),
        (PoolingParams(truncate_prompt_tokens=1), RequestOptions(namespace="one"), False),
        (PARAMS, RequestOptions(namespace="one", prompt_name="query"), False),
        (PARAMS, RequestOptions(namespace="one", prompt="c "), False),
    ],
)
async def test_what_is_asked_in_another_way(
    make: Make, params: PoolingParams, options: RequestOptions, is_hit: bool
) -> None:
    engine, core, _ = await make(matryoshka_dimensions=(2,), prompts={"query": "query: "})
    await engine.embed(["a b"], PARAMS, RequestOptions(namespace="one", client="a"))
    await engine.embed(["a b"], params, options)
    assert num_run(core) == (1 if is_hit else 2)


async def every_way(engine: AsyncEngine) -> list[bytes]:
    """Asks for embeddings in every way and returns the numbers of the answers."""
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


async def test_every_way_to_an_embedding_passes_it(make: Make) -> None:
    engine, core, _ = await make(**SPARSE, enable_chunked_processing=True, max_embed_len=100)
    first = await every_way(engine)
    num_first = num_run(core)
    assert num_first > 10
    assert await every_way(engine) == first
    assert num_run(core) == num_first


async def test_late_chunking_is_kept_by_its_parts(make: Make) -> None:
    engine, core, _ = await make()
    one = await engine.embed_late(["a b", "c"], PARAMS)
    other = await engine.embed_late(["a", "b c"], PARAMS)  # the same tokens
    assert num_run(core) == 2
    assert not np.array_equal(one.embeddings, other.embeddings)


async def test_rows_for_tokens_and_classes_do_not_pass(make: Make) -> None:
    engine, core, cache = await make(tasks=(*EVERY, PoolingTask.CLASSIFY), labels=("x", "y"), sparse=SPARSE["sparse"])
    for _ in range(2):
        await engine.token_embed(["a b"], PARAMS)
        await engine.classify(["a b"], PARAMS)
        await engine.embed_combined(["a b"], (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED), PARAMS)
    assert num_run(core) == 6
    assert (cache.stats.num_misses, cache.stats.num_memory_hits) == (0, 0)


async def test_a_model_without_embeddings_has_no_cache(make: Make) -> None:
    _, _, cache = await make(kind=ModelKind.CROSS_ENCODER, tasks=(PoolingTask.SCORE,), max_queued_tokens=1)
    assert not cache.stats.is_open
    multi = {"multi_vector": MultiVector(), "tasks": (PoolingTask.TOKEN_EMBED, PoolingTask.SCORE)}
    _, core, cache = await make(**multi)
    assert not cache.stats.is_open
    assert not core.sent


async def test_hits_need_no_room_and_misses_do(make: Make) -> None:
    engine, core, _ = await make(max_queued_tokens=10)
    await engine.embed(["a b"], PARAMS)
    held = engine._dispatcher.admission
    held.enter(10)
    assert not engine.is_full
    assert (await engine.embed(["a b", "a b"], PARAMS)).num_tokens == [2, 2]
    with pytest.raises(EngineOverloadedError):
        await engine.embed(["a b", "c"], PARAMS)
    with pytest.raises(EngineOverloadedError):
        await engine.token_embed(["a b"], PARAMS)
    held.leave(10)
    assert (await engine.embed(["c"], PARAMS)).num_tokens == [1]
    assert num_run(core) == 2


async def test_many_looks_in_vain_end_the_looking(make: Make) -> None:
    engine, core, cache = await make(max_queued_tokens=10)
    await engine.embed(["a b"], PARAMS)
    engine._dispatcher.admission.enter(10)
    num_looks = 0
    while not engine.is_full:
        with pytest.raises(EngineOverloadedError):
            await engine.embed(["c"], PARAMS)
        num_looks += 1
    assert 100 < num_looks <= 150
    num_misses = cache.stats.num_misses
    with pytest.raises(EngineOverloadedError):
        await engine.embed(["c"], PARAMS)
    assert cache.stats.num_misses == num_misses  # refused before it was tokenized
    engine._dispatcher.admission.leave(10)
    assert not engine.is_full
    await engine.embed(["a b"], PARAMS)
    assert num_run(core) == 1


async def enter_whole(engine: AsyncEngine) -> None:
    async with engine._dispatcher.open(RequestOptions(), looks_up=True) as request:
        with request.admitted([TokenizedInput(np.zeros(3, np.int32))]):
            """Nothing is run."""


@pytest.mark.parametrize("kind", ["never looked up", "wrong", "cancelled", "refused whole"])
async def test_whatever_comes_to_nothing_while_full_uses_up_the_allowance(make: Make, kind: str) -> None:
    engine, core, _ = await make(max_queued_tokens=10)
    await engine.embed(["a b"], PARAMS)
    engine._dispatcher.admission.enter(10)
    num_asked = 0
    while not engine.is_full:
        num_asked += 1
        assert num_asked < 200
        if kind == "never looked up":
            with pytest.raises(EngineOverloadedError):
                await engine.token_embed(["a b"], PARAMS)
        elif kind == "wrong":
            with pytest.raises(InvalidRequestError):
                await engine.embed(["a " * 30], PARAMS)  # too long, which its tokens tell
        elif kind == "cancelled":
            task = asyncio.create_task(engine.embed(["a b"] * 50, PARAMS))  # so many are tokenized in a thread
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            with pytest.raises(EngineOverloadedError):
                await enter_whole(engine)
    assert num_asked > 100
    assert num_run(core) == 1


async def test_faults_cost_nothing_while_there_is_room(make: Make) -> None:
    engine, _, _ = await make(max_queued_tokens=10)
    for _ in range(300):
        with pytest.raises(InvalidRequestError):
            await engine.embed(["a " * 30], PARAMS)
    assert engine._dispatcher.looks_while_full


async def test_an_engine_that_is_not_ready_answers_no_hits(make: Make) -> None:
    engine, _, _ = await make()
    await engine.embed(["a b"], PARAMS)
    engine._dispatcher.admission.closed_because = "The engine is being started again."
    with pytest.raises(EngineUnavailableError):
        await engine.embed(["a b"], PARAMS)


async def test_failures_and_what_is_not_finite_are_not_kept(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, core, cache = await make()

    def fail(asked: SubmitRequest) -> None:
        core.dispatcher.replicas[0].receive_failure(RequestFailed(asked.request_id, "ModelExecutionError", "No."))

    with monkeypatch.context() as patched:
        patched.setattr(core, "_answer", fail)
        with pytest.raises(ModelExecutionError):
            await engine.embed(["a b"], PARAMS)
    await engine.embed(["a b"], PARAMS)
    assert cache.stats.num_misses == 2
    cache._cache.keep(bytes(32), {"embedding": np.array([1, np.nan], np.float32)})
    assert (await cache._cache.find([bytes(32)])).arrays == {}


async def test_a_request_that_is_cancelled_keeps_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, core, cache = await make()
    monkeypatch.setattr(core, "_answer", lambda *_: None)
    task = asyncio.create_task(engine.embed(["a b"], PARAMS))
    while not core.sent:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert cache._cache.figures()[0].num_bytes == 0


async def test_two_models_share_the_memory_and_not_the_vectors(make: Make, folder: Path) -> None:
    rows = VectorCache(2**20)
    engine, _, _ = await make(rows)
    await engine.embed(["a b"], PARAMS)
    same, same_core, _ = await make(rows, name="another name", max_model_len=20)
    await same.embed(["a b"], PARAMS)
    assert num_run(same_core) == 0
    other, other_core, _ = await make(rows, sequence_pooling=(PoolingType.CLS,))
    await other.embed(["a b"], PARAMS)
    assert num_run(other_core) == 1
    (folder / "model.safetensors").write_bytes(b"other")
    changed, changed_core, _ = await make(rows)
    await changed.embed(["a b"], PARAMS)
    assert num_run(changed_core) == 1


async def test_what_was_kept_on_disk_is_found_by_the_next_server(make: Make, tmp_path: Path) -> None:
    rows = VectorCache(0, tmp_path / "cache", 2**20)
    engine, _, _ = await make(rows)
    first = await engine.embed(["a b", "c d e"], PARAMS)
    rows.close()
    again = VectorCache(2**20, tmp_path / "cache", 2**20)
    engine, core, cache = await make(again)
    for _ in range(2):
        assert (await engine.embed(["a b", "c d e"], PARAMS)).embeddings.tobytes() == first.embeddings.tobytes()
    assert num_run(core) == 0
    assert (cache.stats.num_disk_hits, cache.stats.num_memory_hits) == (2, 2)
    assert [tier.name for tier in again.figures()] == ["memory", "disk"]
    assert all(tier.num_bytes > 0 for tier in again.figures())
    again.close()


async def test_a_folder_that_cannot_be_used_is_gone_without(make: Make, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").write_text("")
    rows = VectorCache(2**20, tmp_path / "file", 2**20)
    engine, core, _ = await make(rows)
    for _ in range(2):
        await engine.embed(["a b"], PARAMS)
    assert num_run(core) == 1
    assert [(tier.name, tier.is_working) for tier in rows.figures()] == [("memory", True), ("disk", False)]
    assert len(caplog.records) == 1


async def test_another_model_behind_the_same_engine_finds_nothing_of_the_last(make: Make, folder: Path) -> None:
    engine, core, cache = await make()
    await engine.embed(["a b"], PARAMS)
    (folder / "model.safetensors").write_bytes(b"others")
    cache.expect(str(folder))
    cache.open(str(folder), engine.info)
    assert not cache.stats.is_open
    await engine.embed(["a b"], PARAMS)
    await cache.wait()
    await engine.embed(["a b"], PARAMS)
    assert num_run(core) == 3


async def test_cores_that_may_have_loaded_different_files_are_not_trusted(
    make: Make, folder: Path, caplog: Any
) -> None:
    engine, _, cache = await make()
    for is_changed in (False, True):
        if is_changed:
            (folder / "model.safetensors").write_bytes(b"others")
        cache.expect(str(folder))  # one of two has died
        cache.open(str(folder), engine.info, has_one_core=False)
        await cache.wait()
        assert cache.stats.is_open is not is_changed
    assert "have changed" in caplog.text


async def test_files_that_change_while_the_model_loads_are_not_trusted(make: Make, folder: Path, caplog: Any) -> None:
    engine, core, cache = await make()
    cache.expect(str(folder))
    (folder / "model.safetensors").write_bytes(b"words")
    cache.open(str(folder), engine.info)
    await cache.wait()
    assert not cache.stats.is_open
    assert "have changed while it was loaded" in caplog.text
    for _ in range(2):
        await engine.embed(["a b"], PARAMS)
    assert num_run(core) == 2


async def test_the_keys_of_many_tokens_are_made_in_a_thread(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.client.vector_cache.model_cache._MANY_TOKENS", 1)
    engine, core, _ = await make()
    for _ in range(2):
        await engine.embed(["a b", "c"], PARAMS)
    assert num_run(core) == 2


async def test_what_stands_for_a_folder_is_no_change_of_its_files(make: Make, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    for name, is_open in ((str(tmp_path / "link"), True), ("owner/words", True), (str(tmp_path), False)):
        engine, _, cache = await make()
        cache.expect(name)  # the core tells which folder it has found
        cache.open(str(folder), engine.info)
        await cache.wait()
        assert cache.stats.is_open is is_open


def test_secret_is_shared_through_a_folder_only(tmp_path: Path) -> None:
    assert VectorCache(2**20).shared_secret is None
    pytest.importorskip("lmdb")
    rows = VectorCache(0, tmp_path / "cache", 2**20)
    assert rows.shared_secret == rows.secret == (tmp_path / "cache" / "secret").read_bytes()
    rows.close()
