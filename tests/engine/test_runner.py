"""The runner's own doing: batches on CPU are rounded up, and nobody sees it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.engine.config import EngineConfig
from penstock.engine.params import PoolingParams
from penstock.engine.request import TokenizedInput
from penstock.engine.runner import ModelRunner, filler_length


def test_few_sizes_are_left_at_little_cost() -> None:
    sizes = {n + filler_length(n) for n in range(129, 8193)}
    assert len(sizes) < 130
    assert all(filler_length(n) <= n / 16 for n in range(1, 20_000))


@pytest.fixture(scope="module")
def runner(minilm_folder: Path) -> ModelRunner:
    return ModelRunner(EngineConfig(model=str(minilm_folder), device="cpu"))


@pytest.mark.parametrize("lengths", [[1], [130], [3, 7, 60, 63], [1] * 131, [17, 250, 250]])
def test_the_filler_leaves_no_trace(runner: ModelRunner, lengths: list[int]) -> None:
    rng = np.random.default_rng(len(lengths))
    inputs = [TokenizedInput(rng.integers(1000, 30_000, n).astype(np.int32)) for n in lengths]
    params = PoolingParams().resolved(runner.info.tasks[0], runner.info)
    together = runner.execute(inputs, [params] * len(inputs))
    assert len(together) == len(inputs)
    for tokens, outputs in zip(inputs, together, strict=True):
        (alone,) = runner.execute([tokens], [params])
        assert np.abs(alone["embedding"] - outputs["embedding"]).max() < 1e-6
