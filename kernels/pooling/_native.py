"""Pooling on a CPU in C: a sequence at a time, while its rows lie in the cache."""

import numpy as np
import torch
from torch import Tensor

from ..native import Machine, Pooling


def pool_native(
    machine: Machine,
    hidden_states: Tensor,
    seq_starts: Tensor,
    seq_lens: Tensor,
    strategy: str,
    *,
    width: int,
    dimensions: Tensor | None = None,
    normalize: bool | Tensor = False,
    skip_tokens: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Pools sequences that may lie anywhere in a batch; otherwise as `pool` does.

    Args:
        machine: The native kernels.
        hidden_states: [T, D] float32 on the CPU.
        seq_starts: [N] int32, the first row of each sequence.
        seq_lens: [N] int32, their numbers of rows.
        strategy: A kind of `pool`.
        width: Columns of the result, 1..D.
        dimensions: [N] int32, columns of each sequence; None: `width`.
        normalize: For all, or a bool [N].
        skip_tokens: [N] int32; None leaves out none.
        weights: [T] float32 for the kind "weighted".

    Returns:
        [N, width] float32.
    """
    flags = normalize if isinstance(normalize, Tensor) else torch.full((len(seq_lens),), normalize)
    rows = machine.pool(
        hidden_states.numpy(),
        seq_starts.contiguous().numpy(),
        seq_lens.contiguous().numpy(),
        Pooling[strategy.upper()],
        width=width,
        dimensions=None if dimensions is None else dimensions.contiguous().numpy(),
        normalize=flags.contiguous().numpy().view(np.uint8),
        skips=None if skip_tokens is None else skip_tokens.contiguous().numpy(),
        weights=None if weights is None else weights.contiguous().numpy(),
    )
    return torch.from_numpy(rows)
