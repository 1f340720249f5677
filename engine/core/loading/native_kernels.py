"""Which kernels run a model on a CPU, on how many cores, in which type and arithmetic: decided when it is loaded."""

from __future__ import annotations

import dataclasses
import logging
from typing import Final

from penstock.kernels.cpu import CpuKernelError, Format, Machine
from penstock.kernels.cpu.self_check import multiplies_right

from ...executors.cpu.array_encoder import read_spec
from ...families.registry import has_own_code
from ...protocol.config import EngineConfig
from ...protocol.errors import MachineError
from ...protocol.model_info import ModelInfo
from ..host import threads_of
from .bfloat16_gain import bfloat16_gain

logger = logging.getLogger("penstock.engine")

# bfloat16 must be so many times as fast: below that its rounding buys nothing.
_WORTH: Final = 1.15


def choose_kernels(info: ModelInfo, config: EngineConfig) -> tuple[ModelInfo, Machine | None]:
    """Chooses the kernels that run a model.

    Args:
        info: The model, on its device; its dtype is float32 where the operator leaves it open.
        config: Settings of the operator.

    Returns:
        `info` with kernels, dtype and arithmetic, and the native kernels; None where torch runs it.

    Raises:
        MachineError: The operator insists on native kernels that are not here, or do not know the model.
    """
    machine = _open(info, config) if info.device == "cpu" and config.cpu_kernels != "torch" else None
    sources = dict(info.sources) | {"kernels": "chosen at start-up"}
    if info.dtype == "int8" and (machine is None or Format.INT8 not in machine.formats):
        lack = f"{machine.isa} is what this one has" if machine else f"nothing but torch runs {info.architecture} here"
        raise MachineError(
            "--dtype int8 needs the native kernels, on a processor with AVX-512 VNNI or AVX-VNNI, and "
            f"{lack}; take float32 or bfloat16."
        )
    if machine is None:
        return dataclasses.replace(info, sources=sources), None
    sources["num_lanes"] = sources["kernels"]
    info = dataclasses.replace(info, kernels=f"native, {machine.isa}", num_lanes=machine.num_lanes, sources=sources)
    return _with_arithmetic(info, config, machine), machine


def _with_arithmetic(info: ModelInfo, config: EngineConfig, machine: Machine) -> ModelInfo:
    """Decides on the type of the weights where the operator leaves it open, and what bfloat16 is computed in."""
    is_open, dtype, sources = config.dtype == "auto", info.dtype, dict(info.sources)
    if dtype == "float32" and not is_open:
        return info
    if config.arithmetic is not None and not is_open:
        sources["arithmetic"] = "measured at the first start"
        return dataclasses.replace(info, arithmetic=config.arithmetic, sources=sources)
    gain = bfloat16_gain(machine, info.hidden_size)
    if is_open and gain is not None and gain.over_float32 >= _WORTH:
        dtype = "bfloat16"
        sources["dtype"] = f"measured: {gain.over_float32:.1f} times as fast as float32 here"
    if dtype == "float32":
        return info
    arithmetic = "bfloat16" if gain is not None and gain.over_widened >= _WORTH else "float32"
    sources["arithmetic"] = (
        f"{machine.isa} has no products in bfloat16"
        if gain is None
        else f"measured: bfloat16 is {gain.over_widened:.1f} times as fast as float32 here"
    )
    return dataclasses.replace(info, dtype=dtype, arithmetic=arithmetic, sources=sources)


def _open(info: ModelInfo, config: EngineConfig) -> Machine | None:
    insists = config.cpu_kernels == "native"
    has_own = config.trust_remote_code and has_own_code(info.architecture, info.config)  # transformers runs it
    if has_own or read_spec(info) is None:
        if insists:
            raise MachineError(
                f"The native kernels do not know {info.architecture} in {info.dtype}; --cpu-kernels auto lets torch "
                "run it."
            )
        return None
    try:
        return _checked(threads_of(config))
    except CpuKernelError as error:
        if insists:
            raise MachineError(
                f"There are no native kernels: {error}; --cpu-kernels auto lets torch run it."
            ) from error
        logger.warning("torch runs %s and takes up to twice as long: %s", info.name, error)
        return None


def _checked(num_lanes: int) -> Machine:
    """Opens the best instruction set; avx512bf16 instead of AMX if AMX gives a wrong product."""
    machine = Machine(num_lanes)
    if machine.isa != "amx" or multiplies_right(machine):
        return machine
    machine.close()
    machine = Machine(num_lanes, isa="avx512bf16")
    logger.warning("AMX gives wrong products on this processor: %s runs in its place", machine.isa)
    return machine
