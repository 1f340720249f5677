"""Loads a model into the runner that suits it. Imports torch only for one that needs it."""

from __future__ import annotations

import os
from typing import Final

from ..model_files.resolve import resolve_model, with_device
from ..protocol.config import EngineConfig
from .array_runner import ArrayRunner
from .host import may_have_gpu, pin
from .loading.cpu_kernels import choose_kernels, why_torch
from .loading.load_errors import needs_torch
from .runner import Runner

_ALLOCATOR_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Both names of torch, the newer one first. It reads them when CUDA is first used."""
_FUSION_VARIABLE: Final = "TRITON_DEFAULT_FP_FUSION"
"""Whether triton multiplies and adds in one instruction: 3.9 still does if nobody says, and warns of later ones."""


def load_runner(config: EngineConfig) -> Runner:
    """Loads the model that a configuration names.

    Where there may be a GPU for it, torch decides on the device, and runs the model. A process that has cores of its
    own keeps to them from here on.

    Raises:
        ModelLoadError: The model cannot be served, or needs torch where that is not installed.
    """
    if config.cores is not None:
        pin(config.cores)
    kernels = None
    why = f"--device {config.device} is torch's"
    if config.device == "cpu" or (config.device == "auto" and not may_have_gpu()):
        dtype = "float32" if config.dtype == "auto" else config.dtype
        kernels = choose_kernels(with_device(resolve_model(config), "cpu", dtype), config)
        info, machine = kernels
        if machine is None:
            why = f"the native kernels do not run {info.architecture} in {info.dtype} here"
        elif not (why := why_torch(info)):
            return ArrayRunner.load(info, machine, config)
    else:
        _let_segments_grow()
        os.environ.setdefault(_FUSION_VARIABLE, "1")
    with needs_torch(config.name or config.model, why):
        from .model_runner import ModelRunner

        return ModelRunner.load(config, kernels)


def _let_segments_grow() -> None:
    """Has torch's allocator on CUDA grow what it took before, in place of taking another piece for each new size.

    Batches differ in size all the time, and pieces that fit none of the next ones are memory lost. An operator who says
    how torch allocates is left alone.
    """
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        os.environ[_ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
