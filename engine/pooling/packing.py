"""Arithmetic of packed rows, and which sequences of a batch are answered together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..protocol.params import PoolingParams
from ..protocol.tasks import PoolingTask

IntArray = NDArray[np.int64]
# Packed rows of some sequences: a slice where they lie together, else [R] int64 on the device of the rows.
Rows = slice | Tensor


def prefix_sums(lengths: Sequence[int] | IntArray) -> IntArray:
    """Returns [N+1]: where each sequence begins, and the end."""
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def cu_seqlens_of(lengths: Sequence[int] | IntArray, device: torch.device | str) -> Tensor:
    """Returns the prefix sums of `lengths` as kernels take them, [N+1] int32."""
    return torch.from_numpy(prefix_sums(lengths).astype(np.int32)).to(device)


def ranges(firsts: IntArray, ends: IntArray) -> IntArray:
    """Returns firsts[0] to ends[0], firsts[1] to ends[1] and so on, end to end."""
    lengths = ends - firsts
    bounds = prefix_sums(lengths)
    return np.arange(bounds[-1]) + np.repeat(firsts - bounds[:-1], lengths)


def rows_between(firsts: IntArray, ends: IntArray, device: torch.device) -> Rows:
    """Returns the rows firsts[n] to ends[n] of N sequences, in order; indexing with a slice copies nothing."""
    if len(firsts) == 0:
        return slice(0, 0)
    if np.array_equal(firsts[1:], ends[:-1]):
        return slice(int(firsts[0]), int(ends[-1]))
    return torch.from_numpy(ranges(firsts, ends)).to(device)


_OUTPUT_NAMES: Final = {
    PoolingTask.EMBED: "embedding",
    PoolingTask.CLASSIFY: "scores",
    PoolingTask.SCORE: "scores",
    PoolingTask.TOKEN_EMBED: "token_embeddings",
    PoolingTask.TOKEN_CLASSIFY: "token_scores",
    PoolingTask.SPARSE_EMBED: "sparse",
}


class OutputGroup(NamedTuple):
    """What the sequences of one block have in common: the result, and the class columns that are kept."""

    name: str
    columns: tuple[int, ...] | None

    @classmethod
    def of(cls, params: PoolingParams) -> OutputGroup:
        """Returns where a sequence with these parameters belongs; they must be resolved."""
        assert params.task is not None, "PoolingParams.resolved sets the task"
        if params.is_compared:
            return cls("similarities", None)
        columns = params.returned_token_ids if params.task is PoolingTask.TOKEN_CLASSIFY else None
        return cls(_OUTPUT_NAMES[params.task], columns)

    @classmethod
    def all_of(cls, params: PoolingParams) -> tuple[OutputGroup, ...]:
        """Returns where a sequence belongs by all of its tasks."""
        return cls.of(params), *(cls(_OUTPUT_NAMES[task], None) for task in params.also)

    @property
    def is_token_level(self) -> bool:
        """True where the result is made of the rows of every token, not of a pooled one."""
        return self.name in ("token_embeddings", "token_scores", "similarities", "sparse")


def distinct(params: Sequence[PoolingParams]) -> list[PoolingParams]:
    """The different objects among `params`: the inputs of a request share one, so these are few."""
    return list(dict(zip(map(id, params), params, strict=True)).values())


def by_group(params: Sequence[PoolingParams]) -> dict[OutputGroup, list[int] | None]:
    """Returns the sequences of a batch by group, in which one may be several times; None stands for all of them."""
    groups_by_id = {id(p): OutputGroup.all_of(p) for p in distinct(params)}
    if len(set(groups_by_id.values())) == 1:
        return dict.fromkeys(next(iter(groups_by_id.values())))
    indices: dict[OutputGroup, list[int]] = defaultdict(list)
    for index, p in enumerate(params):
        for group in groups_by_id[id(p)]:
            indices[group].append(index)
    return dict(indices)
