"""Measures the engine loop without a model: CPU time per sequence in the engine process and in the frontend.

    python benchmarks/engine_loop.py --output benchmarks/results/engine-loop.json
    python benchmarks/engine_loop.py --against ../before --rounds 3

The engine process and its sockets are those of a server. Only the runner is replaced: it packs its inputs as arrays,
sleeps for the time of a forward, and returns rows of 384 numbers. The queue is always full. There are two loads:
requests of one text (each finished batch is replaced in one iteration of the event loop), and requests of 32 texts.
Texts have 8 to 128 tokens.

Seconds are CPU time of the engine's engine thread: `receive`, `schedule`, `pack` and `deliver`; the rest is sockets,
decoding and the loop. `--against` alternates with the package in the .venv of another checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from machine import machine

from penstock.engine.client import engine_process
from penstock.engine.client.core_supervisor import CoreSupervisor
from penstock.engine.client.dispatcher import Dispatcher, Replica
from penstock.engine.core import core_process
from penstock.engine.core.core import EngineCore
from penstock.engine.core.runner import CompletedForward, ForwardTime, Runner
from penstock.engine.executors.cpu.array_encoder import PackedArrays
from penstock.engine.protocol.batch_outputs import BatchOutputs, OutputArray
from penstock.engine.protocol.config import EngineConfig, SchedulerConfig
from penstock.engine.protocol.messages import Start, TokenizedInput
from penstock.engine.protocol.model_info import ModelInfo, ModelKind, TokenizerSpec
from penstock.engine.protocol.params import DEFAULT_OPTIONS, PoolingParams
from penstock.engine.protocol.tasks import PoolingTask, PoolingType
from penstock.engine.scheduling import Allocation, InputSequence, PrefillChunk, Scheduler, SequencePool

LOADS: Final = {"single texts": 1, "32 texts": 32}
WIDTH: Final = 384
_AS_ENGINE: Final = "engine-process"
_STAGES: Final = ("receive", "schedule", "pack", "deliver")
_FRONTEND_STAGES: Final = ("submit", "answer")

Row = dict[str, Any]


class PackingRunner(Runner):
    """A Runner that reads its inputs as a model would, and knows no model.

    Args:
        forward_s: Seconds that a forward sleeps.
    """

    has_capacity = True

    def __init__(self, forward_s: float) -> None:
        self.info = ModelInfo(
            name="packs",
            path="packs",
            architecture="Packs",
            model_type="packs",
            packed=True,
            kind=ModelKind.EMBEDDING,
            tasks=(PoolingTask.EMBED,),
            hidden_size=WIDTH,
            vocab_size=30_000,
            max_model_len=512,
            embedding_size=WIDTH,
            sequence_pooling=(PoolingType.MEAN,),
        )
        self.tokenizer = TokenizerSpec(json="{}", truncation_side="right", uses_token_types=False)
        self.sequence_pool = SequencePool()
        self._forward_s = forward_s
        self._times: list[ForwardTime] = []

    def warm_up(self) -> None:
        """See Runner."""

    def begin(self, chunks: Sequence[PrefillChunk]) -> CompletedForward:
        """See Runner."""
        batch = PackedArrays.build([chunk.sequence.tokens for chunk in chunks])
        time.sleep(self._forward_s)
        self._times.append(ForwardTime(0, batch.num_tokens, self._forward_s))
        values = np.full((len(chunks), WIDTH), WIDTH**-0.5, np.float32)
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
        times, self._times = self._times, []
        return times


def main() -> None:
    """Parses the arguments, measures, prints the tables and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, with its package installed in its .venv")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=30_000, help="of each load in each round")
    parser.add_argument("--queue", type=int, default=10_000, help="sequences under way")
    parser.add_argument("--forward-ms", type=float, default=40.0, help="so long that the queue stays deep")
    parser.add_argument("--once", action="store_true", help="print the figures of one round as JSON, and nothing else")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.once:
        print(json.dumps({name: measure(size, args) for name, size in LOADS.items()}))
        return
    sides = {"this": sys.executable} | ({} if args.against is None else {"before": f"{args.against}/.venv/bin/python"})
    flags = ("--sequences", f"{args.sequences}", "--queue", f"{args.queue}", "--forward-ms", f"{args.forward_ms}")
    rounds: dict[str, list[Row]] = {side: [] for side in sides}
    for _ in range(args.rounds):
        for side, python in sides.items():
            command = (python, str(Path(__file__).resolve()), "--once", *flags)
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            rounds[side].append(json.loads(output))
    settings = {"sequences": args.sequences, "queue": args.queue, "forward_ms": args.forward_ms, "rounds": args.rounds}
    report: Row = {"machine": machine(), "settings": settings, "loads": {}}
    for load in LOADS:
        report["loads"][load] = {side: best([each[load] for each in own]) for side, own in rounds.items()}
        show(load, report["loads"][load])
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


def best(rounds: Sequence[Row]) -> Row:
    """Returns the minimum of each value over several rounds, because other processes can only increase it."""
    found = {key: min(each[key] for each in rounds) for key in rounds[0]}
    found["sequences_per_s"] = round(1e6 / found["engine_us"])
    found["sequences_per_s_of_rounds"] = [round(1e6 / each["engine_us"]) for each in rounds]
    found["median_sequences_per_s"] = round(statistics.median(found["sequences_per_s_of_rounds"]))
    return found


def show(load: str, sides: dict[str, Row]) -> None:
    """Prints the figures of one load, a line for each side."""
    print(f"\n{load}: microseconds of processor time a sequence, least of the rounds")
    for side, row in sides.items():
        stages = "  ".join(f"{key.removesuffix('_us')} {value:.2f}" for key, value in row.items() if key[-3:] == "_us")
        print(f"   {side:8} {row['sequences_per_s']:7,} sequences/s of the engine's process: {stages}", flush=True)


