"""How far `penstock embed` is: rows that are done, and the time that the rest takes, weighed by the length of texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Final

from tqdm import tqdm

from penstock.engine import ModelInfo

_CHARS_PER_TOKEN: Final = 4
_ROW_CHARS: Final = 4
"""What a row costs beside its text: about the tokens around it."""
_FORM: Final = "{desc} {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}]"


class Progress:
    """A bar on stderr; used as a context manager.

    Tokens are known when a row has been read by the model, characters from the start: a row weighs its characters, and
    no more of them than the model reads.

    Args:
        lengths: Number of rows by the characters of their text.
        info: The model.
    """

    def __init__(self, lengths: Mapping[int, int], info: ModelInfo) -> None:
        is_cut = info.auto_truncate and not info.enable_chunked_processing
        self._most_chars = info.max_model_len * _CHARS_PER_TOKEN if is_cut else None
        self._num_rows = sum(lengths.values())
        self._num_done = 0
        total = sum(number * self._weight(length) for length, number in lengths.items())
        # Every answer is a reason to draw (miniters), ten times a second at most.
        self._bar: Any = tqdm(total=total, bar_format=_FORM, dynamic_ncols=True, miniters=0, desc=self._rows())

    def __enter__(self) -> Progress:
        """See the class."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Draws it for the last time."""
        self._bar.set_description_str(self._rows(), refresh=False)
        self._bar.close()

    def skip(self, text: str) -> None:
        """Counts a row that an earlier run has done: it tells nothing of the speed of this one."""
        self._bar.initial += self._weight(len(text))
        self._bar.n += self._weight(len(text))
        self._num_done += 1

    def update(self, texts: Iterable[str]) -> None:
        """Counts rows that are done, and draws them."""
        weights = [self._weight(len(text)) for text in texts]
        self._num_done += len(weights)
        self._bar.set_description_str(self._rows(), refresh=False)
        self._bar.update(sum(weights))

    def _weight(self, num_chars: int) -> int:
        return _ROW_CHARS + (num_chars if self._most_chars is None else min(num_chars, self._most_chars))

    def _rows(self) -> str:
        return f"{self._num_done}/{self._num_rows} rows"
