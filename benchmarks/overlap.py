"""Measures the idle time of a simulated device under the engine's own loop. A forward takes 5 ms.

    python benchmarks/overlap.py --output benchmarks/results/overlap-simulated.json
    python benchmarks/overlap.py --clock wall

The loop is EngineCore with its real scheduler and a full queue; only the runner is simulated. An option adds host work
to each batch: half when it begins and half when its results are read. Loads are texts of 512 tokens, 16 in a batch, and
chunks of long prompts; the next chunk begins while the last one runs. The real loop has two forwards in flight. It is
compared with a loop that reads the results of a batch before it begins the next one.

With the clock of the processor, other work of the machine has little effect. The host's time is the CPU time of the
loop, of the intake of requests and of the added work, all in one thread. The device uses the same clock. With the wall
clock (`--clock wall`) the device is a separate process and the host's work holds the interpreter lock. This needs two
idle processors. The benchmark uses no GPU: it measures the loop only.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

import numpy as np
from machine import machine
from simulated_device import CountedDevice, WallDevice

from penstock.engine.core.core import EngineCore
from penstock.engine.core.runner import CompletedForward, ForwardTime, Runner
from penstock.engine.protocol.batch_outputs import BatchOutputs, OutputArray
from penstock.engine.protocol.config import CacheConfig, EngineConfig, SchedulerConfig
from penstock.engine.protocol.messages import (
    ClientMessageBuilder,
    Frame,
    FromCore,
    StepResults,
    SubmitRequest,
    TokenizedInput,
)
from penstock.engine.protocol.model_info import ModelInfo, ModelKind, TokenizerSpec
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingTask, PoolingType
from penstock.engine.scheduling import Allocation, InputSequence, KvCachePool, PrefillChunk, SequencePool

WIDTH: Final = 384
BUDGET: Final = 8192
LOADS: Final = {"whole texts": (16, 512), "chunks": (1, 65_536)}
"""Texts of a request, and tokens of each."""
_QUEUED_TOKENS: Final = 6 * BUDGET
_LEAST_REQUESTS: Final = 4
_MOST_UNDER_WAY: Final = 2
_WARM_S: Final = 0.5

Row = dict[str, Any]


class SimulatedForward:
    """See Forward."""

    def __init__(self, runner: SimulatedRunner, number: int, result: BatchOutputs) -> None:
        self._runner, self._number, self._result = runner, number, result

    @property
    def is_done(self) -> bool:
        """See Forward."""
        return self._runner.device.num_ended() > self._number

    def outputs(self) -> BatchOutputs:
        """See Forward."""
        self._runner.device.await_end(self._number)
        self._runner.device.spend(self._runner.half_s)
        return self._result


class SimulatedRunner(Runner):
    """See Runner.

    Args:
        device: Runs the forwards.
        host_ms: Host time per batch in addition to the loop, in milliseconds.
        num_under_way: Forwards that the device may have at once.
    """

    def __init__(self, device: WallDevice | CountedDevice, host_ms: float, num_under_way: int) -> None:
        self.info = ModelInfo(
            name="simulated", path="simulated", architecture="None", model_type="none", packed=True,
            kind=ModelKind.EMBEDDING, tasks=(PoolingTask.EMBED,), hidden_size=WIDTH, vocab_size=1000,
            max_model_len=65_536, embedding_size=WIDTH, sequence_pooling=(PoolingType.MEAN,), device="cuda",
        )  # fmt: skip
        self.tokenizer = TokenizerSpec(json="{}", truncation_side="right", uses_token_types=False)
        self.sequence_pool = SequencePool(KvCachePool(65_536, 16), enable_prefix_caching=False)
        self.device, self.half_s = device, host_ms / 2000
        self._num_under_way = num_under_way
        self._num_begun = 0

    def set_wakeup_fd(self, fd: int | None) -> None:
        """See Runner."""

    @property
    def has_capacity(self) -> bool:
        """See Runner."""
        return self._num_begun - self.device.num_ended() < self._num_under_way

    def begin(self, chunks: Sequence[PrefillChunk]) -> SimulatedForward | CompletedForward:
        """See Runner."""
        self.device.spend(self.half_s)
        done = [index for index, chunk in enumerate(chunks) if chunk.is_last]
        output = OutputArray(name="embedding", values=np.zeros((len(done), WIDTH), np.float32), indices=done)
        self.device.submit()
        self._num_begun += 1
        forward = SimulatedForward(self, self._num_begun - 1, BatchOutputs.of(len(chunks), [output]))
        return CompletedForward(forward.outputs()) if self._num_under_way == 1 else forward

    def warm_up(self) -> None:
        """See Runner."""

    def preempt(self, sequence: InputSequence, allocation: Allocation) -> None:
        """See Runner."""

    def drop_states(self, sequences: Sequence[InputSequence]) -> None:
        """See Runner."""

    def free_tokens(self) -> None:
        """See Runner."""

    def take_times(self) -> list[ForwardTime]:
        """See Runner. Nothing is learnt: batches are as large as they may be."""
        return []


class Load:
    """A loop over a runner, with a queue that is deep: as many requests come as are answered.

    Args:
        runner: Of the device.
        name: See LOADS.
    """

    def __init__(self, runner: SimulatedRunner, name: str) -> None:
        self.num_texts, self.num_tokens = LOADS[name]
        self.num_done = 0
        self._answered: SimpleQueue[int] = SimpleQueue()
        self._next_id = 0
        self._params = PoolingParams(task=PoolingTask.EMBED).resolved(PoolingTask.EMBED, runner.info)
        self._inputs = [TokenizedInput(np.ones(self.num_tokens, np.int32)) for _ in range(self.num_texts)]
        config = EngineConfig(
            model="simulated",
            scheduler=SchedulerConfig(max_num_batched_tokens=BUDGET, chunk_size=BUDGET),
            cache=CacheConfig(enable_prefix_caching=False),
        )
        self.core = EngineCore(config, self._take, lambda config: runner)
        self.core.load()
        self.submit(max(_QUEUED_TOKENS // (self.num_texts * self.num_tokens), _LEAST_REQUESTS))

    def submit(self, count: int) -> None:
        """Sends some requests."""
        turn = ClientMessageBuilder()
        for _ in range(count):
            turn.requests.append(SubmitRequest(self._next_id, self._params, self._inputs))
            self._next_id += 1
        self.core.receive(*turn.pack())

    def refill(self, timeout_s: float | None = None) -> None:
        """Sends a new request for each finished one. Waits up to `timeout_s` seconds for the first."""
        with contextlib.suppress(Empty):
            if count := self._answered.get(timeout_s is not None, timeout_s):
                self.submit(count)

    def _take(self, message: FromCore, frames: list[Frame]) -> None:
        if isinstance(message, StepResults):
            self.num_done += message.num_tokens
            self._answered.put(len(message.finished))


def measure_counted(device: CountedDevice, load: Load, seconds: float) -> dict[str, float]:
    """Steps the loop for some seconds of the device; returns its times."""

    def sleep() -> list[Callable[[], None]]:
        device.sleep()
        return []

    load.core._waker.wait = sleep  # type: ignore[method-assign]
    for part_s in (_WARM_S, seconds):
        device.reset()
        load.num_done = 0
        end_s = device.now_s() + part_s
        while device.now_s() < end_s:
            load.core.step()
            load.refill()
    return device.close()


def measure_wall(device: WallDevice, load: Load, seconds: float) -> dict[str, float]:
    """Runs the loop in a thread for some seconds; returns the device's times."""
    device.open(load.core._waker.fd)

    def run() -> None:
        while load.core.step():
            pass

    loop = threading.Thread(target=run)
    loop.start()
    for part_s in (_WARM_S, seconds):
        device.reset()
        load.num_done = 0
        end_s = time.perf_counter() + part_s
        while time.perf_counter() < end_s:
            load.refill(timeout_s=0.1)
    load.core.stop()
    loop.join()
    return device.close()


