"""Adds the low-rank terms of LoRA adapters to the products of the rows that select them.

Shape letters: T rows of the batch, R rows of an adapter, I input features, O output features, K rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.cpu import LowRankWeights

if TYPE_CHECKING:
    from ..packed_batch import AdapterRows


@dataclass(slots=True)
class AdaptedRows:
    """The rows of the current batch by adapter. The model sets them before its layers run.

    Attributes:
        groups: See PackedBatch.adapters.
    """

    groups: Sequence[AdapterRows] = ()


class LowRankTerms:
    """The terms of one map: x down^T up^T for each adapter.

    Args:
        terms: The term of each adapter; None: no term.
    """

    __slots__ = ("_batch", "_terms")

    def __init__(
        self, terms: Sequence[LowRankWeights | None], batch: AdaptedRows, dtype: torch.dtype, device: torch.device
    ) -> None:
        def tensors(term: LowRankWeights) -> tuple[Tensor, Tensor]:
            down_KI, up_OK = (torch.from_numpy(part).to(device, dtype) for part in (term.down, term.up))
            return down_KI, up_OK

        self._batch = batch
        self._terms = [None if term is None else tensors(term) for term in terms]

    @property
    def are_used(self) -> bool:
        """Whether a row of the current batch has an adapter."""
        return bool(self._batch.groups)

    def add_to(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        """Adds the terms of inputs [T, I] to their products [T, O] in place, and returns the products."""
        for group in self._batch.groups:
            term = self._terms[group.number]
            if term is None:
                continue
            rows_RI = x_TI if group.rows is None else x_TI[group.rows]
            added_RO = F.linear(F.linear(rows_RI, term[0]), term[1])
            if group.rows is None:
                y_TO.add_(added_RO)
            else:
                y_TO.index_add_(0, group.rows, added_RO)
        return y_TO

    def add_embeddings(self, words_TE: Tensor, ids_T: Tensor) -> Tensor:
        """Adds the terms of word embeddings to the rows [T, E] of the ids [T] in place, and returns the rows."""
        for group in self._batch.groups:
            term = self._terms[group.number]
            if term is None:
                continue
            rows = slice(None) if group.rows is None else group.rows
            words_TE[rows] += F.linear(F.embedding(ids_T[rows], term[0].t()), term[1])
        return words_TE
