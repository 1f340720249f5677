"""The device that the model runs on: which one, what memory it has, how long forwards take on it, and how it fails."""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import clear_frames
from typing import Final

import torch

from ...protocol.config import EngineConfig
from ...protocol.errors import MachineError
from ..host import available_memory
from ..runner import DeviceLostError, DeviceMemoryError, ForwardTime
from .device_stream import DeviceStream, Mark

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_NO_STATS: Final = {f"{kind}_bytes": {"all": {"current": 0, "peak": 0}} for kind in ("allocated", "reserved")}
"""As before the first allocation, of which torch says nothing."""

logger = logging.getLogger("penstock.engine")

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_LEAST_DRIVERS: Final = {"11": "450.80.02", "12": "525.60.13", "13": "580"}
"""The oldest NVIDIA driver for Linux that runs programs of each major version of CUDA."""


def resolve_device(config: EngineConfig) -> tuple[str, str]:
    """Returns the device and dtype of a configuration. "auto" is chosen here: float32 on a CPU, see `cpu_dtype`.

    Raises:
        MachineError: There is no such device, or torch has no code for it.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu" and (reason := why_unusable()):
            logger.warning("%s The model runs on the CPU; --device cpu asks for that without this warning.", reason)
    index = int(device.partition(":")[2] or 0)
    if device != "cpu" and index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        way_out = (
            f"take cuda:0{f' to cuda:{count - 1}' if count > 1 else ''}."
            if count
            else "install a CUDA build of torch and a driver, or take --device cpu."
        )
        reason = "" if count else why_unusable()
        raise MachineError(
            f"--device is {device}, but torch {torch.__version__} sees {count} CUDA devices; {way_out}"
            + (f" {reason}" if reason else "")
        )
    if device != "cpu" and config.dtype == "int8":
        raise MachineError(f"--dtype int8 is for the native kernels of a CPU, and the device is {device}.")
    if device != "cpu":
        check_capability(device, index)
    if config.dtype != "auto":
        return device, config.dtype
    if device == "cpu":
        return device, "float32"
    with torch.cuda.device(index):  # of several, they may differ
        # Before Ampere bfloat16 is emulated, at a fraction of the speed of float16.
        return device, "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"


def why_unusable() -> str:
    """Returns the reason why torch can use no NVIDIA GPU of this machine, and the fix, as one sentence.

    Returns "" without an NVIDIA driver, for a build of torch without CUDA, and if CUDA_VISIBLE_DEVICES hides all GPUs.
    """
    cuda = torch.version.cuda
    if cuda is None or not _NVIDIA_DRIVER.is_file() or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    found = re.search(r"^NVRM version:.*?\s(\d+\.[\d.]+)\s", _NVIDIA_DRIVER.read_text())
    driver = found[1] if found else "of unknown version"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # torch's own words for it
        said = str(error).partition("\n")[0]
    else:
        said = "no device is visible"
    least = _LEAST_DRIVERS.get(cuda.partition(".")[0])
    needed = f"CUDA {cuda} needs driver {least} or newer" if least else f"Check that the driver supports CUDA {cuda}"
    return (
        f"This machine has NVIDIA driver {driver}, but torch {torch.__version__} can use no GPU: {said} "
        f"({needed}; in a container, GPUs must be passed in, as by docker run --gpus all)."
    )


def check_capability(device: str, index: int) -> None:
    """Checks that torch has code for a CUDA device.

    Args:
        device: Its name, for the message.
        index: Its number in torch.

    Raises:
        MachineError: There is none: the first kernel would fail.
    """
    compiled = torch.cuda.get_arch_list()
    capability = torch.cuda.get_device_capability(index)
    if has_code_for(capability, compiled):
        return
    major, minor = capability
    name = torch.cuda.get_device_name(index)
    raise MachineError(
        f"--device is {device}, which is {name} of compute capability {major}.{minor}, but "
        f"torch {torch.__version__} has code for {', '.join(compiled)} alone. Install a build of torch for "
        f"sm_{major}{minor} (https://pytorch.org/get-started/previous-versions lists older ones), or take --device cpu."
    )


def has_code_for(capability: tuple[int, int], compiled: Sequence[str]) -> bool:
    """Returns whether a CUDA device can run one of the targets that torch was compiled for.

    sm_XY is machine code for devices of major version X and minor version Y or later. compute_XY is PTX, which the
    driver compiles for devices of version X.Y or later. A target with the suffix `a` runs on X.Y alone. One with
    the suffix `f` follows the rule of sm_XY. Without any such target, as in builds for AMD, the result is True.

    Args:
        capability: Major and minor version of the device.
        compiled: As torch.cuda.get_arch_list gives them.
    """
    targets = [found for name in compiled if (found := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name))]
    for kind, major, minor, suffix in (target.groups() for target in targets):
        version = int(major), int(minor)
        if suffix == "a":
            fits = capability == version
        elif kind == "sm" or suffix == "f":
            fits = capability[0] == version[0] and capability[1] >= version[1]
        else:
            fits = capability >= version
        if fits:
            return True
    return not targets


def multiply_exactly() -> None:
    """Has CUDA keep float32 products in float32, and add up those of 16 bits in float32 to the end.

    The first is torch's default, said here so that nothing else changes it. The second is not: torch lets cuBLAS add in
    16 bits the parts of a product that was split along its inner width.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory was short; on a CPU, and of pinned memory, torch says so in words alone."""
    if isinstance(error, torch.AcceleratorError):  # the device goes on: the host has no more memory to pin
        return "out of memory" in str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


@contextmanager
def device_errors() -> Iterator[None]:
    """Says in the words of the loop what torch raises of the device.

    Raises:
        DeviceLostError: The device is lost.
        DeviceMemoryError: Memory was short. What torch keeps on CUDA for later use is given back.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            if isinstance(error, torch.AcceleratorError):
                raise DeviceLostError(str(error)) from error
            raise
        clear_frames(error.__traceback__)  # they hold all that the forward had come to
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        raise DeviceMemoryError(str(error)) from error


