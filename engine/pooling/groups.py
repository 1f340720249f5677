"""Which sequences of a batch are answered together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

from ..params import PoolingParams, PoolingTask
from .cut import distinct

_OUTPUT_NAMES: Final = {
    PoolingTask.EMBED: "embedding",
    PoolingTask.CLASSIFY: "scores",
    PoolingTask.SCORE: "scores",
    PoolingTask.TOKEN_EMBED: "token_embeddings",
    PoolingTask.TOKEN_CLASSIFY: "token_scores",
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

    @property
    def is_token_level(self) -> bool:
        """True where the result holds a row per token."""
        return self.name in ("token_embeddings", "token_scores", "similarities")


def by_group(params: Sequence[PoolingParams]) -> dict[OutputGroup, list[int] | None]:
    """Returns the sequences of a batch by group; None where all are of one."""
    group_by_id = {id(p): OutputGroup.of(p) for p in distinct(params)}
    groups = set(group_by_id.values())
    if len(groups) == 1:
        return dict.fromkeys(groups)
    indices: dict[OutputGroup, list[int]] = defaultdict(list)
    for index, p in enumerate(params):
        indices[group_by_id[id(p)]].append(index)
    return dict(indices)
