"""Whose the outputs of a batch are: arrays over its sequences, without those that were cancelled while it ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..protocol.ipc.batch_outputs import BatchOutputs
from ..protocol.ipc.rows import AnswerBlock
from ..scheduling import Chunk, QueuedSequence


def not_finite(chunks: Sequence[Chunk], outputs: BatchOutputs) -> Iterator[QueuedSequence]:
    """Yields the sequences that still count and of which the model gave NaN or inf.

    Args:
        chunks: Those that ran together.
        outputs: What they gave.
    """
    for place in np.flatnonzero(~outputs.is_finite).tolist():
        sequence = chunks[place].sequence
        if sequence.is_under_way(chunks[place]):
            yield sequence


def live_answers(chunks: Sequence[Chunk], outputs: BatchOutputs, started_s: float) -> list[AnswerBlock]:
    """Returns what the requests get whose sequences still count, and takes down when their first forward began.

    Args:
        chunks: Those that ran together.
        outputs: What they gave.
        started_s: Seconds, monotonic: their forward began.
    """
    are_live = np.array([chunk.sequence.is_under_way(chunk) for chunk in chunks], np.bool_)
    requests = [chunk.sequence.request for chunk in chunks]
    for request, is_live in zip(requests, are_live.tolist(), strict=True):
        if is_live and request.started_s is None:
            request.started_s = started_s
    request_ids = np.array([request.request_id for request in requests], np.int64)
    indices = np.array([chunk.sequence.index for chunk in chunks], np.int64)
    are_last = np.array([chunk.end == chunk.sequence.num_tokens for chunk in chunks], np.int64)
    blocks = []
    for block in outputs.blocks:
        places = np.arange(len(chunks)) if block.indices is None else np.array(block.indices, np.intp)
        answers = AnswerBlock(block, request_ids[places], indices[places], are_last[places])
        blocks.append(answers.pick(np.flatnonzero(are_live[places])))
    return [answers for answers in blocks if len(answers.request_ids)]