def measure(size: int, args: argparse.Namespace) -> Row:
    """Returns the microseconds a sequence of one load: requests of `size` texts."""
    with tempfile.NamedTemporaryFile() as figures:
        meter = Meter.create(Path(figures.name), _STAGES)
        engine_process.subprocess.Popen = as_engine(figures.name, args.forward_ms / 1000)
        return asyncio.run(_measure(size, args, meter))


async def _measure(size: int, args: argparse.Namespace, meter: Meter) -> Row:
    own = Meter(np.zeros(1 + len(_FRONTEND_STAGES)), _FRONTEND_STAGES)
    own.watch(Replica, "_flush", "submit")
    own.watch(Replica, "receive", "answer")
    limits = SchedulerConfig(max_num_batched_tokens=16_384)
    config = EngineConfig(model="packs", device="cpu", hang_timeout_s=0, scheduler=limits)
    dispatcher = Dispatcher(limits.max_queued_tokens)
    replica = dispatcher.replicas[0]
    supervisor = CoreSupervisor(Start(config, "WARNING"), replica, lambda: None)
    await supervisor.start()
    rng = random.Random(size)
    ids = np.arange(128, dtype=np.int32)
    inputs = [[TokenizedInput(ids[: rng.randint(8, 128)]) for _ in range(size)] for _ in range(997)]
    params = PoolingParams(task=PoolingTask.EMBED)
    num_done, num_begun, is_over = 0, 0, asyncio.Event()
    num_warm, num_all = args.queue, args.queue + args.sequences
    start: dict[str, float] = {}
    end: dict[str, float] = {}

    async def client() -> None:
        nonlocal num_done, num_begun
        while not is_over.is_set():
            num_begun += 1
            outputs = await replica.run(inputs[num_begun % len(inputs)], params, DEFAULT_OPTIONS, None)
            assert len(outputs) == size
            num_done += size
            if not start and num_done >= num_warm:
                start.update(done=num_done, **meter.read(), **own.read(), cpu=time.process_time())
            if not end and num_done >= num_all:
                end.update(done=num_done, **meter.read(), **own.read(), cpu=time.process_time())
                is_over.set()

    clients = [asyncio.create_task(client()) for _ in range(args.queue // size)]
    await is_over.wait()
    for each in clients:
        each.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    await supervisor.close()
    own.unwatch()
    spent = {key: 1e6 * (end[key] - start[key]) / (end["done"] - start["done"]) for key in start if key != "done"}
    names = {"process": "engine_us", "cpu": "frontend_us"}
    return {names.get(key, f"{key}_us"): round(value, 3) for key, value in spent.items()}


class Meter:
    """Sums processor time in memory that two processes may share.

    Args:
        sums: Seconds: of the whole process, then of each stage.
        stages: Their names.
    """

    def __init__(self, sums: np.ndarray[Any, Any], stages: Sequence[str]) -> None:
        self._sums = sums
        self._stages = stages
        self._watched: list[tuple[Any, str, Any]] = []

    @classmethod
    def create(cls, path: Path, stages: Sequence[str]) -> Meter:
        """Creates a timer with its sums in a file. Another process opens the file with `open`."""
        np.zeros(1 + len(stages)).tofile(path)
        return cls.open(path, stages)

    @classmethod
    def open(cls, path: Path, stages: Sequence[str]) -> Meter:
        """Opens a timer with its sums in an existing file."""
        return cls(np.memmap(path, np.float64, "r+"), stages)

    def watch(self, owner: Any, method: str, stage: str) -> None:
        """Counts the CPU time of a method in its thread, and the CPU time of the process when the method ends."""
        place = 1 + self._stages.index(stage)
        called: Callable[..., Any] = getattr(owner, method)

        def counted(*args: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return called(*args, **named)
            finally:
                self._sums[place] += time.thread_time() - began
                self._sums[0] = time.process_time()

        self._watched.append((owner, method, owner.__dict__[method]))
        setattr(owner, method, counted)

    def unwatch(self) -> None:
        """Gives the methods back."""
        for owner, method, was in self._watched:
            setattr(owner, method, was)

    def read(self) -> dict[str, float]:
        """Returns the seconds so far of each stage, and of the process if it is a separate one."""
        whole = {"process": float(self._sums[0])} if isinstance(self._sums, np.memmap) else {}
        return whole | dict(zip(self._stages, map(float, self._sums[1:]), strict=True))


def as_engine(figures: str, forward_s: float) -> type[subprocess.Popen[bytes]]:
    """Returns a Popen that starts this script in place of the engine's process."""

    class _Popen(subprocess.Popen[bytes]):
        def __init__(self, arguments: Sequence[str], **named: Any) -> None:
            if core_process.__name__ in arguments:
                script = str(Path(__file__).resolve())
                arguments = (sys.executable, script, _AS_ENGINE, figures, str(forward_s), *arguments[-2:])
            super().__init__(arguments, **named)

    return _Popen


def serve() -> None:
    """Runs as the engine's process."""
    figures, forward_s = sys.argv[2:4]
    del sys.argv[1:4]
    meter = Meter.open(Path(figures), _STAGES)
    meter.watch(EngineCore, "receive", "receive")
    meter.watch(Scheduler, "schedule", "schedule")
    meter.watch(EngineCore, "_deliver", "deliver")
    meter.watch(PackedArrays, "build", "pack")
    core_process.load_runner = lambda config: PackingRunner(float(forward_s))
    core_process.main()


if __name__ == "__main__":
    serve() if sys.argv[1:2] == [_AS_ENGINE] else main()
