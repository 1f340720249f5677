"""Chooses the dtype of a model that transformers runs on a CPU, for `--dtype auto`."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.cpu import Format, shared_library

from ...executors.torch.packed_batch import PackedBatch, PackedModel
from ...model_files.model_folder import one_line
from ...protocol.errors import ModelLoadError
from ...protocol.messages import TokenizedInput
from ...protocol.model_info import ModelInfo, TokenizerSpec
from .cpu_kernels import MIN_SPEEDUP
from .weights_loader import load_model

logger = logging.getLogger("penstock.engine")

_LENGTHS: Final = ((8,), (24, 24, 24, 24))
"""Lengths of the sequences of a short text, whose time is spent reading the weights, and of a batch."""
_NUM_ROUNDS: Final = 5
_MAX_ERROR: Final = 0.045
"""Norm of the error of the results divided by their norm. Vectors then have a cosine of about 0.999."""


class _Trial(NamedTuple):
    """Results of the sample batches, and the geometric mean of their processor seconds."""

    results: Tensor
    seconds: float

    @classmethod
    @torch.inference_mode()
    def of(cls, model: PackedModel, tokenizer: TokenizerSpec) -> _Trial:
        results = []
        logs = 0.0
        for lengths in _LENGTHS:
            prompt = TokenizedInput(np.resize(np.array(tokenizer.sample_ids, np.int32), lengths[0]))
            batch = PackedBatch.build([prompt] * len(lengths), torch.device("cpu"))
            output = model.forward(batch)
            seconds = []
            for _ in range(_NUM_ROUNDS):
                began_s = time.process_time()  # excludes other processes
                model.forward(batch)
                seconds.append(time.process_time() - began_s)
            logs += math.log(min(seconds)) / len(_LENGTHS)
            results.append(output.hidden_states if output.logits is None else output.logits)
        return cls(torch.cat([result.float().flatten() for result in results]), math.exp(logs))


def load_fastest(
    info: ModelInfo, tokenizer: TokenizerSpec, *, trust_remote_code: bool
) -> tuple[ModelInfo, PackedModel]:
    """Loads a model in float32, or in bfloat16 if trial forwards are faster and have a small error.

    Tries bfloat16 only if the C library finds instructions for it (AVX512_BF16, AMX). Holds one copy of the weights at
    a time, so that it needs no more memory than float32: if float32 is chosen, it loads the model again.

    Args:
        info: The model on a CPU in float32.
        tokenizer: Provides sample token ids.
        trust_remote_code: Let transformers run Python code of the model's folder.

    Returns:
        `info` with the chosen dtype, and the model.

    Raises:
        ModelLoadError: The model cannot be loaded in float32.
    """
    in_float32 = load_model(info, trust_remote_code=trust_remote_code)
    library = shared_library()
    if library is None or Format.DOT not in library.formats:
        return info, in_float32
    exact = _Trial.of(in_float32, tokenizer)
    del in_float32
    model: PackedModel | None = None
    is_better = False
    try:
        model = load_model(replace(info, dtype="bfloat16"), trust_remote_code=trust_remote_code)
        rounded = _Trial.of(model, tokenizer)
    except (ModelLoadError, RuntimeError) as failure:  # an operation of torch does not support bfloat16
        found = f"bfloat16 does not run: {one_line(failure)}"
    else:
        speedup = exact.seconds / rounded.seconds
        error = ((rounded.results - exact.results).norm() / exact.results.norm()).item()
        found = f"measured: bfloat16 is {speedup:.1f} times as fast as float32 here, with an error of {error:.1%}"
        is_better = speedup >= MIN_SPEEDUP and error <= _MAX_ERROR
    dtype = "bfloat16" if is_better else "float32"
    info = replace(info, dtype=dtype, sources=dict(info.sources) | {"dtype": found})
    logger.info("%s runs in %s (%s).", info.name, dtype, found)
    if model is None or not is_better:
        model = None  # frees the copy in bfloat16
        model = load_model(info, trust_remote_code=trust_remote_code)
    return info, model
