"""Results of a batch: arrays over all of its sequences, and their message format. No Python object per sequence.

Shape letters: N sequences of a block, E requests that have finished.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .messages import BlockHeader, Frame, StepResults
from .params import PoolingParams
from .tasks import PoolingTask

Arrays = Mapping[str, NDArray[np.float32]]
"""The outputs of one sequence by name."""
Integers = NDArray[np.int64]
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


def distinct_params(params: Sequence[PoolingParams]) -> list[PoolingParams]:
    """The different objects among `params`: the inputs of a request share one, so these are few."""
    return list(dict(zip(map(id, params), params, strict=True)).values())


def by_group(params: Sequence[PoolingParams]) -> dict[OutputGroup, list[int] | None]:
    """Returns the sequences of a batch by group, in which one may be several times; None stands for all of them."""
    first = params[0]
    if all(p is first for p in params):
        return dict.fromkeys(OutputGroup.all_of(first))
    groups_by_id = {id(p): OutputGroup.all_of(p) for p in distinct_params(params)}
    if len(set(groups_by_id.values())) == 1:
        return dict.fromkeys(next(iter(groups_by_id.values())))
    indices: dict[OutputGroup, list[int]] = defaultdict(list)
    for index, p in enumerate(params):
        for group in groups_by_id[id(p)]:
            indices[group].append(index)
    return dict(indices)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrayBlock:
    """Results of one kind for some sequences of a batch, on the host.

    Attributes:
        name: "embedding", "scores", "token_embeddings", "token_scores", "similarities" or "sparse".
        values: [N, W] float32, a row per sequence; or [R, W], token rows.
        indices: The sequences that they belong to, in order; None means all of the batch.
        row_lens: Token rows of each sequence in this batch; None for a row per sequence.
        widths: Columns of each sequence, where they differ: what lies beyond them says nothing.
    """

    name: str
    values: NDArray[np.float32]
    indices: Sequence[int] | None = None
    row_lens: Sequence[int] | None = None
    widths: Sequence[int] | None = None

    def split(self) -> list[NDArray[np.float32]]:
        """Returns an array for each of its sequences: [W], or of token rows [L, W]. Views."""
        if self.row_lens is None:
            parts = list(self.values)
        else:
            ends = accumulate(self.row_lens)
            parts = [self.values[end - length : end] for end, length in zip(ends, self.row_lens, strict=True)]
        if self.widths is None:
            return parts
        return [part[..., :width] for part, width in zip(parts, self.widths, strict=True)]

    def pick(self, places: NDArray[np.intp]) -> ArrayBlock:
        """Returns a block of some of its sequences, by their places in it, ascending; without indices."""
        widths = None if self.widths is None else [self.widths[place] for place in places]
        if self.row_lens is None:
            return ArrayBlock(name=self.name, values=self.values[places], widths=widths)
        row_lens = np.asarray(self.row_lens)
        is_kept = np.zeros(len(row_lens), np.bool_)
        is_kept[places] = True
        values = self.values[np.repeat(is_kept, row_lens)]
        return ArrayBlock(name=self.name, values=values, row_lens=row_lens[places].tolist(), widths=widths)


@dataclass(frozen=True, slots=True, eq=False)
class BatchOutputs:
    """The results of one batch. `of` makes one where nobody has looked yet whether they are finite.

    They are on their way to whoever asked: nobody writes to their values any more.

    Attributes:
        num_seqs: Sequences in the batch, complete or not.
        blocks: At most one of a name per sequence; a sequence may be in none.
        is_finite: [num_seqs] bool. Whether all that a sequence got are numbers, and finite.
    """

    num_seqs: int
    blocks: tuple[ArrayBlock, ...]
    is_finite: NDArray[np.bool_]

    @classmethod
    def of(cls, num_seqs: int, blocks: Sequence[ArrayBlock]) -> BatchOutputs:
        """Returns the results with what a look at them says."""
        is_finite = np.ones(num_seqs, np.bool_)
        for block in blocks:
            if not np.isfinite(block.values).all():  # looked at together: each by itself takes as long
                found = [bool(np.isfinite(part).all()) for part in block.split()]
                is_finite[slice(None) if block.indices is None else list(block.indices)] &= found
        return cls(num_seqs, tuple(blocks), is_finite)

    def split(self) -> list[Arrays]:
        """Returns the arrays of each sequence by name: [D], [C], [L, D] or [L, C] float32. Views.

        A sequence of which more chunks are to come has, from a token-level task, the rows of this chunk (perhaps
        [0, D] or [0, C]), to be joined along axis 0 with those before and after; from a sequence-level task it has no
        array.
        """
        results: list[dict[str, NDArray[np.float32]]] = [{} for _ in range(self.num_seqs)]
        for block in self.blocks:
            indices = range(self.num_seqs) if block.indices is None else block.indices
            for index, array in zip(indices, block.split(), strict=True):
                results[index][block.name] = array
        return list(results)


@dataclass(frozen=True, slots=True, eq=False)
class ResultBlock:
    """Outputs of one name, and whose they are.

    Attributes:
        block: The outputs; its indices count for nothing.
        request_ids: [N] int64.
        indices: [N] int64. Which input of its request each sequence is.
        is_last: [N] int64. 1 where no more of the sequence is to come.
    """

    block: ArrayBlock
    request_ids: Integers
    indices: Integers
    is_last: Integers

    def pick(self, places: Integers) -> ResultBlock:
        """Returns those of some sequences; itself where they are all in their order."""
        if len(places) == len(self.request_ids):
            return self
        return ResultBlock(
            self.block.pick(places), self.request_ids[places], self.indices[places], self.is_last[places]
        )


class FinishedRequests(NamedTuple):
    """Requests that have ended.

    Attributes:
        request_ids: [E] int64.
        queue_s: [E] float64. Seconds that each waited for its first forward.
        inference_s: [E] float64. Seconds from there to the end of its last.
    """

    request_ids: Integers
    queue_s: NDArray[np.float64]
    inference_s: NDArray[np.float64]

    @classmethod
    def of(cls, times: Sequence[tuple[int, float, float]] = ()) -> FinishedRequests:
        """Returns the record of requests with their times."""
        ids, queue_s, inference_s = zip(*times, strict=True) if times else ((), (), ())
        return cls(np.array(ids, np.int64), np.array(queue_s, np.float64), np.array(inference_s, np.float64))

    def pick(self, places: Integers) -> FinishedRequests:
        """Returns some of them."""
        return FinishedRequests(self.request_ids[places], self.queue_s[places], self.inference_s[places])


def pack_results(blocks: Sequence[ResultBlock], ended: FinishedRequests) -> tuple[list[BlockHeader], list[Frame]]:
    """Returns what a StepResults message says of its blocks, and its frames.

    The first has, in 8 Bytes each, the arrays of `ended`, then for each block the ids, the indices, `is_last`, the rows
    of each sequence and its columns (these two where the header says so). The others are the values of a block each:
    no copy of them, so that nobody may write there any more.
    """
    heads = []
    words = [ended.request_ids, ended.queue_s.view(np.int64), ended.inference_s.view(np.int64)]
    for answers in blocks:
        block = answers.block
        has_row_lens, has_widths = block.row_lens is not None, block.widths is not None
        width = block.values.shape[1]
        heads.append(BlockHeader(block.name, len(answers.request_ids), width, has_row_lens, has_widths))
        words += [answers.request_ids, answers.indices, answers.is_last]
        words += [np.array(each, np.int64) for each in (block.row_lens, block.widths) if each is not None]
    values = [np.ascontiguousarray(answers.block.values, np.float32) for answers in blocks]
    return heads, [_bytes(np.concatenate(words)), *map(_bytes, values)]


def unpack_results(message: StepResults, frames: Sequence[Frame]) -> tuple[list[ResultBlock], FinishedRequests]:
    """Returns the blocks of a StepResults message and the requests that have ended. Arrays are views of its frames."""
    words = np.frombuffer(frames[0], np.int64)
    sizes = [message.num_ended] * 3
    for head in message.blocks:
        sizes += [head.num_seqs] * (3 + head.has_row_lens + head.has_widths)
    columns = iter([words[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)])
    ended = FinishedRequests(next(columns), next(columns).view(np.float64), next(columns).view(np.float64))
    blocks = []
    for head, frame in zip(message.blocks, frames[1:], strict=True):
        request_ids, indices, is_last = next(columns), next(columns), next(columns)
        row_lens = next(columns).tolist() if head.has_row_lens else None
        widths = next(columns).tolist() if head.has_widths else None
        num_rows = head.num_seqs if row_lens is None else sum(row_lens)
        values = np.frombuffer(frame, np.float32).reshape(num_rows, head.width)
        block = ArrayBlock(name=head.name, values=values, row_lens=row_lens, widths=widths)
        blocks.append(ResultBlock(block, request_ids, indices, is_last))
    return blocks, ended


def _bytes(array: NDArray[np.generic]) -> Frame:
    return memoryview(array).cast("B") if array.size else b""  # one without a value cannot be cast
