"""The forwards of a model on CUDA, recorded where that can be done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from ...models.base import PackedModel
from ...packed_batch import PackedBatch
from ...protocol.config import SchedulerConfig
from ...protocol.model_info import ModelInfo
from ..loading.warm_up import MadeBatches
from .buckets import Buckets
from .forward_graphs import ForwardGraphs
from .recorder import CudaRecorder

_MAX_TOKENS: Final = 4096
"""Tokens. Larger batches keep a GPU busy for longer than it takes to ask for their kernels one by one."""


def record_forwards(
    model: PackedModel, info: ModelInfo, made: MadeBatches, device: torch.device, limits: SchedulerConfig
) -> ForwardGraphs | None:
    """Returns the recorded forwards of small batches; None on a CPU, and for a model that cannot be recorded.

    Args:
        model: With its weights.
        info: What it is.
        made: Makes batches for it.
        device: Of the model.
        limits: What the operator says of batches.
    """
    if device.type != "cuda" or not model.is_recordable:
        return None
    graphs = ForwardGraphs(model, CudaRecorder(device), small_batches(info, limits), device)

    def make(lengths: Sequence[int]) -> PackedBatch:
        chunks = made.batch(lengths, made.plain()[:1])
        return PackedBatch.build([chunk.sequence.prompt for chunk in chunks], device)

    return graphs if graphs.record(make) else None


def small_batches(info: ModelInfo, limits: SchedulerConfig) -> Buckets:
    """Returns the sizes that are recorded."""
    max_tokens = min(limits.token_budget(info.device), _MAX_TOKENS)
    return Buckets(max_tokens, info.max_model_len, limits.seqs(info.device))
