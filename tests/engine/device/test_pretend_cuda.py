"""The pretended device raises where CUDA would wait, and otherwise gives the results of the CPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .pretend_cuda import DEVICE, HiddenSyncError, OnCuda, pretend_cuda

WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0, 0].item(),
    "float": lambda x: float(x[0, 0]),
    "if": lambda x: 1 if x.sum() > 0 else 0,
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to_cpu": lambda x: x.to("cpu"),
    "array": lambda x: np.asarray(x),
    "in": lambda x: 3.0 in x,
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 1),
    "masked_select": lambda x: x.masked_select(x > 1),
    "mask": lambda x: x[:, x[0] > 1],
    "set_mask": lambda x: x.__setitem__(x > 1, x[x > 1]),
    "unique": lambda x: torch.unique(x, return_inverse=True),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "isin": lambda x: torch.isin(x, x[0]),
    "bincount": lambda x: torch.bincount(x.long().flatten(), minlength=20),
    "one_hot": lambda x: F.one_hot(x.long()),
    "repeat_interleave": lambda x: x.repeat_interleave(x[:, 0].long(), dim=0),
    "arange": lambda x: torch.arange(x[0, 1]),
    "index_of_list": lambda x: x[[0, 2]],
    "index_of_array": lambda x: x[np.array([0, 2])],
    "index_on_host": lambda x: x[torch.tensor([0, 2])],
    "set_host_rows": lambda x: x.__setitem__(0, torch.zeros(4).pin_memory()),
    "copy_host_rows": lambda x: x.copy_(torch.zeros(3, 4), non_blocking=True),
    "copy_pinned_rows": lambda x: x.copy_(torch.zeros(3, 4).pin_memory()),
    "tensor_of_list": lambda x: torch.tensor([1, 2], device=x.device),
    "as_tensor": lambda x: torch.as_tensor(np.zeros(2), device="cuda"),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "to_cuda": lambda x: torch.zeros(2).to(DEVICE, torch.int32),
    "cuda": lambda x: torch.zeros(2).cuda(),
    "to_like": lambda x: torch.zeros(2).to(x),
    "to_cuda_not_pinned": lambda x: torch.zeros(2).to(x.device, non_blocking=True),
    "copy_out_not_pinned": lambda x: torch.zeros(3, 4).copy_(x, non_blocking=True),
    "copy_out_pinned": lambda x: torch.empty(3, 4, pin_memory=True).copy_(x),
}
RUNS: dict[str, Callable[[Tensor], Tensor]] = {
    "arithmetic": lambda x: (x + 1).mul_(2) @ x.T,
    "number": lambda x: torch.where(x > 1, x, 0.0),
    "host_number": lambda x: x * torch.tensor(2.0),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.0),
    "slice": lambda x: x[1:, ::2],
    "set_number": lambda x: x.clone().index_fill_(0, torch.arange(1, device=x.device), 7.0),
    "index": lambda x: x[torch.arange(2, device=x.device)],
    "sort": lambda x: x.flatten().argsort(stable=True),
    "split": lambda x: torch.cat(x.split([1, 2])),
    "repeat": lambda x: x.repeat_interleave(torch.ones(3, dtype=torch.int64, device=x.device), dim=0, output_size=3),
    "pinned": lambda x: torch.arange(3).pin_memory().to(x.device, non_blocking=True) + x[:, 0],
    "embedding_bag": lambda x: F.embedding_bag(
        torch.arange(3, device=x.device), x, torch.zeros(1, dtype=torch.int64, device=x.device), mode="sum"
    ),
    "zeros": lambda x: torch.zeros(2, device=x.device) + x.new_ones(2),
    "cast": lambda x: x.to(torch.bfloat16),
    "empty_like": lambda x: torch.empty_like(x).copy_(x),
}


def rows() -> Tensor:
    return torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize("name", WAITS)
def test_waiting_operation_raises(name: str) -> None:
    with pretend_cuda() as mode:
        x = rows().to("cuda")
        with mode.watched(), pytest.raises(HiddenSyncError):
            WAITS[name](x)


@pytest.mark.parametrize("name", RUNS)
def test_other_operation_equals_the_cpu(name: str) -> None:
    torch.zeros(1)
    expected = RUNS[name](rows()) if name != "pinned" else rows()[:, 0] + torch.arange(3)
    with pretend_cuda() as mode:
        x = rows().to(DEVICE)
        with mode.watched():
            result = RUNS[name](x)
            assert isinstance(result, OnCuda)
            assert result.device == DEVICE
            assert result.is_cuda
        result = result.cpu()
        assert result.device.type == "cpu"
    assert torch.equal(result, expected)


def test_pinned_buffers_take_copies_in_both_directions() -> None:
    with pretend_cuda() as mode, mode.watched():
        buffer = torch.empty(40, pin_memory=True)
        buffer[4:16].view(3, 4).copy_(rows())
        x = buffer[4:16].view(3, 4).to(DEVICE, non_blocking=True) + 1
        out = buffer[20:32].view(3, 4)
        out.copy_(x, non_blocking=True)
        assert out.device.type == "cpu"
        assert out.tolist() == (rows() + 1).tolist()
        x.copy_(buffer[4:16].view(3, 4), non_blocking=True)
        out.copy_(x, non_blocking=True)
        assert out.tolist() == rows().tolist()


def test_host_tensors_may_be_read() -> None:
    with pretend_cuda() as mode, mode.watched():
        x = torch.arange(3.0)
        assert x.tolist() == [0.0, 1.0, 2.0]
        assert len(x[x > 0]) == 2
        assert x.device.type == "cpu"
        assert not x.is_cuda


def test_host_and_device_do_not_mix() -> None:
    with pretend_cuda():
        x = rows().to(DEVICE)
        with pytest.raises(RuntimeError, match="on cuda and on the cpu"):
            x + rows()


def test_copies_do_not_share_memory() -> None:
    with pretend_cuda():
        on_host = rows()
        on_device = on_host.to(DEVICE)
        on_device += 1
        back = on_device.cpu()
        back += 1
        assert on_host[0, 0].item() == 0.0
        assert on_device[0, 0].item() == 1.0


@pytest.mark.parametrize("place", ["unwatched", "outside"])
def test_unwatched_operation_may_wait(place: str) -> None:
    with pretend_cuda() as mode:
        x = rows().to(DEVICE)
        with mode.watched() if place == "unwatched" else mode.unwatched(), mode.unwatched():
            assert x.cpu().tolist() == rows().tolist()