def measure(name: str, host_ms: float, num_under_way: int, seconds: float, forward_ms: float, clock: str) -> Row:
    """Returns the figures of one round."""
    if clock == "wall":
        wall = WallDevice(forward_ms)
        runner = SimulatedRunner(wall, host_ms, num_under_way)
        load = Load(runner, name)
        times = measure_wall(wall, load, seconds)
    else:
        counted = CountedDevice(forward_ms)
        runner = SimulatedRunner(counted, host_ms, num_under_way)
        load = Load(runner, name)
        times = measure_counted(counted, load, seconds)
    return {
        "idle_share": round(times["idle_s"] / (times["busy_s"] + times["idle_s"]), 4),
        "forward_ms": round(1000 * times["busy_s"] / times["num_forwards"], 3),
        "forwards": times["num_forwards"],
        "tokens_per_s": round(load.num_done / seconds),
    }


def main() -> None:
    """Parses the arguments, measures, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clock", choices=("processor", "wall"), default="processor")
    parser.add_argument("--forward-ms", type=float, default=5.0)
    parser.add_argument("--host-ms", type=float, nargs="+", default=[0.0, 4.0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    rows: list[Row] = []
    print(f"{'load':12} {'host ms':>7} {'under way':>9} {'idle':>7} {'forward ms':>10} {'tokens/s':>10}")
    for name, host_ms, num_under_way in itertools.product(LOADS, given.host_ms, (1, _MOST_UNDER_WAY)):
        found = [
            measure(name, host_ms, num_under_way, given.seconds, given.forward_ms, given.clock)
            for _ in range(given.rounds)
        ]
        # The machine is shared: the round with the least noise, and the others beside it.
        row = {"load": name, "host_ms": host_ms, "under_way": num_under_way}
        row |= min(found, key=lambda figures: figures["idle_share"])
        rows.append(row | {"idle_shares": [figures["idle_share"] for figures in found]})
        print(
            f"{name:12} {host_ms:7.1f} {num_under_way:9} {row['idle_share']:7.2%} "
            f"{row['forward_ms']:10.2f} {row['tokens_per_s']:10,}"
        )
    if given.output is not None:
        on = {"machine": machine(), "clock": given.clock, "forward_ms": given.forward_ms, "budget": BUDGET}
        given.output.write_text(json.dumps({**on, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
