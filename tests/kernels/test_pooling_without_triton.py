"""Pooling on CUDA without triton runs in plain torch and does not wait for the device."""

import pytest
import torch
from torch import Tensor

from penstock.kernels import backends
from penstock.kernels.pooling import POOLING_KINDS, PoolingKind, pool

from ..pretend_cuda import DEVICE, pretend_cuda
from .references import pool_reference

LENGTHS = (0, 3, 1, 0, 9, 4, 0)
SKIPS = (0, 1, 2, 5, 0, 4, 1)


def arguments_of(kind: PoolingKind, device: torch.device | str, *, skips: bool) -> dict[str, Tensor | None]:
    numbers = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(LENGTHS), 6, generator=numbers) - 3.0  # maxima below 0
    weights = torch.rand(sum(LENGTHS), generator=numbers)
    return {
        "hidden_states": rows.to(device),
        "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0).int().to(device),
        "skip_tokens": torch.tensor(SKIPS, dtype=torch.int32).to(device) if skips else None,
        "weights": weights.to(device) if kind == "weighted" else None,
    }


@pytest.mark.parametrize("skips", [False, True], ids=["", "skips"])
@pytest.mark.parametrize("kind", POOLING_KINDS)
def test_pooling_without_triton_equals_reference(
    kind: PoolingKind, skips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "has_triton", lambda: False)
    with pretend_cuda() as mode:
        arguments = arguments_of(kind, DEVICE, skips=skips)
        with mode.watched():
            found = pool(pooling=kind, **arguments)
        expected = pool_reference(pooling=kind, **arguments_of(kind, "cpu", skips=skips))
        torch.testing.assert_close(found.cpu(), expected, atol=5e-6, rtol=0)
