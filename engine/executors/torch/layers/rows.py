"""The rows that one forward runs over: the tokens of the batch and, on a CPU, a little padding after the last of them.

oneDNN compiles and keeps a kernel for every number of rows: about 0.3 ms and 0.6 MB for each product of a layer. A
server sees a different number in every batch, so it is rounded up to one of few, for 2 % more work on average.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from ..packed_batch import PackedBatch

_MIN_STEP: Final = 16
# Steps grow so that padding is at most one row in this many.
_STEPS_PER_SIZE: Final = 16
# Kernels kept by oneDNN and, beside it, by torch's wrapper around it.
_KEPT_KERNELS: Final = "96"


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """T tokens of a batch in R >= T rows. What padding rows hold is finite and never looked at.

    Attributes:
        batch: The sequences.
        num_tokens: T.
        num_rows: R.
        input_ids: [R] int64.
        positions: [R] int64.
        token_type_ids: [R] int64 or None.
    """

    batch: PackedBatch
    num_tokens: int
    num_rows: int
    input_ids: Tensor
    positions: Tensor
    token_type_ids: Tensor | None

    @classmethod
    def of(cls, batch: PackedBatch) -> Rows:
        """Returns the rows for `batch`."""
        num_tokens = batch.input_ids.shape[0]
        ids, positions, types = batch.input_ids, batch.positions, batch.token_type_ids
        if ids.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return cls(batch, num_tokens, num_tokens, ids, positions, types)
        num_rows = round_up(num_tokens)
        missing = (0, num_rows - num_tokens)
        types = None if types is None else F.pad(types, missing)
        return cls(batch, num_tokens, num_rows, F.pad(ids, missing), F.pad(positions, missing), types)

    def pad(self, x_TD: Tensor) -> Tensor:
        """Returns [R, D]: the rows of [T, D], then zeros; the tensor itself where nothing is missing."""
        missing = self.num_rows - self.num_tokens
        return F.pad(x_TD, (0, 0, 0, missing)) if missing else x_TD

    def trim(self, x_RD: Tensor) -> Tensor:
        """Returns a view of the rows that are tokens."""
        return x_RD[: self.num_tokens]


def round_up(num_tokens: int) -> int:
    """Returns the number of rows for this many tokens."""
    step = _MIN_STEP
    while num_tokens > 2 * _STEPS_PER_SIZE * step:
        step *= 2
    return -(-num_tokens // step) * step


def limit_kept_kernels() -> None:
    """Bounds the memory of compiled kernels. Has an effect before the first product of the process only."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _KEPT_KERNELS)
    os.environ.setdefault("LRU_CACHE_CAPACITY", _KEPT_KERNELS)
