"""The pretended device raises where CUDA would wait, and otherwise gives the results of the CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from .pretend_cuda import DEVICE, HiddenSyncError, pretend_cuda

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


def rows() -> Tensor:
    return torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize("name", WAITS)
def test_waiting_operation_raises(name: str) -> None:
    with pretend_cuda() as mode:
        x = rows().to("cuda")
        with mode.watched(), pytest.raises(HiddenSyncError):
            WAITS[name](x)


def test_host_and_device_do_not_mix() -> None:
    with pretend_cuda():
        x = rows().to(DEVICE)
        with pytest.raises(RuntimeError, match="on cuda and on the cpu"):
            x + rows()
