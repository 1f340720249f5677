"""Chooses the kernels, lanes, dtype and arithmetic of a model on a CPU, and loads the models of the C library."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from penstock.kernels.cpu import CpuKernelError, CpuLibrary, Format, LinearWeights, has_exact_products

from ...checkpoint.files import Checkpoint, OpenFile, open_checkpoint
from ...checkpoint.views import Array, ArrayWeights, Floats, holds_arrays, open_arrays
from ...executors.cpu.array_encoder import ArrayEncoder, read_spec
from ...executors.cpu.array_head import ArrayHead, read_dense
from ...executors.read_adapters import read_adapters
from ...families.registry import has_own_code
from ...host import compute_threads
from ...pooling import TokenHeads
from ...protocol.config import EngineConfig
from ...protocol.errors import MachineError
from ...protocol.model_info import ModelInfo, TokenizerSpec
from .load_errors import needs_torch

logger = logging.getLogger("penstock.engine")

MIN_SPEEDUP: Final = 1.15
"""bfloat16 is used if it is at least this many times as fast."""


def choose_kernels(info: ModelInfo, config: EngineConfig) -> tuple[ModelInfo, CpuLibrary | None]:
    """Chooses the kernels that run a model.

    Args:
        info: The model with its device. Its dtype is float32 if the operator has not set one.
        config: Settings of the operator.

    Returns:
        `info` with kernels, dtype and arithmetic, and the C library; None if torch runs the model.

    Raises:
        MachineError: The operator requires the C library, but it is not installed or does not support the model.
    """
    library = _open(info, config) if info.device == "cpu" and config.cpu_kernels != "torch" else None
    sources = dict(info.sources) | {"kernels": "chosen at start-up"}
    if info.dtype == "int8" and (library is None or Format.INT8 not in library.formats):
        found = f"this one has {library.isa}" if library else f"only torch runs {info.architecture} here"
        raise MachineError(
            "--dtype int8 needs the native kernels, on a processor with AVX-512 VNNI, AVX-VNNI or the dot product of "
            f"ARM, but {found}; set float32 or bfloat16."
        )
    if library is None:
        return dataclasses.replace(info, sources=sources), None
    sources["num_lanes"] = sources["kernels"]
    info = dataclasses.replace(info, kernels=f"native, {library.isa}", num_lanes=library.num_lanes, sources=sources)
    return _with_arithmetic(info, config, library), library


def _with_arithmetic(info: ModelInfo, config: EngineConfig, library: CpuLibrary) -> ModelInfo:
    """Chooses the type of the weights unless the operator sets it, and the arithmetic of bfloat16."""
    is_open = config.dtype == "auto"
    dtype = info.dtype
    sources = dict(info.sources)
    if dtype == "float32" and not is_open:
        return info
    if config.arithmetic is not None and not is_open:
        sources["arithmetic"] = "measured at the first start"
        return dataclasses.replace(info, arithmetic=config.arithmetic, sources=sources)
    gain = bfloat16_gain(library, info.hidden_size)
    if is_open and gain is not None and gain.over_float32 >= MIN_SPEEDUP:
        dtype = "bfloat16"
        sources["dtype"] = f"measured: {gain.over_float32:.1f} times as fast as float32 here"
    if dtype == "float32":
        return info
    arithmetic = "bfloat16" if gain is not None and gain.over_widened >= MIN_SPEEDUP else "float32"
    sources["arithmetic"] = (
        f"{library.isa} has no products in bfloat16"
        if gain is None
        else f"measured: bfloat16 is {gain.over_widened:.1f} times as fast as float32 here"
    )
    return dataclasses.replace(info, dtype=dtype, arithmetic=arithmetic, sources=sources)


def _open(info: ModelInfo, config: EngineConfig) -> CpuLibrary | None:
    insists = config.cpu_kernels == "native"
    has_own = config.trust_remote_code and has_own_code(info.architecture, info.config)  # transformers runs it
    if has_own or read_spec(info) is None:
        if insists:
            raise MachineError(
                f"The native kernels do not support {info.architecture} in {info.dtype}; with --cpu-kernels auto torch "
                "runs it."
            )
        return None
    try:
        return _open_best_isa(compute_threads(config.num_threads, config.num_engines))
    except CpuKernelError as error:
        if insists:
            raise MachineError(
                f"There are no native kernels: {error}; with --cpu-kernels auto torch runs the model."
            ) from error
        logger.warning("torch runs %s and takes up to twice as long: %s", info.name, error)
        return None


def _open_best_isa(num_lanes: int) -> CpuLibrary:
    """Opens the library with the best instruction set, or with its replacement if it returns wrong products."""
    library = CpuLibrary(num_lanes)
    best = library.isa
    if best not in _REPLACEMENTS or has_exact_products(library):
        return library
    library.close()
    library = CpuLibrary(num_lanes, isa=_REPLACEMENTS[best])
    logger.warning("%s returns wrong products on this processor: using %s instead", best, library.isa)
    return library


_REPLACEMENTS: Final = {"amx": "avx512bf16", "neonmmla": "neon", "neondot": "neon"}
"""Instruction sets that were tested on few or only on emulated processors, and the ones to use instead."""


_ROWS: Final = (8, 96)
"""Rows of a short text, whose time is spent reading the weights, and of a batch."""
_WEIGHTS: Final = 2**18
"""Weights of the measured product. In bfloat16 they fit into the L2 cache."""
_MIN_WIDTH: Final = 64
_NUM_ROUNDS: Final = 5


class Bfloat16Gain(NamedTuple):
    """Speed of products in bfloat16.

    Attributes:
        over_float32: Relative to products with float32 weights.
        over_widened: Relative to products with bfloat16 weights that are converted to float32.
    """

    over_float32: float
    over_widened: float


def bfloat16_gain(library: CpuLibrary, width: int) -> Bfloat16Gain | None:
    """Measures products of a model's width on one core. Takes the mean of few rows and many rows.

    Returns:
        None if the processor has no bfloat16 instructions.
    """
    if Format.DOT not in library.formats:
        return None
    width = max(width + width % 2, _MIN_WIDTH)
    numbers = np.random.default_rng(0)
    weights = numbers.random((_WEIGHTS // width, width), np.float32)
    products = {form: library.pack(weights, None, form) for form in (Format.F32, Format.BF16, Format.DOT)}
    logs = dict.fromkeys(products, 0.0)
    for num_rows in _ROWS:
        rows = numbers.random((num_rows, width), np.float32)
        min_seconds = dict.fromkeys(products, math.inf)
        for _ in range(_NUM_ROUNDS):
            for form, product in products.items():
                began_s = time.thread_time()  # excludes other processes
                library.product(product, rows)
                min_seconds[form] = min(min_seconds[form], time.thread_time() - began_s)
        for form, seconds in min_seconds.items():
            logs[form] += math.log(seconds) / len(_ROWS)
    return Bfloat16Gain(
        over_float32=math.exp(logs[Format.F32] - logs[Format.DOT]),
        over_widened=math.exp(logs[Format.BF16] - logs[Format.DOT]),
    )


def load_array_encoder(info: ModelInfo, library: CpuLibrary) -> ArrayEncoder:
    """Loads a model that `read_spec` supports.

    Raises:
        UnsupportedModelError: An option of the model is not known.
        WeightError: A file cannot be read, or a tensor is missing or has the wrong shape.
    """
    spec = read_spec(info)
    assert spec is not None, "choose_kernels leaves other models to torch"
    folder = Path(info.path)
    with open_checkpoint(folder, _opener(info, holds_arrays(folder))) as checkpoint:
        weights = ArrayWeights(checkpoint)
        adapters = read_adapters(info, spec, weights)
        encoder = ArrayEncoder(info, spec.with_stored_names(weights.has), weights, library, adapters)
        checkpoint.log_unused(info.name)
    return encoder


def load_array_dense(info: ModelInfo, library: CpuLibrary) -> list[ArrayHead]:
    """Loads the Dense modules after the pooling.

    Raises:
        UnsupportedModelError: An activation is not known.
        WeightError: A file cannot be read, or a tensor is missing or has the wrong shape.
    """
    heads = []
    for spec in info.dense:
        folder = Path(info.path) / spec.folder
        with open_checkpoint(folder, _opener(info, holds_arrays(folder))) as checkpoint:
            heads.append(ArrayHead(library, read_dense(ArrayWeights(checkpoint), spec)))
    return heads


def load_array_token_heads(info: ModelInfo, tokenizer: TokenizerSpec, library: CpuLibrary) -> TokenHeads[Floats]:
    """Loads the token heads, and returns them with the tokens that token-level outputs leave out.

    Raises:
        WeightError: A file cannot be read, or a tensor is missing or has the wrong shape.
    """
    return TokenHeads.of(info, tokenizer, partial(_load_head, info, library))


def _load_head(info: ModelInfo, library: CpuLibrary, name: str | None, out_features: int) -> ArrayHead | None:
    if name is None:
        return None
    file = Path(info.path) / name
    opener = _opener(info, file.suffix == ".safetensors")
    checkpoint = Checkpoint(dict.fromkeys(("weight", "bias"), file), opener)
    weights = ArrayWeights(checkpoint)
    step = LinearWeights(
        weight=weights.floats("weight", out_features, info.hidden_size), bias=weights.floats("bias", out_features)
    )
    head = ArrayHead(library, (step,))
    checkpoint.close()
    return head


def _opener(info: ModelInfo, holds_arrays: bool) -> OpenFile[Array]:
    """Returns the function that opens a file of weights. torch reads formats and types that numpy lacks."""
    if holds_arrays:
        return open_arrays
    with needs_torch(info.name, "its weights are not in safetensors, or in a type that numpy lacks"):
        from .weights_loader import open_torch_arrays
    return open_torch_arrays
