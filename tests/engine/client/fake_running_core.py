"""A fake process or thread of an engine; the test decides when it is ready, answers and ends."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from penstock.engine.client.engine_process import EngineProcess
from penstock.engine.client.running_core import OnExit, OnLoad, OnMessage
from penstock.engine.protocol.messages import Frame, LoadFailed, ModelReady, Start
from penstock.engine.protocol.model_info import TokenizerSpec

from ..steps import Row, step_of, unpacked
from .word_model import info


class FakeRunningCore:
    """Has the interface of ProcessCore and ThreadCore."""

    made: ClassVar["list[FakeRunningCore]"]

    def __init__(
        self,
        start_message: Start,
        on_load: OnLoad,
        on_message: OnMessage,
        on_exit: OnExit,
        process: EngineProcess | None = None,
    ) -> None:
        self.config, self.process = start_message.config, process
        self.on_load, self.on_message, self.end = on_load, on_message, on_exit
        self.is_started = self.is_closed = False
        self.waiting: list[int] = []
        self.made.append(self)

    async def start(self) -> None:
        self.is_started = True

    def send(self, first: bytes, frames: Sequence[Frame]) -> None:
        self.waiting += [each.request_id for each in unpacked(first, frames)[1]]

    async def close(self) -> None:
        self.is_closed = True

    def host_bytes(self) -> int:
        return 7

    def fail(self, message: str, kind: str = "WeightError") -> None:
        self.on_load(LoadFailed(kind, message))

    def ready(self, max_model_len: int = 24) -> None:
        assert self.is_started
        loaded = replace(info(), dtype="bfloat16", arithmetic="float32", max_model_len=max_model_len)
        spec = TokenizerSpec(json="{}", truncation_side="right", uses_token_types=False)
        self.on_load(ModelReady(loaded, spec))

    def answer(self) -> None:
        rows = [Row(request_id, 0, "embedding", np.ones(1, np.float32)) for request_id in self.waiting]
        self.on_message(*step_of(rows, 3))
        self.waiting = []
