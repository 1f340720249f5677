"""AsyncEngine: results of the public calls, limits, cancellation, shutdown and load errors."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.client.core_supervisor import EngineState
from penstock.engine.protocol import errors
from penstock.engine.protocol.config import EngineConfig, SchedulerConfig
from penstock.engine.protocol.params import PoolingParams

from ..waiting import until

TEXTS = ["", "a", "The quick brown fox.", "naïve café — 東京 🚀", *("word " * n for n in (3, 31, 64, 200))]
PARAMS = PoolingParams()


@pytest.fixture(scope="module", params=["process", "in_process"])
def config(request: pytest.FixtureRequest, minilm_folder: Path) -> EngineConfig:
    return EngineConfig(
        model=str(minilm_folder),
        in_process=request.param == "in_process",
        num_threads=1,
        dtype="float32",
        scheduler=SchedulerConfig(max_num_batched_tokens=512, max_queued_tokens=4_000),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(config: EngineConfig) -> AsyncIterator[AsyncEngine]:
    engine = await AsyncEngine.start(config)
    yield engine
    await engine.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_vectors_do_not_depend_on_the_batch(engine: AsyncEngine) -> None:
    together = (await engine.embed(TEXTS, PARAMS)).embeddings
    ids = await engine.tokenize(TEXTS)
    as_ids = (await engine.embed(ids, PARAMS)).embeddings
    alone = np.concatenate([(await engine.embed([text], PARAMS)).embeddings for text in TEXTS])
    crowd = await asyncio.gather(*(engine.embed([text], PARAMS) for text in TEXTS * 2))
    crowded = np.concatenate([r.embeddings for r in crowd]).reshape(2, len(TEXTS), -1)
    assert np.abs(alone - together).max() < 1e-6
    assert np.abs(as_ids - together).max() < 1e-6
    assert np.abs(crowded - together).max() < 1e-6


async def test_drain_finishes_running_requests_and_rejects_others(config: EngineConfig) -> None:
    engine = await AsyncEngine.start(config)
    try:
        running = asyncio.create_task(engine.embed(["word " * 100] * 20, PARAMS))
        await until(lambda: running.done() or engine.stats().num_requests == 1)
        drained = asyncio.create_task(engine.drain(timeout_s=240))
        await asyncio.sleep(0)
        with pytest.raises(errors.EngineUnavailableError, match="shutting down"):
            await engine.embed(["late"], PARAMS)
        assert await drained
        assert (await running).embeddings.shape == (20, 384)
    finally:
        await engine.close()
        await engine.close()
    assert engine.state is EngineState.DEAD
    with pytest.raises(errors.EngineUnavailableError):
        await engine.embed(["late"], PARAMS)


async def test_model_without_a_tokenizer_is_rejected(tmp_path: Path, minilm_folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(minilm_folder / name)
    with pytest.raises(errors.ModelLoadError, match=r"tokenizer"):
        await AsyncEngine.start(EngineConfig(model=str(tmp_path), in_process=True))


async def test_text_above_the_queue_limit_is_rejected(save_bert: Callable[..., Path]) -> None:
    folder = str(save_bert())
    engine = await AsyncEngine.start(EngineConfig(model=folder, in_process=True, max_queued_chars=10))
    try:
        long = (engine.tokenize(["word " * 20_000]) for _ in range(2))
        accepted, rejected = await asyncio.gather(*long, return_exceptions=True)
        assert isinstance(accepted, list)
        assert isinstance(rejected, errors.EngineOverloadedError)
        assert engine.stats().num_rejected_total == 1
        assert (await engine.embed(["the"], PARAMS)).embeddings.shape == (1, 32)
    finally:
        await engine.close()
    with pytest.raises(errors.EngineUnavailableError):  # its tokenizer threads have ended
        await engine.tokenize(["word " * 20_000])
