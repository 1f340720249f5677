"""The results of a step on their way to a frontend: arrays over all of its sequences, and nothing for each by itself.

Shape letters: N sequences of a block, E requests that have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .batch_outputs import ArrayBlock
from .messages import Frame, RowBlock, Rows

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class AnswerBlock:
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

    def pick(self, places: Integers) -> AnswerBlock:
        """Returns those of some sequences; itself where they are all in their order."""
        if len(places) == len(self.request_ids):
            return self
        return AnswerBlock(
            self.block.pick(places), self.request_ids[places], self.indices[places], self.is_last[places]
        )


class EndedRequests(NamedTuple):
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
    def of(cls, times: Sequence[tuple[int, float, float]] = ()) -> EndedRequests:
        """Returns the record of requests with their times."""
        ids, queue_s, inference_s = zip(*times, strict=True) if times else ((), (), ())
        return cls(np.array(ids, np.int64), np.array(queue_s, np.float64), np.array(inference_s, np.float64))

    def pick(self, places: Integers) -> EndedRequests:
        """Returns some of them."""
        return EndedRequests(self.request_ids[places], self.queue_s[places], self.inference_s[places])


def pack_rows(blocks: Sequence[AnswerBlock], ended: EndedRequests) -> tuple[list[RowBlock], list[Frame]]:
    """Returns what a Rows message says of its blocks, and its frames.

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
        heads.append(RowBlock(block.name, len(answers.request_ids), width, has_row_lens, has_widths))
        words += [answers.request_ids, answers.indices, answers.is_last]
        words += [np.array(each, np.int64) for each in (block.row_lens, block.widths) if each is not None]
    values = [np.ascontiguousarray(answers.block.values, np.float32) for answers in blocks]
    return heads, [_bytes(np.concatenate(words)), *map(_bytes, values)]


def unpack_rows(message: Rows, frames: Sequence[Frame]) -> tuple[list[AnswerBlock], EndedRequests]:
    """Returns the blocks of a Rows message and the requests that have ended. Arrays are views of its frames."""
    words = np.frombuffer(frames[0], np.int64)
    sizes = [message.num_ended] * 3
    for head in message.blocks:
        sizes += [head.num_seqs] * (3 + head.has_row_lens + head.has_widths)
    columns = iter([words[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)])
    ended = EndedRequests(next(columns), next(columns).view(np.float64), next(columns).view(np.float64))
    blocks = []
    for head, frame in zip(message.blocks, frames[1:], strict=True):
        request_ids, indices, is_last = next(columns), next(columns), next(columns)
        row_lens = next(columns).tolist() if head.has_row_lens else None
        widths = next(columns).tolist() if head.has_widths else None
        num_rows = head.num_seqs if row_lens is None else sum(row_lens)
        values = np.frombuffer(frame, np.float32).reshape(num_rows, head.width)
        block = ArrayBlock(name=head.name, values=values, row_lens=row_lens, widths=widths)
        blocks.append(AnswerBlock(block, request_ids, indices, is_last))
    return blocks, ended


def _bytes(array: NDArray[np.generic]) -> Frame:
    return memoryview(array).cast("B") if array.size else b""  # one without a value cannot be cast
