"""Kernels choose their backend by device, dtype and width."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from penstock.kernels import backends, grouped_linear, maxsim, ssd

from ..pretend_cuda import DEVICE, pretend_cuda

CAPABILITIES = ((7, 5), (8, 0), (9, 0), (12, 0))


@pytest.fixture(params=CAPABILITIES, ids=lambda capability: "sm_{}{}".format(*capability))
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    found: tuple[int, int] = request.param
    with pretend_cuda():
        monkeypatch.setattr(backends, "has_triton", lambda: True)
        monkeypatch.setattr(backends, "capability_of", lambda device: found)
        yield found


def test_capability_and_triton_choose_the_backend(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2, 3, device=DEVICE)
    assert backends.choose(None, x) == "triton"
    assert backends.choose(None, x, has_products=True) == ("triton" if capability >= (8, 0) else "torch")
    assert backends.choose("triton", x, has_products=True) == "triton"
    monkeypatch.setattr(backends, "has_triton", lambda: False)
    assert backends.choose(None, x) == backends.choose(None, x, has_products=True) == "torch"


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("kernel", ["ssd", "maxsim", "grouped_linear", "grouped_linear of odd widths"])
def test_kernel_with_products_runs_in_torch_before_ampere(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "capability_of", lambda device: (7, 5))
    monkeypatch.setattr(grouped_linear, "capability_of", lambda device: (7, 5))
    monkeypatch.setattr(backends, "has_triton", lambda: True)

    def run(device: torch.device) -> Tensor:
        if kernel == "ssd":
            x, dt, a, b = (numbers(*shape).to(device) for shape in ((5, 2, 4), (5, 2), (2,), (5, 1, 8)))
            bounds = torch.tensor([0, 3, 5], dtype=torch.int32).to(device)
            return ssd.ssd(x, dt.abs(), -a.abs(), b, b, bounds, (3, 2))[0]
        if kernel == "maxsim":
            queries, documents = numbers(4, 8).to(device), numbers(7, 8).to(device)
            return maxsim.maxsim(queries, documents, query_lens=(4,), document_lens=(3, 4), query_of=(0, 0))
        width = 7 if kernel.endswith("odd widths") else 8
        x, weight = numbers(6, 8).to(device), numbers(2, width, 8).to(device)
        return grouped_linear.grouped_linear(x, weight, torch.tensor([2, 6], dtype=torch.int32).to(device))

    with pretend_cuda():
        found = run(DEVICE).cpu()
    torch.testing.assert_close(found, run(torch.device("cpu")), atol=1e-5, rtol=1e-5)
