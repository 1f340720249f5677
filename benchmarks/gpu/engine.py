"""The engine from token ids: its rate in a process of its own, and the times of host and device.

The rate is that of a server without HTTP and without a tokenizer. Idle share and stages are those of a second run, in
which the core is a thread of this process, so that the profiler sees its kernels. The rate of that run is not reported.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.core.core import EngineCore
from penstock.engine.core.model_runner import ModelRunner
from penstock.engine.daemon_threads import EventLoopThread
from penstock.engine.executors.torch.packed_batch import PackedBatch
from penstock.engine.pooling import ModelPooler
from penstock.engine.protocol.config import EngineConfig, SchedulerConfig
from penstock.engine.protocol.params import PoolingParams, Text
from penstock.engine.scheduling import Scheduler

from .made_models import model_folder
from .phases import NEEDS_CUDA, Bench, Row, attempt
from .shapes import SHAPES, TINY_SHAPES, USUAL_LENGTH, VOCABULARY_SIZE, Shape, sharegpt_lengths

STAGES: Final = {
    "receive": (EngineCore, "receive"),
    "schedule": (Scheduler, "schedule"),
    "pack": (PackedBatch, "build"),
    "pool": (ModelPooler, "pool"),
    "begin": (ModelRunner, "begin"),
    "deliver": (EngineCore, "_deliver"),
}
"""Parts of the core's loop; `begin` holds `pack`, the forward and `pool`."""

_TEXTS_OF_A_REQUEST: Final = 64
_REQUESTS_AT_ONCE: Final = 96
"""About six thousand texts wait: batches are as full as the budget allows."""


class Rate(NamedTuple):
    """Finished requests of a period."""

    seconds: float
    num_texts: int
    num_tokens: int


def measure(bench: Bench) -> Iterator[Row]:
    """Yields the rate of each shape with texts of one length and of ShareGPT's, then idle share and stages."""
    shapes = bench.pick(SHAPES, TINY_SHAPES)
    for shape in shapes:
        with started(config_of(shape, bench)) as engine:
            for mix, lengths in mixes(shape, bench).items():
                row = {"name": "rate", "shape": shape.name, "lengths": mix}
                yield attempt(row, partial(rate, engine, shape, lengths, bench))
    for shape in shapes:
        with stage_times() as stages, started(config_of(shape, bench, in_process=True)) as engine:
            for mix, lengths in mixes(shape, bench).items():
                row = {"name": "observed", "shape": shape.name, "lengths": mix}
                yield attempt(row, partial(observe, engine, stages, lengths, bench))


def mixes(shape: Shape, bench: Bench) -> dict[str, list[int]]:
    """Returns the lengths of texts by the name of their mix."""
    usual = min(USUAL_LENGTH.get(shape.name, shape.max_tokens), shape.max_tokens)
    return {f"equal {usual}": [usual] * bench.pick(2048, 64), "sharegpt": sharegpt(shape, bench)}


def sharegpt(shape: Shape, bench: Bench) -> list[int]:
    """Lengths of texts, as people's turns have them."""
    return sharegpt_lengths(bench.pick(2048, 64), shape.max_tokens)


def rate(engine: Engine, shape: Shape, lengths: list[int], bench: Bench) -> Row:
    """Returns the rate for texts with `lengths`."""
    return rate_row(shape, lengths, engine.ask(token_ids(lengths), bench.pick(3.0, 0.1), bench))


def rate_row(shape: Shape, lengths: list[int], rate: Rate) -> Row:
    """Returns the metrics of a rate, for texts with a length distribution like `lengths`."""
    per_token = shape.operations(lengths) / sum(lengths)
    return {
        "texts_per_s": rate.num_texts / rate.seconds,
        "tokens_per_s": rate.num_tokens / rate.seconds,
        "tflop_per_s": rate.num_tokens / rate.seconds * per_token / 1e12,
    }


def observe(engine: Engine, stages: dict[str, Stage], lengths: list[int], bench: Bench) -> Row:
    """Returns the host's time by stage and the share of the time in which the device is idle."""
    texts = token_ids(lengths)
    engine.ask(texts, bench.pick(1.5, 0.1), bench, on_start=stages.clear)
    num_batches = max(stages["deliver"].calls, 1)
    row: Row = {
        "batches": num_batches,
        "stages_us_a_batch": {name: 1e6 * stages[name].seconds / num_batches for name in STAGES},
    }
    if not bench.is_cuda:
        return row | {"skipped": f"idle share {NEEDS_CUDA}"}
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    engine.ask(texts, 0.7, bench, on_start=profiler.start, on_end=profiler.stop)
    return row | {"idle_share": idle_share(kernel_times(profiler))}


