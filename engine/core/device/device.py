"""Selects and checks the device of a model, reads its memory, and translates its errors."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import clear_frames
from typing import Final

import torch

from ...protocol.config import EngineConfig
from ...protocol.errors import MachineError
from ..runner import DeviceLostError, DeviceMemoryError
from .memory import MemoryGauge

logger = logging.getLogger("penstock.engine")

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_MIN_DRIVERS: Final = {"11": "450.80.02", "12": "525.60.13", "13": "580"}
"""The oldest NVIDIA driver for Linux that runs programs of each major version of CUDA."""
_NO_STATS: Final = {f"{kind}_bytes": {"all": {"current": 0, "peak": 0}} for kind in ("allocated", "reserved")}
"""torch has no statistics before the first allocation."""


def resolve_device(config: EngineConfig) -> tuple[str, str]:
    """Returns the device and dtype of a configuration and resolves "auto". On a CPU "auto" is float32; see `cpu_dtype`.

    Raises:
        MachineError: The device does not exist, or torch does not support it.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu" and (reason := why_unusable()):
            logger.warning("%s The model runs on the CPU; set --device cpu to hide this warning.", reason)
    index = int(device.partition(":")[2] or 0)
    if device != "cpu" and index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        if count:
            last = f" to cuda:{count - 1}" if count > 1 else ""
            remedy = f"set cuda:0{last}."
        else:
            remedy = "install a CUDA build of torch and a driver, or set --device cpu."
        reason = "" if count else why_unusable()
        raise MachineError(
            f"--device is {device}, but torch {torch.__version__} finds {count} CUDA devices; {remedy}"
            + (f" {reason}" if reason else "")
        )
    if device != "cpu" and config.dtype == "int8":
        raise MachineError(f"--dtype int8 needs the native kernels of a CPU, but the device is {device}.")
    if device != "cpu":
        check_capability(device, index)
    if config.dtype != "auto":
        return device, config.dtype
    if device == "cpu":
        return device, "float32"
    with torch.cuda.device(index):  # devices may differ
        # Before Ampere bfloat16 is emulated, at a fraction of the speed of float16.
        return device, "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"


def why_unusable() -> str:
    """Returns a sentence with the reason why torch cannot use a GPU of this machine, and the fix.

    Returns "" without an NVIDIA driver, for a build of torch without CUDA, and if CUDA_VISIBLE_DEVICES hides all GPUs.
    """
    cuda = torch.version.cuda
    if cuda is None or not _NVIDIA_DRIVER.is_file() or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    found = re.search(r"^NVRM version:.*?\s(\d+\.[\d.]+)\s", _NVIDIA_DRIVER.read_text())
    driver = found[1] if found else "of unknown version"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # torch's message
        problem = str(error).partition("\n")[0]
    else:
        problem = "no device is visible"
    min_driver = _MIN_DRIVERS.get(cuda.partition(".")[0])
    needed = (
        f"CUDA {cuda} needs driver {min_driver} or newer"
        if min_driver
        else f"Check that the driver supports CUDA {cuda}"
    )
    return (
        f"This machine has NVIDIA driver {driver}, but torch {torch.__version__} can use no GPU: {problem} "
        f"({needed}; in a container, GPUs must be passed in, as by docker run --gpus all)."
    )


def check_capability(device: str, index: int) -> None:
    """Checks that this build of torch supports a CUDA device.

    Args:
        device: Name of the device, for the message.
        index: Number of the device in torch.

    Raises:
        MachineError: It does not: the first kernel would fail.
    """
    compiled = torch.cuda.get_arch_list()
    capability = torch.cuda.get_device_capability(index)
    if has_code_for(capability, compiled):
        return
    major, minor = capability
    name = torch.cuda.get_device_name(index)
    raise MachineError(
        f"--device is {device}, which is {name} of compute capability {major}.{minor}, but "
        f"torch {torch.__version__} supports only {', '.join(compiled)}. Install a build of torch for "
        f"sm_{major}{minor} (https://pytorch.org/get-started/previous-versions lists older ones), or set --device cpu."
    )


def has_code_for(capability: tuple[int, int], compiled: Sequence[str]) -> bool:
    """Returns whether a CUDA device can run one of the targets that torch was compiled for.

    sm_XY is machine code for devices of major version X and minor version Y or later. compute_XY is PTX, which the
    driver compiles for devices of version X.Y or later. A target with the suffix `a` runs only on X.Y. A target with
    the suffix `f` follows the rule of sm_XY. Without any such target, as in builds for AMD, the result is True.
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


def set_exact_products() -> None:
    """Makes CUDA compute float32 products in float32, and accumulate 16-bit products in float32.

    The first setting is torch's default, but other code may have changed it. The second is not the default: cuBLAS may
    add the partial sums of a split product in 16 bits.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that memory was short. CPU and pinned memory are recognised by torch's message."""
    if isinstance(error, torch.AcceleratorError):  # the host cannot pin memory; the device still works
        return "out of memory" in str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


@contextmanager
def device_errors() -> Iterator[None]:
    """Translates errors of torch into errors of runner.py.

    Raises:
        DeviceLostError: The device is lost.
        DeviceMemoryError: Memory was short. The CUDA cache of torch was freed.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            if isinstance(error, torch.AcceleratorError):
                raise DeviceLostError(str(error)) from error
            raise
        clear_frames(error.__traceback__)  # the frames refer to the activations of the forward
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        raise DeviceMemoryError(str(error)) from error


class CudaMemory(MemoryGauge):
    """Reads the memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def available(self) -> int:
        """Returns the bytes that can be allocated now, including the cache of torch."""
        free, _ = torch.cuda.mem_get_info(self._device)
        stats = _memory_stats(self._device)
        return free + stats["reserved_bytes"]["all"]["current"] - stats["allocated_bytes"]["all"]["current"]

    def reset_peak(self) -> None:
        """Starts a new measurement of the peak."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = _memory_stats(self._device)["allocated_bytes"]["all"]["current"]

    def peak_bytes(self) -> int:
        """Returns the peak of allocated bytes since `reset_peak`."""
        return _memory_stats(self._device)["allocated_bytes"]["all"]["peak"] - self._before


def gauge_of(device: torch.device) -> MemoryGauge:
    """Returns the gauge of the memory that forwards on a device use."""
    return CudaMemory(device) if device.type == "cuda" else MemoryGauge()


def total_memory(device: torch.device) -> int | None:
    """Returns the memory of a CUDA device in bytes; None for the host."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def _memory_stats(device: torch.device) -> dict[str, dict[str, dict[str, int]]]:
    """Returns torch's memory statistics of a CUDA device as a nested dictionary.

    torch.cuda.memory_allocated makes a flat, sorted copy of all statistics, which takes about 60 us.
    """
    stats: dict[str, dict[str, dict[str, int]]] = torch.cuda.memory_stats_as_nested_dict(device)
    return stats or _NO_STATS
