"""Which sequences of a batch are answered together, and what their result is called on its way to the frontend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

from .params import PoolingParams
from .tasks import PoolingTask

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
    first = params[0]
    if all(p is first for p in params):
        return dict.fromkeys(OutputGroup.all_of(first))
    groups_by_id = {id(p): OutputGroup.all_of(p) for p in distinct(params)}
    if len(set(groups_by_id.values())) == 1:
        return dict.fromkeys(next(iter(groups_by_id.values())))
    indices: dict[OutputGroup, list[int]] = defaultdict(list)
    for index, p in enumerate(params):
        for group in groups_by_id[id(p)]:
            indices[group].append(index)
    return dict(indices)
