"""Rotary position embedding (RoPE), halves rotated together as in GPT-NeoX and transformers.

Source: Su et al., RoFormer (arXiv 2104.09864), equation 34. Frequencies are those of a RopeSpec.
Shape letters: T packed tokens, N sequences, H heads, K head size, J pairs of columns that turn: K / 2, or fewer.
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
    """The angles of one batch; the same for every layer of one kind.

    Attributes:
        cos: [T, J] float32.
        sin: [T, J] float32.
    """

    cos: Tensor
    sin: Tensor


class RotaryEmbedding:
    """Angles p * w_j of every token at position p.

    They are taken for each batch anew, which costs less than a thousandth of the forward, so that no table limits the
    length. Where frequencies depend on the length of the text ("dynamic", "longrope"), it is that of the whole text,
    never of the chunk or of its neighbours in the batch.

    Args:
        spec: Which frequencies w_j.
        device: Where the angles live.
    """

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self._spec = spec
        frequencies_J, self._factor = spec.frequencies()
        self._frequencies_J = torch.from_numpy(frequencies_J).to(device)

    @property
    def depends_on_length(self) -> bool:
        """Whether the angles of a token depend on how long its whole text is."""
        return self._spec.depends_on_length

    def __call__(self, batch: PackedBatch) -> Rotation:
        """Returns the angles of the tokens of a batch."""
        angles_TJ = batch.positions[:, None].float() * self._frequencies(batch)
        cos_TJ, sin_TJ = angles_TJ.cos(), angles_TJ.sin_()
        if self._factor != 1.0:
            cos_TJ, sin_TJ = cos_TJ.mul_(self._factor), sin_TJ.mul_(self._factor)
        return Rotation(cos_TJ, sin_TJ)

    def _frequencies(self, batch: PackedBatch) -> Tensor:
        """Returns [J], or [T, J] where the sequences of the batch differ in it."""
        if not self._spec.depends_on_length:
            return self._frequencies_J
        stages = [self._spec.stage(length) for length in prompt_lens(batch)]
        device = batch.positions.device
        of_stage = {stage: torch.from_numpy(self._spec.frequencies(stage)[0]) for stage in set(stages)}
        if len(of_stage) == 1:
            return upload(of_stage[stages[0]], device)
        frequencies_NJ = upload(torch.stack([of_stage[stage] for stage in stages]), device)
        return frequencies_NJ.repeat_interleave(batch.cu_seqlens.diff(), dim=0, output_size=batch.num_tokens)


def prompt_lens(batch: PackedBatch) -> Sequence[int]:
    """Returns the tokens of each whole sequence of the batch."""
    cache = batch.cache
    if cache is None:
        return batch.seq_lens
    if cache.prompt_lens is not None:
        return cache.prompt_lens
    return [past + length for past, length in zip(cache.context_lens, batch.seq_lens, strict=True)]
