"""Whole rows in the cache: one forward serves every width of a text, with the numbers of a server without a cache."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine import AsyncEngine, EngineConfig, PoolingParams
from penstock.engine.client.vector_cache.cache import VectorCache
from penstock.engine.client.vector_cache.model_cache import cut_embeddings, whole_params
from penstock.engine.pooling.heads import Cut
from penstock.engine.pooling.tensor_ops import TensorOps
from penstock.engine.protocol.request import RequestOptions, TokenizedInput
from penstock.engine.protocol.tasks import PoolingTask
from penstock.kernels.cpu import Machine, shared_machine

TEXTS = ["Follow the white rabbit.", "A penstock carries water.", "short", "a much longer text " * 20]
ASKED = [PoolingParams(dimensions=width, normalize=norm) for width in (64, 384, None, 128) for norm in (True, False)]
TOLERANCE = 2.5e-7
"""Of the norm of a row: two roundings of float32."""


@pytest.fixture(params=["library", "numpy"])
def machine(request: pytest.FixtureRequest) -> Machine | None:
    machine = shared_machine()
    if request.param == "library" and machine is None:
        pytest.skip("the native kernels are not built")
    return machine if request.param == "library" else None


def resolved(**changes: Any) -> PoolingParams:
    return PoolingParams(task=PoolingTask.EMBED, normalize=True, use_activation=True).clone(**changes)


@pytest.mark.parametrize("width", [1, 7, 64, 383, 384, None])
@pytest.mark.parametrize("normalize", [True, False])
def test_cut_rows_equal_those_of_the_pooler_head(machine: Machine | None, width: int | None, normalize: bool) -> None:
    rows = np.random.default_rng(2).normal(scale=3, size=(9, 384)).astype(np.float32)
    rows[4] = 0
    rows.flags.writeable = False
    params = resolved(dimensions=width, normalize=normalize)
    outputs = [{"embedding": row, "sparse": np.ones((2, 2), np.float32)} for row in rows]
    cut = cut_embeddings(outputs, params, machine)
    expected = TensorOps().cut(torch.from_numpy(rows.copy()), Cut.of([params] * 9, 384)).numpy()
    values = np.stack([output["embedding"] for output in cut])
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, expected, rtol=0, atol=TOLERANCE if normalize else 0)
    assert all(new["sparse"] is old["sparse"] for new, old in zip(cut, outputs, strict=True))
    for row, output in zip(rows, outputs, strict=True):  # each by itself has the same bits
        (alone,) = cut_embeddings([output], params, machine)
        assert alone["embedding"].tobytes() == values[list(map(id, outputs)).index(id(output))].tobytes()
        assert np.array_equal(output["embedding"], row)


@pytest.mark.parametrize(
    ("params", "is_cut"),
    [
        (resolved(), True),
        (resolved(normalize=False, use_activation=False), False),
        (resolved(normalize=False, use_activation=False, dimensions=64), True),
        (resolved(also=(PoolingTask.SPARSE_EMBED,)), True),
        (resolved(also=(PoolingTask.TOKEN_EMBED,)), False),
        (resolved(task=PoolingTask.TOKEN_EMBED), False),
        (PoolingParams(task=PoolingTask.SPARSE_EMBED), False),
        (PoolingParams(task=PoolingTask.CLASSIFY, use_activation=True), False),
    ],
    ids=str,
)
def test_embeddings_alone_are_kept_whole(params: PoolingParams, is_cut: bool) -> None:
    whole = whole_params(params)
    assert (whole is not None) is is_cut
    if whole is not None:
        assert (whole.dimensions, whole.normalize, whole.also) == (None, False, params.also)
        assert whole_params(whole) is None


def num_run(engine: AsyncEngine) -> list[int]:
    """Returns a list that grows with each call of the model: the number of inputs that it is sent."""
    sent: list[int] = []
    real = engine._dispatcher.target.run

    def run(inputs: Sequence[TokenizedInput], *others: Any) -> Any:
        sent.append(len(inputs))
        return real(inputs, *others)

    engine._dispatcher.target.run = run  # type: ignore[method-assign]
    return sent


async def started(folder: Path, cache: VectorCache | None, cpu_kernels: str) -> AsyncEngine:
    config = EngineConfig(
        model=str(folder),
        in_process=True,
        num_threads=1,
        dtype="float32",
        cpu_kernels=cpu_kernels,
        hf_overrides={"matryoshka_dimensions": [64, 128]},
    )
    engine = await AsyncEngine.start(config, cache=cache)
    await engine.wait_for_cache()
    return engine


@pytest.fixture(params=["native", "torch"])
async def engines(
    request: pytest.FixtureRequest, minilm_folder: Path, tmp_path: Path
) -> AsyncIterator[tuple[AsyncEngine, AsyncEngine, Any]]:
    """An engine with a cache, one without, and what starts the first one again over the same folder."""
    if request.param == "native" and shared_machine() is None:
        pytest.skip("the native kernels are not built")
    caches: list[VectorCache] = []
    engines: list[AsyncEngine] = []

    async def again() -> AsyncEngine:
        for cache in caches:
            cache.close()
        caches.append(VectorCache(2**20, tmp_path / "cache", 2**20))
        engines.append(await started(minilm_folder, caches[-1], request.param))
        return engines[-1]

    with_cache = await again()
    engines.append(await started(minilm_folder, None, request.param))
    yield with_cache, engines[-1], again
    for engine in engines:
        await engine.close()
    for cache in caches:
        cache.close()


async def embed_all(engine: AsyncEngine, order: Sequence[PoolingParams]) -> dict[PoolingParams, np.ndarray]:
    return {params: (await engine.embed(TEXTS, params)).embeddings for params in order}


async def test_every_width_and_norm_of_a_text_takes_one_forward(engines: tuple[AsyncEngine, AsyncEngine, Any]) -> None:
    with_cache, without, again = engines
    sent, sent_without = num_run(with_cache), num_run(without)
    first = await embed_all(with_cache, ASKED)  # the smallest width comes first
    assert sent == [len(TEXTS)]
    figures = with_cache.stats().vectors
    assert figures is not None
    assert (figures.num_misses, figures.num_memory_hits) == (len(TEXTS), len(TEXTS) * (len(ASKED) - 1))
    expected = await embed_all(without, ASKED)
    assert sent_without == [len(TEXTS)] * len(ASKED)
    for params, rows in expected.items():
        assert rows.shape == (len(TEXTS), params.dimensions or 384)
        sizes = np.linalg.norm(rows, axis=1, keepdims=True)
        assert np.abs((first[params] - rows) / sizes).max() <= 1e-6
        if with_cache.info.kernels.startswith("native"):
            assert first[params].tobytes() == rows.tobytes()
    scores = [await engine.score(TEXTS[:1], TEXTS[1:], PoolingParams()) for engine in (with_cache, without)]
    np.testing.assert_allclose(scores[0].scores, scores[1].scores, atol=1e-6)
    assert sent == [len(TEXTS)]  # the rows of the score were there

    restarted = await again()
    sent = num_run(restarted)
    for params, rows in (await embed_all(restarted, list(reversed(ASKED)))).items():
        assert rows.tobytes() == first[params].tobytes()
    assert sent == []


async def test_another_namespace_computes_its_own_row(engines: tuple[AsyncEngine, AsyncEngine, Any]) -> None:
    with_cache, _, _ = engines
    sent = num_run(with_cache)
    for namespace in ("one", "two", "one"):
        await with_cache.embed(TEXTS[:1], PoolingParams(), RequestOptions(namespace=namespace))
    assert sent == [1, 1]
