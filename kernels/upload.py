"""The way of small arrays from the host to a device, without a wait."""

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device | str) -> Tensor:
    """Returns a tensor on `device`: itself where it is there.

    On CUDA the host goes on at once. The copy runs through pinned memory, which torch keeps until it has been made: one
    out of memory that is not pinned may wait for all that the stream has to do before it.
    """
    if values.is_cuda or torch.device(device).type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
