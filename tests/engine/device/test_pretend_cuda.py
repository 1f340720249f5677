"""The pretended device raises where CUDA would wait, and otherwise gives the results of the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from .pretend_cuda import DEVICE, HiddenSyncError, OnCuda, pretend_cuda

WAITS: dict[str, Callable[[Tensor], object]] = {
    "read": lambda x: x[0, 0].item(),
    "copy_to_host": lambda x: x.to("cpu"),
    "values_read_inside_of_torch": lambda x: torch.arange(x[0, 1]),
    "shape_of_values": lambda x: torch.where(x > 1),
    "mask": lambda x: x[:, x[0] > 1],
    "repeat_interleave": lambda x: x.repeat_interleave(x[:, 0].long(), dim=0),
    "index_of_list": lambda x: x[[0, 2]],
    "index_on_host": lambda x: x[torch.tensor([0, 2])],
    "copy_host_rows": lambda x: x.copy_(torch.zeros(3, 4), non_blocking=True),
    "copy_pinned_rows": lambda x: x.copy_(torch.zeros(3, 4).pin_memory()),
    "tensor_of_list": lambda x: torch.tensor([1, 2], device=x.device),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "to_like": lambda x: torch.zeros(2).to(x),
    "to_cuda_not_pinned": lambda x: torch.zeros(2).to(x.device, non_blocking=True),
    "copy_out_not_pinned": lambda x: torch.zeros(3, 4).copy_(x, non_blocking=True),
}
RUNS: dict[str, Callable[[Tensor], Tensor]] = {
    "host_number": lambda x: (x + 1).mul_(2) * torch.tensor(2.0),
    "index": lambda x: x[torch.arange(2, device=x.device)],
    "repeat": lambda x: x.repeat_interleave(torch.ones(3, dtype=torch.int64, device=x.device), dim=0, output_size=3),
    "zeros": lambda x: torch.zeros(4, device=x.device) + x.new_ones(4),
    "cast": lambda x: x.to(torch.bfloat16),
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
    expected = RUNS[name](rows())
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


def test_host_and_device_do_not_mix() -> None:
    with pretend_cuda():
        x = rows().to(DEVICE)
        with pytest.raises(RuntimeError, match="on cuda and on the cpu"):
            x + rows()
