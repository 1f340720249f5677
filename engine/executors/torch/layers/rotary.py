"""Rotary position embedding (RoPE), which rotates column j with column j + J as in GPT-NeoX and transformers.

Source: Su et al., RoFormer (arXiv 2104.09864), equation 34. A RopeSpec has the frequencies.
Shape letters: T packed tokens, N sequences, J rotated pairs of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.backends import upload

from ....families.rope import RopeSpec

if TYPE_CHECKING:
    from ..packed_batch import PackedBatch


class Rotation(NamedTuple):
    """Cosine and sine of the angles of one batch, for all layers of one kind.

    Attributes:
        cos: [T, J] float32.
        sin: [T, J] float32.
    """

    cos: Tensor
    sin: Tensor


class RotaryEmbedding:
    """Computes the angles p * w_j of a token at position p.

    It computes them for every batch, which takes less than a thousandth of the forward, so that no table limits the
    length. Frequencies that depend on the length of the text ("dynamic", "longrope") use the length of the whole
    text, also for a chunk.

    Args:
        spec: Frequencies w_j.
    """

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self._spec = spec
        frequencies_J, self._factor = spec.frequencies()
        self._frequencies_J = torch.from_numpy(frequencies_J).to(device)

    @property
    def depends_on_length(self) -> bool:
        """Whether the angles of a token depend on the length of its text."""
        return self._spec.depends_on_length

    def __call__(self, batch: PackedBatch) -> Rotation:
        """Returns the cosines and sines of the angles of a batch, [T, J] float32."""
        angles_TJ = batch.positions[:, None].float() * self._frequencies(batch)
        cos_TJ, sin_TJ = angles_TJ.cos(), angles_TJ.sin_()
        if self._factor != 1.0:
            cos_TJ, sin_TJ = cos_TJ.mul_(self._factor), sin_TJ.mul_(self._factor)
        return Rotation(cos_TJ, sin_TJ)

    def _frequencies(self, batch: PackedBatch) -> Tensor:
        """Returns the frequencies [J], or [T, J] if the sequences of the batch have different ones."""
        if not self._spec.depends_on_length:
            return self._frequencies_J
        stages = [self._spec.stage(length) for length in total_lens(batch)]
        device = batch.positions.device
        of_stage = {stage: torch.from_numpy(self._spec.frequencies(stage)[0]) for stage in set(stages)}
        if len(of_stage) == 1:
            return upload(of_stage[stages[0]], device)
        frequencies_NJ = upload(torch.stack([of_stage[stage] for stage in stages]), device)
        return frequencies_NJ.repeat_interleave(batch.cu_seqlens.diff(), dim=0, output_size=batch.num_tokens)


def total_lens(batch: PackedBatch) -> Sequence[int]:
    """Returns the length of each whole sequence of the batch."""
    cache = batch.cache
    if cache is None:
        return batch.seq_lens
    if cache.total_lens is not None:
        return cache.total_lens
    return [past + length for past, length in zip(cache.context_lens, batch.seq_lens, strict=True)]