class DeviceMemory:
    """A MemoryGauge of the host or of a CUDA device.

    Args:
        device: Which.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._tells = self._is_cuda or _can_reset_peak()
        self._before = 0

    def available(self) -> int:
        """Returns the Bytes that could be allocated now, those that torch keeps for later use among them."""
        if not self._is_cuda:
            return available_memory()
        free, _ = torch.cuda.mem_get_info(self._device)
        stats = _memory_stats(self._device)
        return free + stats["reserved_bytes"]["all"]["current"] - stats["allocated_bytes"]["all"]["current"]

    def total(self) -> int | None:
        """Returns the Bytes that a CUDA device has; None of the host."""
        return torch.cuda.get_device_properties(self._device).total_memory if self._is_cuda else None

    def begin(self) -> None:
        """Forgets the last peak."""
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = _memory_stats(self._device)["allocated_bytes"]["all"]["current"]
        elif self._tells:
            _CLEAR_REFS.write_text(_RESET_PEAK)
            self._before = _resident("VmRSS")

    def taken(self) -> int | None:
        """Returns the most Bytes that were taken at once since `begin`; None where the kernel does not tell."""
        if self._is_cuda:
            return _memory_stats(self._device)["allocated_bytes"]["all"]["peak"] - self._before
        return _resident("VmHWM") - self._before if self._tells else None


def _memory_stats(device: torch.device) -> dict[str, dict[str, dict[str, int]]]:
    """Returns torch's statistics of a CUDA device as they are.

    torch.cuda.memory_allocated and its like make a flat and sorted copy for each number, some 60 us each.
    """
    stats: dict[str, dict[str, dict[str, int]]] = torch.cuda.memory_stats_as_nested_dict(device)
    return stats or _NO_STATS


def _can_reset_peak() -> bool:
    """Whether the kernel lets this process ask for the peak of its memory from now on; hardened containers may not."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _resident(field: str) -> int:
    """Bytes of a line of the kernel's status of this process."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


class ForwardClock:
    """Times forwards by marks in the work of their device, of which several may be under way. Never waits for one.

    Args:
        stream: Where they run.
    """

    def __init__(self, stream: DeviceStream) -> None:
        self._stream = stream
        self._began = stream.mark()
        self._under_way: deque[tuple[Mark, Mark, int, int]] = deque()

    def begin(self) -> None:
        """Starts the time of the next forward."""
        self._began = self._stream.mark()

    def end(self, chunk_tokens: int, whole_tokens: int) -> Mark:
        """Returns the end of a forward, of which everything has been asked for; see ForwardTime."""
        ended = self._stream.mark()
        self._under_way.append((self._began, ended, chunk_tokens, whole_tokens))
        return ended

    def take(self) -> list[ForwardTime]:
        """Returns the forwards that were seen to end since the last call."""
        times = []
        while self._under_way and self._under_way[0][1].is_reached:
            began, ended, chunk_tokens, whole_tokens = self._under_way.popleft()
            times.append(ForwardTime(chunk_tokens, whole_tokens, ended.at_ms(began) / 1000))
        return times
