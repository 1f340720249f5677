"""Loads a model into its runner. Imports torch only for a model that needs it."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Final

from ..executors.cpu.array_encoder import read_spec
from ..families.static import STATIC_MODEL_TYPES
from ..host import has_gpu_driver, may_have_gpu, pin
from ..images.preprocessor import INSTALL
from ..model_files.resolve import resolve_model, with_device
from ..protocol.config import EngineConfig
from ..protocol.errors import MachineError
from ..protocol.model_info import ModelInfo
from .array_runner import ArrayRunner
from .composite_runner import CompositeRunner
from .loading.cpu_kernels import choose_kernels
from .loading.load_errors import needs_torch
from .runner import Runner

logger = logging.getLogger("penstock.engine")

_ALLOCATOR_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Both names of torch's variable, the newer one first. torch reads them when CUDA is first used."""
_SET_UP_LIBRARY: Final = "Set --cpu-kernels auto, and build the library if it is missing (make native)."
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
    info = resolve_model(config)
    if info.reads_images and find_spec("PIL") is None:
        raise MachineError(f"The model reads images, which needs Pillow. Run {INSTALL}.")
    if info.query_model is None:
        return _load(info, config)
    queries = _load_static(info.query_model, replace(config, num_threads=1))  # in the thread of the loop
    return CompositeRunner(_load(replace(info, query_model=None), config), queries=queries)


def _load(info: ModelInfo, config: EngineConfig) -> Runner:
    if info.image is not None:
        return _load_two_towers(info, info.image, config)
    if info.model_type in STATIC_MODEL_TYPES:
        return _load_static(info, config)
    name = config.name or config.model
    device = "cpu"
    dtype = _dtype(config)
    why = f"--device {config.device} needs it"
    if config.device != "cpu" and (config.device != "auto" or may_have_gpu()):
        _enable_expandable_segments()
        os.environ.setdefault(_FUSION_VARIABLE, "1")
        with needs_torch(name, why):
            from .device.device import resolve_device
        device, dtype = resolve_device(config)
    elif config.device == "auto" and has_gpu_driver() and find_spec("torch") is None:
        logger.warning(
            "This machine has a GPU driver, but torch is not installed. The model runs on the CPU; run `pip install "
            "'penstock[torch]'` to use the GPU, or set --device cpu to hide this warning."
        )
    info, library = choose_kernels(with_device(info, device, dtype), config)
    if library is not None:
        return ArrayRunner.load(info, library, config)
    if device == "cpu":
        why = f"the C library does not run {info.architecture} in {info.dtype} here"
    with needs_torch(name, why):
        from .model_runner import ModelRunner

        return ModelRunner.load(info, config)


def _load_two_towers(info: ModelInfo, image: ModelInfo, config: EngineConfig) -> Runner:
    """Loads the encoders of texts and of images on the same lanes."""
    if config.device not in ("auto", "cpu"):
        raise MachineError(
            f"{info.name} reads images, which runs on a CPU only, but --device is {config.device}. Set --device cpu."
        )
    text, library = choose_kernels(with_device(replace(info, image=None), "cpu", _dtype(config)), config)
    image = with_device(image, "cpu", text.dtype)
    if library is None or read_spec(image) is None:
        raise MachineError(f"{info.name} reads images, which needs the C library. {_SET_UP_LIBRARY}")
    texts = ArrayRunner.load(text, library, config)
    image = replace(image, kernels=text.kernels, num_lanes=text.num_lanes, arithmetic=text.arithmetic)
    return CompositeRunner(texts, images=ArrayRunner.load(image, library, config, texts.tokenizer))


def _dtype(config: EngineConfig) -> str:
    return "float32" if config.dtype == "auto" else config.dtype


def _load_static(info: ModelInfo, config: EngineConfig) -> Runner:
    """Loads a static embedding. It runs on the CPU in float32: it has no products that a GPU or int8 makes faster."""
    info, library = choose_kernels(with_device(info, "cpu", "float32"), replace(config, dtype="float32"))
    if library is None:
        raise MachineError(f"{info.name} is a static embedding, which needs the C library. {_SET_UP_LIBRARY}")
    return ArrayRunner.load(info, library, config)


def _enable_expandable_segments() -> None:
    """Enables expandable segments in torch's CUDA allocator, unless the operator configured the allocator.

    Batches differ in size, and fixed segments that are too small for the next batch would waste memory.
    """
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        os.environ[_ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
