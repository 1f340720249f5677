"""Decides when a model is loaded on a CPU: C library or torch, number of lanes, type and arithmetic.

Also loads the models that the C library runs.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from penstock.kernels.cpu import CpuKernelError, Format, Machine, MapSpec, multiplies_right

from ...checkpoint.files import Checkpoint, OpenFile, open_checkpoint
from ...checkpoint.views import Array, ArrayFile, ArrayWeights, Floats, holds_arrays
from ...executors.cpu.array_encoder import ArrayEncoder, read_spec
from ...executors.cpu.heads import ArrayHead, read_dense
from ...families.registry import has_own_code
from ...pooling import TokenMaps
from ...protocol.config import EngineConfig
from ...protocol.errors import MachineError
from ...protocol.model_info import ModelInfo, TokenizerSpec
from ..host import threads_of
from .load_errors import needs_torch

logger = logging.getLogger("penstock.engine")

# bfloat16 must be so many times as fast: below that its rounding buys nothing.
_WORTH: Final = 1.15


def choose_kernels(info: ModelInfo, config: EngineConfig) -> tuple[ModelInfo, Machine | None]:
    """Chooses the kernels that run a model.

    Args:
        info: The model, on its device; its dtype is float32 where the operator leaves it open.
        config: Settings of the operator.

    Returns:
        `info` with kernels, dtype and arithmetic, and the C library; None where torch runs it.

    Raises:
        MachineError: The operator insists on C library that are not here, or do not know the model.
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
    """Chooses the type of the weights unless the operator sets it, and the arithmetic of bfloat16."""
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


# A short text, where reading the weights counts, and a batch, where it does not.
_ROWS: Final = (8, 96)
# Weights of the measured product: as bfloat16 they fit into the second cache.
_WEIGHTS: Final = 2**18
_LEAST_WIDTH: Final = 64
_ROUNDS: Final = 5


class Bfloat16Gain(NamedTuple):
    """How many times as fast products are in bfloat16.

    Attributes:
        over_float32: As those with float32 weights.
        over_widened: As those with bfloat16 weights that are widened to float32.
    """

    over_float32: float
    over_widened: float


def bfloat16_gain(machine: Machine, width: int) -> Bfloat16Gain | None:
    """Measures products of a model's width, on one core, with few rows and with many, which count alike.

    Args:
        machine: The C library.
        width: Of the model.

    Returns:
        None where the processor has no products in bfloat16.
    """
    if Format.DOT not in machine.formats:
        return None
    width = max(width + width % 2, _LEAST_WIDTH)
    numbers = np.random.default_rng(0)
    weights = numbers.random((_WEIGHTS // width, width), np.float32)
    products = {form: machine.pack(weights, None, form) for form in (Format.F32, Format.BF16, Format.DOT)}
    logs = dict.fromkeys(products, 0.0)
    for num_rows in _ROWS:
        rows = numbers.random((num_rows, width), np.float32)
        least = dict.fromkeys(products, math.inf)
        for _ in range(_ROUNDS):
            for form, product in products.items():
                began_s = time.thread_time()  # the processor may have other work
                machine.product(product, rows)
                least[form] = min(least[form], time.thread_time() - began_s)
        for form, seconds in least.items():
            logs[form] += math.log(seconds) / len(_ROWS)
    return Bfloat16Gain(
        over_float32=math.exp(logs[Format.F32] - logs[Format.DOT]),
        over_widened=math.exp(logs[Format.BF16] - logs[Format.DOT]),
    )


def load_array_encoder(info: ModelInfo, machine: Machine) -> ArrayEncoder:
    """Loads the model that `info` describes; `read_spec` knows it.

    Raises:
        UnsupportedModelError: An option of it is not known.
        WeightError: A file cannot be read, or a tensor is missing or has the wrong shape.
    """
    spec = read_spec(info)
    assert spec is not None, "choose_kernels leaves other models to torch"
    folder = Path(info.path)
    with open_checkpoint(folder, _opener(info, holds_arrays(folder))) as checkpoint:
        encoder = ArrayEncoder(info, spec, ArrayWeights(checkpoint), machine)
        checkpoint.tell_unused(info.name)
    return encoder


def load_array_dense(info: ModelInfo, machine: Machine) -> list[ArrayHead]:
    """Loads the Dense modules that follow the pooling.

    Raises:
        UnsupportedModelError: An activation is not known.
        WeightError: A file cannot be read, or a tensor is missing or has the wrong shape.
    """
    heads = []
    for spec in info.dense:
        folder = Path(info.path) / spec.folder
        with open_checkpoint(folder, _opener(info, holds_arrays(folder))) as checkpoint:
            heads.append(ArrayHead(machine, read_dense(ArrayWeights(checkpoint), spec)))
    return heads


def load_array_maps(info: ModelInfo, tokenizer: TokenizerSpec, machine: Machine) -> TokenMaps[Floats]:
    """Returns the heads for single tokens, and the tokens that have no part in answers for tokens.

    Raises:
        WeightError: A file cannot be read, or a tensor is missing or has the wrong shape.
    """
    recipe_tokens, heads = tokenizer.recipe_tokens, info.token_heads
    if heads is None:
        return TokenMaps(skip_ids=recipe_tokens.skip_ids)
    return TokenMaps(
        vectors=_load_map(info, heads.vectors_file, info.hidden_size, machine),
        weights=_load_map(info, heads.weights_file, 1, machine),
        unweighted_ids=recipe_tokens.unweighted_ids,
    )


def _load_map(info: ModelInfo, name: str | None, out_features: int, machine: Machine) -> ArrayHead | None:
    if name is None:
        return None
    file = Path(info.path) / name
    opener = _opener(info, file.suffix == ".safetensors")
    checkpoint = Checkpoint(dict.fromkeys(("weight", "bias"), file), opener)
    weights = ArrayWeights(checkpoint)
    step = MapSpec(
        weight=weights.floats("weight", out_features, info.hidden_size), bias=weights.floats("bias", out_features)
    )
    head = ArrayHead(machine, (step,))
    checkpoint.close()
    return head


def _opener(info: ModelInfo, holds_arrays: bool) -> OpenFile[Array]:
    """Returns what opens a file of weights as arrays: torch reads the formats and types that numpy lacks."""
    if holds_arrays:
        return ArrayFile
    with needs_torch(info.name, "its weights are not in safetensors, or in a type that numpy lacks"):
        from .weights_loader import open_torch_arrays
    return open_torch_arrays
