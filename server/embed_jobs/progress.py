"""Shows the progress of `penstock embed`: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Final, NamedTuple

from tqdm import tqdm

from penstock.engine import ModelInfo

logger = logging.getLogger(__name__)

_CHARS_PER_TOKEN: Final = 4
_ROW_CHARS: Final = 4
"""Weight of a row in addition to its text, for its special tokens."""
_FORM: Final = "{desc} {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}]"
LOG_EVERY_S: Final = 10.0
"""Seconds between two log lines."""
_NUM_INTERVALS: Final = 6
"""Number of intervals between log lines over which the speed is measured: one minute."""


class _Sample(NamedTuple):
    """Work of this run up to a time in seconds: rows, and their weight."""

    time_s: float
    num_rows: int
    weight: int


class Progress:
    """A progress bar on a terminal, or a log line every ten seconds. A context manager.

    The weight of a row is its size in characters, up to the model's maximum. Token counts are not known yet.

    Args:
        sizes: Size of a row in characters to number of rows.
        info: The model. Its maximum length limits the weight of a row.
        is_terminal: Whether to draw a bar. None: draw it if stderr is a terminal.
    """

    def __init__(self, sizes: Mapping[int, int], info: ModelInfo, *, is_terminal: bool | None = None) -> None:
        is_cut = info.auto_truncate and not info.enable_chunked_processing
        self._max_chars = info.max_model_len * _CHARS_PER_TOKEN if is_cut else None
        self._num_rows = sum(sizes.values())
        self._num_done = self._num_earlier = 0  # rows of all runs, and of earlier runs
        self._total_weight = sum(number * self._weight(size) for size, number in sizes.items())
        self._earlier_weight = self._done_weight = 0
        self._samples = deque([_Sample(time.monotonic(), 0, 0)], maxlen=_NUM_INTERVALS)
        is_off = not (sys.stderr.isatty() if is_terminal is None else is_terminal)
        # Updated after every request (miniters), but at most ten times per second.
        options: Any = {"total": self._total_weight, "bar_format": _FORM, "dynamic_ncols": True, "miniters": 0}
        self._bar: Any = None if is_off else tqdm(**options)
        self._draw(0)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.set_description_str(self._rows())
            self._bar.close()

    def skip(self, sizes: Iterable[int]) -> None:
        """Counts rows of an earlier run, given by their sizes. They do not count for the speed of this run."""
        weights = [self._weight(size) for size in sizes]
        self._earlier_weight += sum(weights)
        self._done_weight += sum(weights)
        self._num_done += len(weights)
        self._num_earlier += len(weights)
        if self._bar is not None:
            self._bar.initial += sum(weights)
            self._bar.n += sum(weights)

    def update(self, sizes: Iterable[int]) -> None:
        """Counts finished rows, given by their sizes, and updates the display."""
        weights = [self._weight(size) for size in sizes]
        self._num_done += len(weights)
        self._done_weight += sum(weights)
        self._draw(sum(weights))

    def _draw(self, weight: int) -> None:
        if self._bar is not None:
            self._bar.set_description_str(self._rows(), refresh=not weight)
            self._bar.update(weight)
        elif (now_s := time.monotonic()) - self._samples[-1].time_s >= LOG_EVERY_S:
            self._log(now_s)

    def _log(self, now_s: float) -> None:
        """Logs the progress. Speed and remaining time are those of the last minute."""
        now = _Sample(now_s, self._num_done - self._num_earlier, self._done_weight - self._earlier_weight)
        first = self._samples[0]
        self._samples.append(now)
        seconds = max(now.time_s - first.time_s, 1e-9)
        left_s = seconds * (self._total_weight - self._done_weight) / max(now.weight - first.weight, 1)
        logger.info(
            "%s, %d%%, %.3g rows/s, about %s left",
            self._rows(),
            100 * self._done_weight // self._total_weight,
            (now.num_rows - first.num_rows) / seconds,
            tqdm.format_interval(left_s),
        )

    def _weight(self, num_chars: int) -> int:
        return _ROW_CHARS + (num_chars if self._max_chars is None else min(num_chars, self._max_chars))

    def _rows(self) -> str:
        return f"{self._num_done}/{self._num_rows} rows"
