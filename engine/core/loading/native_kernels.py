"""Which kernels run a model on a CPU, on how many cores, and in which type: measured when the model is loaded."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Final

import numpy as np

from penstock.kernels.native import Format, Machine, NativeError

from ...model_files.registry import has_own_code
from ...native.array_encoder import find_reader
from ...protocol.config import EngineConfig
from ...protocol.errors import ModelLoadError
from ...protocol.model_info import ModelInfo
from ..host import usable_cores

logger = logging.getLogger("penstock.engine")

# Rows, inputs and outputs of the product that is measured: a layer of a small model, in the second cache.
_SHAPE: Final = (96, 384, 768)
_ROUNDS: Final = 7
# bfloat16 must be so many times as fast as float32: below that its rounding buys nothing.
_WORTH: Final = 1.15


def choose_kernels(info: ModelInfo, config: EngineConfig) -> tuple[ModelInfo, Machine | None]:
    """Decides what runs a model.

    Args:
        info: The model, on its device; its dtype is float32 where the operator leaves it open.
        config: What the operator asks for.

    Returns:
        `info` with kernels and dtype, and the native kernels; None where torch runs it.

    Raises:
        ModelLoadError: The operator insists on native kernels that are not here, or do not know the model.
    """
    machine = _open(info, config) if info.device == "cpu" and config.cpu_kernels != "torch" else None
    sources = dict(info.sources) | {"kernels": "chosen at start-up"}
    if info.dtype == "int8" and (machine is None or Format.INT8 not in machine.formats):
        lack = f"nothing but torch runs {info.architecture} here" if machine is None else f"{machine.isa} has none"
        raise ModelLoadError(
            "--dtype int8 needs the native kernels, on a processor with AVX-512 VNNI and BF16, and "
            f"{lack}; take float32 or bfloat16."
        )
    if machine is None:
        return dataclasses.replace(info, sources=sources), None
    dtype = info.dtype
    if config.dtype == "auto" and (gain := bfloat16_gain(machine)) >= _WORTH:
        dtype = "bfloat16"
        sources["dtype"] = f"measured: {gain:.1f} times as fast as float32 here"
    lanes = "1 lane" if machine.num_lanes == 1 else f"{machine.num_lanes} lanes"
    info = dataclasses.replace(info, dtype=dtype, kernels=f"native, {machine.isa}, {lanes}", sources=sources)
    return info, machine


def bfloat16_gain(machine: Machine) -> float:
    """Returns how many times as fast a product in bfloat16 is as in float32, by the quickest of some rounds each.

    What flags of the processor say is not asked: some that have bfloat16 products run them at half the speed.
    """
    if Format.DOT not in machine.formats:
        return 0.0
    num_rows, num_in, num_out = _SHAPE
    numbers = np.random.default_rng(0)
    rows = numbers.standard_normal((num_rows, num_in), np.float32)
    weights = numbers.standard_normal((num_out, num_in), np.float32)
    products = [machine.pack(weights, None, form) for form in (Format.F32, Format.DOT)]
    seconds = [float("inf")] * 2
    for _ in range(_ROUNDS):
        for i, product in enumerate(products):
            begin = time.perf_counter()
            machine.product(product, rows)
            seconds[i] = min(seconds[i], time.perf_counter() - begin)
    return seconds[0] / seconds[1]


def _open(info: ModelInfo, config: EngineConfig) -> Machine | None:
    insists = config.cpu_kernels == "native"
    has_own = config.trust_remote_code and has_own_code(info.architecture, info.config)  # transformers runs it
    if has_own or find_reader(info) is None:
        if insists:
            raise ModelLoadError(
                f"The native kernels do not know {info.architecture} in {info.dtype}; --cpu-kernels auto lets torch "
                "run it."
            )
        return None
    try:
        return Machine(config.num_threads or usable_cores())
    except NativeError as error:
        if insists:
            raise ModelLoadError(
                f"There are no native kernels: {error}; --cpu-kernels auto lets torch run it."
            ) from error
        logger.warning("torch runs %s, at about half the speed: %s", info.name, error)
        return None
