"""Progress of `penstock embed`: finished rows and the remaining time, weighted by text length."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Final

from tqdm import tqdm

from penstock.engine import ModelInfo

logger = logging.getLogger(__name__)

_CHARS_PER_TOKEN: Final = 4
_ROW_CHARS: Final = 4
"""Weight of a row in addition to its text, for its special tokens."""
_FORM: Final = "{desc} {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}]"
LOG_EVERY_S: Final = 30.0
"""Seconds between two log lines."""


class Progress:
    """A progress bar on a terminal, or a log line every 30 seconds. A context manager.

    The weight of a row is its number of characters, up to the model's maximum. Token counts are not known yet.

    Args:
        lengths: Number of characters to number of rows.
        info: The model, whose maximum length limits the weight of a row.
        is_terminal: Whether to draw a bar. None: draw it if stderr is a terminal.
    """

    def __init__(self, lengths: Mapping[int, int], info: ModelInfo, *, is_terminal: bool | None = None) -> None:
        is_cut = info.auto_truncate and not info.enable_chunked_processing
        self._most_chars = info.max_model_len * _CHARS_PER_TOKEN if is_cut else None
        self._num_rows = sum(lengths.values())
        self._num_done = 0
        self._total = sum(number * self._weight(length) for length, number in lengths.items())
        self._earlier = self._done = 0
        self._began_s = self._logged_s = time.monotonic()
        is_off = not (sys.stderr.isatty() if is_terminal is None else is_terminal)
        # Updated after every request (miniters), but at most ten times per second.
        self._bar: Any = None if is_off else tqdm(total=self._total, bar_format=_FORM, dynamic_ncols=True, miniters=0)
        self._draw(0)

    def __enter__(self) -> Progress:
        """See the class."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Draws the final state."""
        if self._bar is not None:
            self._bar.set_description_str(self._rows(), refresh=False)
            self._bar.close()

    def skip(self, texts: Iterable[str]) -> None:
        """Counts rows of an earlier run. They do not count for the speed of this run."""
        weights = [self._weight(len(text)) for text in texts]
        self._earlier += sum(weights)
        self._done += sum(weights)
        self._num_done += len(weights)
        if self._bar is not None:
            self._bar.initial += sum(weights)
            self._bar.n += sum(weights)

    def update(self, texts: Iterable[str]) -> None:
        """Counts finished rows and updates the display."""
        weights = [self._weight(len(text)) for text in texts]
        self._num_done += len(weights)
        self._done += sum(weights)
        self._draw(sum(weights))

    def _draw(self, weight: int) -> None:
        if self._bar is not None:
            self._bar.set_description_str(self._rows(), refresh=not weight)
            self._bar.update(weight)
        elif (now_s := time.monotonic()) - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            left = (now_s - self._began_s) * (self._total - self._done) / max(self._done - self._earlier, 1)
            percentage = 100 * self._done // self._total
            logger.info("%s, %d%%, about %s left", self._rows(), percentage, tqdm.format_interval(left))

    def _weight(self, num_chars: int) -> int:
        return _ROW_CHARS + (num_chars if self._most_chars is None else min(num_chars, self._most_chars))

    def _rows(self) -> str:
        return f"{self._num_done}/{self._num_rows} rows"