class Engine:
    """An engine that runs, for callers without asyncio.

    Args:
        config: Configuration of the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._loop = EventLoopThread()
        try:
            self._engine = self._loop.run(AsyncEngine.start(config))
        except BaseException:
            self._loop.stop()
            raise

    def ask(
        self,
        texts: Sequence[Text],
        seconds: float,
        bench: Bench,
        *,
        on_start: Callable[[], object] = lambda: None,
        on_end: Callable[[], object] = lambda: None,
    ) -> Rate:
        """Embeds the texts repeatedly with many concurrent requests. Counts finished requests after a warm-up."""
        requests = [list(texts[i : i + _TEXTS_OF_A_REQUEST]) for i in range(0, len(texts), _TEXTS_OF_A_REQUEST)]
        num_clients = bench.pick(_REQUESTS_AT_ONCE, 2)
        return self._loop.run(self._ask(requests, num_clients, seconds, bench.pick(1.5, 0.1), on_start, on_end))

    def stop(self) -> None:
        """Ends it."""
        self._loop.run(self._engine.close())
        self._loop.stop()

    async def _ask(
        self,
        requests: list[list[Text]],
        num_clients: int,
        seconds: float,
        warm_up_s: float,
        on_start: Callable[[], object],
        on_end: Callable[[], object],
    ) -> Rate:
        counts = [0, 0]
        feed = itertools.cycle(requests)

        async def client() -> None:
            while True:
                result = await self._engine.embed(next(feed), PoolingParams())
                counts[0] += len(result.num_tokens)
                counts[1] += sum(result.num_tokens)

        clients = [asyncio.create_task(client()) for _ in range(num_clients)]
        try:
            await asyncio.sleep(warm_up_s)
            on_start()
            before, began_s = tuple(counts), time.perf_counter()
            while time.perf_counter() - began_s < seconds or counts[0] == before[0]:
                done, _ = await asyncio.wait(clients, timeout=0.01, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()  # raises the exception of the task
            taken_s = time.perf_counter() - began_s
            on_end()
            return Rate(taken_s, counts[0] - before[0], counts[1] - before[1])
        finally:
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


@contextmanager
def started(config: EngineConfig) -> Iterator[Engine]:
    """Starts an engine and ends it."""
    engine = Engine(config)
    try:
        yield engine
    finally:
        engine.stop()


def config_of(shape: Shape, bench: Bench, *, in_process: bool = False) -> EngineConfig:
    """Returns the settings that a server would have; on a CPU torch runs the forward, as it does on CUDA."""
    return EngineConfig(
        model=str(model_folder(shape, bench)),
        device=bench.device.type,
        dtype="bfloat16",
        cpu_kernels="torch",
        in_process=in_process,
        num_threads=bench.pick(None, 1),
        scheduler=SchedulerConfig(max_queue_s=math.inf),
    )


def token_ids(lengths: list[int]) -> list[list[int]]:
    """Returns inputs of random ids."""
    numbers = np.random.default_rng(0)
    return [numbers.integers(5, VOCABULARY_SIZE, length).tolist() for length in lengths]


class Stage:
    """The time of one stage."""

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0


@contextmanager
def stage_times() -> Iterator[dict[str, Stage]]:
    """Measures the stages of every core of this process meanwhile: processor time of the thread that runs them."""
    stages: dict[str, Stage] = defaultdict(Stage)
    originals: list[tuple[type, str, Any]] = []

    def measured(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began_s = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                stage = stages[name]
                stage.calls += 1
                stage.seconds += time.thread_time() - began_s

        return call

    for name, (owner, method) in STAGES.items():
        originals.append((owner, method, owner.__dict__.get(method)))
        replacement: Any = measured(name, getattr(owner, method))
        # A class method is bound to its class already.
        is_bound = isinstance(originals[-1][2], classmethod)
        setattr(owner, method, staticmethod(replacement) if is_bound else replacement)
    try:
        yield stages
    finally:
        for owner, method, original in originals:
            if original is None:  # inherited
                delattr(owner, method)
            else:
                setattr(owner, method, original)


def kernel_times(profiler: torch.profiler.profile) -> list[tuple[float, float]]:
    """Returns when each kernel or copy began and ended on the device, in microseconds."""
    return [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def idle_share(times_us: Sequence[tuple[float, float]]) -> float:
    """Returns the share of idle time between the first and the last kernel."""
    if not times_us:
        raise ValueError("the profiler saw no kernel")
    busy_us, end_us = 0.0, -math.inf
    for began_us, ended_us in sorted(times_us):
        busy_us += max(0.0, ended_us - max(began_us, end_us))
        end_us = max(end_us, ended_us)
    whole_us = end_us - min(began_us for began_us, _ in times_us)
    return 1 - busy_us / whole_us if whole_us else 0.0
