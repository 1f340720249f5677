"""Loads a model into its runner. Imports torch only for a model that needs it."""

from __future__ import annotations

import os
from typing import Final

from ..model_files.resolve import resolve_model, with_device
from ..protocol.config import EngineConfig
from .array_runner import ArrayRunner
from .host import may_have_gpu, pin
from .loading.cpu_kernels import choose_kernels
from .loading.load_errors import needs_torch
from .runner import Runner

_ALLOCATOR_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Both names of torch's variable, the newer one first. torch reads them when CUDA is first used."""
_FUSION_VARIABLE: Final = "TRITON_DEFAULT_FP_FUSION"
"""Whether triton fuses multiply and add. Triton 3.9 does so by default, and warns that later versions will not."""


def load_runner(config: EngineConfig) -> Runner:
    """Loads the model of a configuration into a runner. Pins the process to `config.cores` if they are set.

    torch selects the device if there may be a GPU. On a CPU the C library runs the models that it supports.

    Raises:
        ModelLoadError: The model cannot be served, or needs torch, which is not installed.
    """
    if config.cores is not None:
        pin(config.cores)
    info, name = resolve_model(config), config.name or config.model
    device, dtype = "cpu", "float32" if config.dtype == "auto" else config.dtype
    why = f"--device {config.device} needs it"
    if config.device != "cpu" and (config.device != "auto" or may_have_gpu()):
        _enable_expandable_segments()
        os.environ.setdefault(_FUSION_VARIABLE, "1")
        with needs_torch(name, why):
            from .device.device import resolve_device
        device, dtype = resolve_device(config)
    info, library = choose_kernels(with_device(info, device, dtype), config)
    if library is not None:
        return ArrayRunner.load(info, library, config)
    if device == "cpu":
        why = f"the C library does not run {info.architecture} in {info.dtype} here"
    with needs_torch(name, why):
        from .model_runner import ModelRunner

        return ModelRunner.load(info, config)


def _enable_expandable_segments() -> None:
    """Enables expandable segments in torch's CUDA allocator, unless the operator configured the allocator.

    Batches differ in size, and fixed segments that are too small for the next batch would waste memory.
    """
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        os.environ[_ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
