"""Records what a function asks of a device, to be asked again as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Recorder(Protocol):
    """Records functions on one device."""

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Runs a function and records what it does.

        Args:
            run: Reads tensors that stay where they are; launches the same kernels each time, whatever they hold.

        Returns:
            A function that does the same again, on what those tensors hold then, and the tensor that it writes.

        Raises:
            RuntimeError: It cannot be recorded, because it waits for the device, or there is too little memory; or the
                device is lost.
        """
        ...

    def wait(self) -> None:
        """Sleeps until the device has done all that it was asked. torch.AcceleratorError where it is lost."""
        ...


class CudaRecorder:
    """Records CUDA graphs. They share their memory, so that one must not begin before the last has been read.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """See Recorder."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            # A recording that fails may leave its stream the current one; this puts the right one back.
            with torch.cuda.stream(current):
                self._stream.wait_stream(current)
                with torch.cuda.stream(self._stream):
                    run()  # what happens once must not happen while recording: compiling, or taking a workspace
                current.wait_stream(self._stream)
                graph = torch.cuda.CUDAGraph()
                # Other threads of this process may ask something of CUDA meanwhile: that is no error.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    out = run()
        return graph.replay, out

    def wait(self) -> None:
        """See Recorder."""
        torch.cuda.synchronize(self._device)
