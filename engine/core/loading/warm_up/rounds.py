"""A batch of every kind that traffic can bring, so that a GPU compiles and loads nothing while requests wait.

triton compiles a kernel when it first meets a kind of argument, in tenths of a second to seconds; cuBLAS loads another
one for each range of sizes. What a kind is: which task, how long the longest sequence is (tiles, and the sizes from
which on work is split), whether sequences go on from earlier chunks, how many tokens there are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ....scheduling import Chunk, PrefillChunk, SequencePool
from ...runner import DeviceMemoryError
from .made_batches import MadeBatches

logger = logging.getLogger("penstock.engine")

_TILES: Final = (16, 32, 64, 128, 256, 512)
"""Rows that one program of a kernel takes, somewhere."""
_SPLIT: Final = 256
"""Rows from which on pooling shares a sequence out: batches whose longest has more run other kernels."""
_SHORT: Final = 8
"""Tokens of a short text."""
_CHUNKS: Final = (_SHORT, 64, 320)
"""Tokens of chunks, smaller where the budget or the longest sequence is: tiles of attention follow from them, and from
`_SPLIT` on how chunks are pooled."""
_PROGRESS_S: Final = 5.0
"""Seconds between two lines of the log."""


def run_rounds(
    made: MadeBatches,
    run: Callable[[Sequence[Chunk]], object],
    sequence_pool: SequencePool,
    *,
    token_budget: int,
    longest: int,
    max_num_seqs: int,
) -> int:
    """Runs them; says in the log how far it is.

    Args:
        made: Makes the batches.
        run: Runs one; what it gives is of no interest.
        sequence_pool: Memory of sequences that run in chunks.
        token_budget: Tokens of the largest forward.
        longest: Tokens of the longest sequence.
        max_num_seqs: Sequences of the largest forward.

    Returns:
        How many batches ran. One that finds too little memory is left out: the log says so.
    """
    began_s = told_s = time.monotonic()
    num_run = 0
    for batch in _batches(made, sequence_pool, token_budget, longest, max_num_seqs):
        num_tokens = sum(chunk.num_tokens for chunk in batch)
        try:
            run(batch)
        except DeviceMemoryError as error:
            logger.warning("out of memory while warming up with %d tokens: %s", num_tokens, error)
            continue
        num_run += 1
        if time.monotonic() - told_s >= _PROGRESS_S:
            told_s = time.monotonic()
            logger.info("warming up: %d batches in %.0f s so far", num_run, told_s - began_s)
    logger.info("warmed up: %d batches of up to %d tokens in %.1f s", num_run, token_budget, time.monotonic() - began_s)
    return num_run


def _batches(
    made: MadeBatches, sequence_pool: SequencePool, token_budget: int, longest: int, max_num_seqs: int
) -> Iterator[list[Chunk]]:
    yield from _with_past(made, sequence_pool, token_budget, longest, max_num_seqs)
    longest = min(longest, token_budget)
    edges = [edge + beside for edge in _TILES for beside in (-1, 0, 1)]
    kinds = [[1], [1, 2, 3, *(n for n in edges if n <= _SPLIT)], [n for n in edges if n > _SPLIT], [longest]]
    for lengths in kinds:
        fitting = _fit([n for n in lengths if n <= longest], token_budget, max_num_seqs)
        if fitting:
            for params in made.params():
                yield made.batch(fitting, [params])
            yield made.batch(_fit(fitting * 2, token_budget, max_num_seqs), made.params())
    num_tokens = 1
    while num_tokens <= token_budget:  # products of every size, once with long sequences and once with short ones
        for length in (min(longest, num_tokens), min(_SHORT, longest, num_tokens)):
            lengths = [length] * (num_tokens // length) + [num_tokens % length] * (num_tokens % length > 0)
            yield made.batch(_fit(lengths, token_budget, max_num_seqs), made.plain()[:1])
        num_tokens *= 2


def _fit(lengths: Sequence[int], token_budget: int, max_num_seqs: int) -> list[int]:
    """As many of the lengths as one forward takes, from the first."""
    taken: list[int] = []
    room = token_budget
    for length in lengths[:max_num_seqs]:
        if length <= room:
            taken.append(length)
            room -= length
    return taken


def _with_past(
    made: MadeBatches, sequence_pool: SequencePool, token_budget: int, longest: int, max_num_seqs: int
) -> Iterator[list[Chunk]]:
    """Three chunks of a sequence for every task and size; the second beside a whole one where two may run."""
    for size in sorted({min(size, max(token_budget - _SHORT, token_budget // 2), longest // 3) for size in _CHUNKS}):
        if size < 1 or not sequence_pool.can_hold(3 * size):
            continue
        for params in made.params():
            sequence = made.sequence(-1, 3 * size, params)
            sequence.is_long = True
            sequence.allocation = sequence_pool.allocate(sequence.request_id, 3 * size)
            if sequence.allocation is None:
                return
            first, second, third = (PrefillChunk(sequence, i * size, (i + 1) * size, i) for i in range(3))
            try:
                yield [first]
                yield [*made.batch([min(_SHORT, size)][: max_num_seqs - 1], [params]), second]
                yield [third]
            finally:
                sequence_pool.free(sequence.allocation, forget=True)
