"""A worker whose device waits instead of computing, run as a process: `waiting_worker.py INBOX OUTBOX`.

A forward has at most 8 sequences (`max_num_seqs`) and takes 50 ms. The answer is the sum of the tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from penstock.engine.core import worker
from penstock.engine.core.host import pin
from penstock.engine.core.runner import EndedForward, ForwardTime, Runner
from penstock.engine.protocol.batch_outputs import ArrayBlock, BatchOutputs
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.model_info import ModelInfo, ModelKind, TokenizerSpec
from penstock.engine.protocol.tasks import PoolingTask, PoolingType
from penstock.engine.scheduling import Allocation, PrefillChunk, QueuedSequence, SequencePool

FORWARD_S = 0.05


class WaitingRunner(Runner):
    """See Runner."""

    can_begin = True

    def __init__(self) -> None:
        self.info = ModelInfo(
            name="waits",
            path="waits",
            architecture="Waits",
            model_type="waits",
            packed=True,
            kind=ModelKind.EMBEDDING,
            tasks=(PoolingTask.EMBED,),
            hidden_size=1,
            vocab_size=1000,
            max_model_len=512,
            embedding_size=1,
            sequence_pooling=(PoolingType.LAST,),
        )
        self.tokenizer = TokenizerSpec(json="{}", truncation_side="right", uses_token_types=False)
        self.sequence_pool = SequencePool()
        self.num_forwards = 0

    def warm_up(self) -> None:
        """Needs none."""

    def begin(self, chunks: Sequence[PrefillChunk]) -> EndedForward:
        time.sleep(FORWARD_S)
        sums = np.array([[chunk.sequence.prompt.token_ids.sum()] for chunk in chunks], np.float32)
        return EndedForward(BatchOutputs.of(len(chunks), [ArrayBlock(name="embedding", values=sums)]))

    def set_wakeup_fd(self, fd: int | None) -> None:
        """Nothing is ever waited for."""

    def preempt(self, sequence: QueuedSequence, allocation: Allocation) -> None:
        """Has nothing to lose."""

    def free_tokens(self) -> None:
        """Has no memory."""

    def take_times(self) -> list[ForwardTime]:
        return []


def load_runner(config: EngineConfig) -> Runner:
    if config.cores is not None:
        pin(config.cores)
    return WaitingRunner()


if __name__ == "__main__":
    worker.load_runner = load_runner
    worker.main()
