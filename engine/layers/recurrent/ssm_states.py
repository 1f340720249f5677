"""The states that an SSM layer finds in front of a batch of slices and leaves behind it.

Shape letters: N sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...packed_batch import PackedBatch
    from ...sequence_cache import BatchCache


@dataclass(frozen=True, slots=True, eq=False)
class LayerStates:
    """One SSM layer's view of a batch's states. Without a cache nothing is found and nothing kept.

    Attributes:
        cache: Where states lie; None in a batch of whole sequences.
        layer: Number of the layer among the model's SSM layers.
        num_seqs: N.
    """

    cache: BatchCache | None
    layer: int
    num_seqs: int

    @classmethod
    def of(cls, batch: PackedBatch, layer: int) -> LayerStates:
        """Returns the view of `batch`."""
        return cls(batch.cache, layer, len(batch.seq_lens))

    @property
    def must_save(self) -> bool:
        """Whether any sequence of the batch goes on in a later one."""
        return self.cache is not None and _has_any(self.cache.save_indices)

    def load(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns what convolution and recurrence begin with, [N, ...] each; None where all begin at zero."""
        if self.cache is None or self.cache.ssm is None or not _has_any(self.cache.load_indices):
            return None, None
        return self._gather(self.cache, self.cache.ssm.conv), self._gather(self.cache, self.cache.ssm.ssm)

    def save(self, conv: Tensor | None, ssm: Tensor | None) -> None:
        """Writes the states of the sequences that go on, of [N, ...] after the batch, into their slots."""
        if self.cache is None or self.cache.ssm is None or conv is None or ssm is None:
            return
        indices, slots = self.cache.save_indices, self.cache.save_slots
        if indices is None or slots is None:
            return
        for pool, states in ((self.cache.ssm.conv, conv), (self.cache.ssm.ssm, ssm)):
            pool[self.layer].index_copy_(0, slots, states.index_select(0, indices).to(pool[self.layer].dtype))

    def _gather(self, cache: BatchCache, pools: list[Tensor]) -> Tensor:
        """Returns the states of the sequences that have some, and zeros for the others."""
        assert cache.load_indices is not None
        assert cache.load_slots is not None
        pool = pools[self.layer]
        states = pool.new_zeros(self.num_seqs, *pool.shape[1:])
        return states.index_copy_(0, cache.load_indices, pool.index_select(0, cache.load_slots))


def _has_any(indices: torch.Tensor | None) -> bool:
    """Whether there is an entry."""
    return indices is not None and indices.numel() > 0
