"""Pooling on CUDA where triton is not installed: plain torch, which does not wait either."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from penstock.kernels import backends
from penstock.kernels.pooling import POOLING_KINDS, PoolingKind, pool

from .pretend_cuda import DEVICE, PretendCuda, pretend_cuda

LENGTHS = (0, 3, 1, 0, 9, 4, 0)
SKIPS = (0, 1, 2, 5, 0, 4, 1)


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendCuda]:
    monkeypatch.setattr(backends, "has_triton", lambda: False)
    with pretend_cuda() as mode:
        yield mode


def make(device: torch.device | str) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(LENGTHS), 6, generator=numbers) - 3.0  # maxima below 0
    given = {
        "hidden_states": rows,
        "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0).int(),
        "skip_tokens": torch.tensor(SKIPS, dtype=torch.int32),
        "weights": torch.rand(sum(LENGTHS), generator=numbers),
    }
    return {name: tensor.to(device) for name, tensor in given.items()}


@pytest.mark.parametrize("skips", [False, True], ids=["", "skips"])
@pytest.mark.parametrize("kind", POOLING_KINDS)
def test_whole_sequences(kind: PoolingKind, skips: bool, mode: PretendCuda) -> None:
    def run(given: dict[str, Tensor], **options: str) -> Tensor:
        weights = given["weights"] if kind == "weighted" else None
        skip_tokens = given["skip_tokens"] if skips else None
        rows, bounds = given["hidden_states"], given["cu_seqlens"]
        return pool(rows, bounds, kind, skip_tokens=skip_tokens, weights=weights, **options)

    given = make(DEVICE)
    with mode.watched():
        actual = run(given)
    torch.testing.assert_close(actual.cpu(), run(make("cpu"), backend="reference"), atol=5e-6, rtol=0)
