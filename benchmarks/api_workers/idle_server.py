"""`penstock serve` with an engine that does not compute, to measure everything except the forward.

    python benchmarks/api_workers/idle_server.py serve [MODEL] [FLAG ...]

Everything is as in the real command, the engine's process, its scheduler and its sockets included; only the runner
answers every text with the same vector, at once.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.engine.client import engine_process
from penstock.engine.core import core_process
from penstock.engine.core.loading.tokenizer_loader import load_tokenizer
from penstock.engine.core.runner import CompletedForward, ForwardTime, Runner
from penstock.engine.model_files.resolve import resolve_model, with_device
from penstock.engine.protocol.batch_outputs import BatchOutputs, OutputArray
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.scheduling import Allocation, InputSequence, PrefillChunk, SequencePool
from penstock.server.commands.cli import main

_AS_ENGINE: Final = "engine-process"
_ENGINE_PROCESS: Final = "penstock.engine.core.core_process"


class IdleRunner(Runner):
    """A Runner that knows its model's files, and none of its weights."""

    has_capacity = True

    def __init__(self, config: EngineConfig) -> None:
        self.info = with_device(resolve_model(config), "cpu", "float32")
        self.tokenizer = load_tokenizer(self.info, trust_remote_code=False, chat_template=None)
        self.sequence_pool = SequencePool()
        size = self.info.embedding_size or self.info.hidden_size
        self._row = np.full((1, size), size**-0.5, np.float32)

    def warm_up(self) -> None:
        """See Runner."""

    def begin(self, chunks: Sequence[PrefillChunk]) -> CompletedForward:
        """See Runner."""
        values = np.repeat(self._row, len(chunks), axis=0)
        return CompletedForward(BatchOutputs.of(len(chunks), [OutputArray(name="embedding", values=values)]))

    def set_wakeup_fd(self, fd: int | None) -> None:
        """See Runner. Nothing is ever waited for."""

    def preempt(self, sequence: InputSequence, allocation: Allocation) -> None:
        """See Runner. Nothing runs in chunks."""

    def drop_states(self, sequences: Sequence[InputSequence]) -> None:
        """See Runner."""

    def free_tokens(self) -> int | None:
        """See Runner."""
        return None

    def take_times(self) -> list[ForwardTime]:
        """See Runner."""
        return []


class _Popen(subprocess.Popen[bytes]):
    """Starts this script where the engine's process would be started."""

    def __init__(self, arguments: Sequence[str], **named: Any) -> None:
        if _ENGINE_PROCESS in arguments:
            arguments = (sys.executable, "-P", str(Path(__file__).resolve()), _AS_ENGINE, *arguments[-2:])
        super().__init__(arguments, **named)


if __name__ == "__main__":
    if sys.argv[1:2] == [_AS_ENGINE]:
        del sys.argv[1]
        core_process.load_runner = IdleRunner
        core_process.main()
    else:
        engine_process.subprocess.Popen = _Popen
        sys.exit(main())
