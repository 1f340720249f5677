"""Lists the phases in their order, and runs one phase in its own process.

    python benchmarks/measure_gpu.py phase NAME --device cuda --folder FOLDER

prints a line of JSON for each row as soon as it is measured. So its results remain if it runs out of time or memory, or
loses the device.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO, TypeVar

import torch

from .clock import Clock, make_clock

Row = dict[str, Any]
T = TypeVar("T")


class Phase(NamedTuple):
    """One part of the benchmark: MODULE of this room has a function `measure` that takes a Bench and yields rows.

    Attributes:
        module: Its module.
        seconds: After so long it is ended.
        about: Description of the measurement.
    """

    module: str
    seconds: float
    about: str


PHASES: Final = {
    "ceilings": Phase("ceilings", 30, "copy bandwidth and matrix rate of the device, matrix products at real shapes"),
    "kernels": Phase("kernels", 90, "each kernel against its reference, and its share of the copy bandwidth"),
    "forwards": Phase("forwards", 110, "forwards of encoders in each variant, and where their time goes"),
    "attention": Phase("attention", 45, "attention by backend, head size and length"),
    "engine": Phase("engine", 150, "the engine from token ids: rate, idle share, host time by stage"),
    "peer": Phase("peer", 90, "sentence-transformers beside the engine, on ShareGPT's lengths"),
    "http": Phase("over_http", 80, "a server over HTTP, with one process and with several"),
}
"""595 seconds in all. The engine phase starts six engines, which takes some 20 s each by estimate."""


@dataclass(frozen=True)
class Bench:
    """Device and sizes of a phase.

    Attributes:
        device: A CUDA device, or a CPU to test the code.
        is_tiny: Small sizes and short measurements to test the code. The results are meaningless.
        folder: For models that phases make; those of an earlier phase are still there.
    """

    device: torch.device
    is_tiny: bool
    folder: Path

    @property
    def is_cuda(self) -> bool:
        """Whether there are events, graphs and a profiler of kernels."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and hidden states."""
        return torch.bfloat16

    @cached_property
    def clock(self) -> Clock:
        """The device's."""
        return make_clock(self.device)

    def pick(self, full: T, tiny: T) -> T:
        """Returns the size to measure, or the tiny size that tests the code."""
        return tiny if self.is_tiny else full

    def median_us(self, *runs: Any, seconds: float = 0.3, head_start: bool = True) -> float:
        """Returns the microseconds of one run; see Clock."""
        return self.clock.median_us(runs, self.pick(seconds, 0.01), head_start=head_start)


NEEDS_CUDA: Final = "needs CUDA"


def attempt(row: Row, measure: Callable[[], Row]) -> Row:
    """Returns the row with what `measure` finds, or with its error: the rest of the phase goes on."""
    try:
        return row | measure()
    except Exception as error:  # noqa: BLE001 - whatever a device, a compiler or a library says of one case
        print(f"{row}: {error!r}", file=sys.stderr)
        return row | {"error": f"{type(error).__name__}: {error}"[:500]}


def main(arguments: list[str]) -> None:
    """Runs one phase; the rows go to standard output, all else that is printed to standard error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=list(PHASES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args(arguments)
    if args.tiny:
        torch.set_num_threads(1)
    bench = Bench(torch.device(args.device), args.tiny, args.folder)
    module = importlib.import_module(f".{PHASES[args.name].module}", __package__)
    with _rows_alone_on_standard_output() as out, torch.inference_mode():
        for row in module.measure(bench):
            out.write(json.dumps(row) + "\n")
            out.flush()


@contextmanager
def _rows_alone_on_standard_output() -> Iterator[TextIO]:
    """Yields a file for the rows. Output of libraries and child processes goes to standard error."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as rows:
        os.dup2(2, 1)
        yield rows
