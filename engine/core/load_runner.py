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
"""Both names of torch, the newer one first. It reads them when CUDA is first used."""
_FUSION_VARIABLE: Final = "TRITON_DEFAULT_FP_FUSION"
"""Whether triton multiplies and adds in one instruction: 3.9 still does if nobody says, and warns of later ones."""


def load_runner(config: EngineConfig) -> Runner:
    """Loads the model that a configuration names.

    Torch selects the device if there may be a GPU. The C library runs the models that it knows on a CPU. A process that
    has cores of its own keeps to them from here on.

    Raises:
        ModelLoadError: The model cannot be served, or needs torch where that is not installed.
    """
    if config.cores is not None:
        pin(config.cores)
    info, name = resolve_model(config), config.name or config.model
    device, dtype = "cpu", "float32" if config.dtype == "auto" else config.dtype
    why = f"--device {config.device} is torch's"
    if config.device != "cpu" and (config.device != "auto" or may_have_gpu()):
        _let_segments_grow()
        os.environ.setdefault(_FUSION_VARIABLE, "1")
        with needs_torch(name, why):
            from .device.device import resolve_device
        device, dtype = resolve_device(config)
    info, machine = choose_kernels(with_device(info, device, dtype), config)
    if machine is not None:
        return ArrayRunner.load(info, machine, config)
    if device == "cpu":
        why = f"the native kernels do not run {info.architecture} in {info.dtype} here"
    with needs_torch(name, why):
        from .model_runner import ModelRunner

        return ModelRunner.load(info, config)


def _let_segments_grow() -> None:
    """Has torch's allocator on CUDA grow what it took before, in place of taking another piece for each new size.

    Batches differ in size all the time, and pieces that fit none of the next ones are memory lost. An operator who says
    how torch allocates is left alone.
    """
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        os.environ[_ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
