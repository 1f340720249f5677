"""Log lines for people (console) or for machines (json), alike in the server and in the engine process.

No secret and no input text is ever logged.
"""

from __future__ import annotations

import logging
import logging.config
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from select import PIPE_BUF
from typing import Any, Final, TextIO

import orjson

_MOST_WAITING: Final = 4096
"""Lines that may wait to be written. Further lines are lost and counted."""
_GATHER_S: Final = 0.01
"""Seconds to collect lines before a write: waking the thread for each line would double the cost of a line."""
_PATIENCE_S: Final = 1.0
"""Seconds to wait at exit for a reader that does not read."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the record's `fields`, and an exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line of `record`."""
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()


class BackgroundHandler(logging.Handler):
    """Writes lines in order from its own thread: a reader that has stopped reading does not block callers.

    The thread runs until the process ends: other libraries close every handler when they configure theirs, and continue
    to log.

    Args:
        stream: A file with a descriptor, such as sys.stderr.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._waiting: list[str] = []
        self._num_dropped = 0
        self._is_writing = False
        self._changed = threading.Condition()  # its lock is reentrant: signal handlers log, too
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queues the line of `record`, if there is room."""
        try:
            line = self.format(record)  # now: its arguments may change
        except Exception:  # noqa: BLE001 - whatever a caller's arguments raise
            self.handleError(record)
            return
        with self._changed:
            if len(self._waiting) == _MOST_WAITING:
                self._num_dropped += 1
                return
            self._waiting.append(line)
            if len(self._waiting) == 1:
                self._changed.notify_all()

    def flush(self) -> None:
        """Waits at most a second until all lines are written. The logging module calls it when the process ends."""
        self.wait_written()

    def wait_written(self) -> bool:
        """Waits like `flush`. Returns whether all lines are written."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._is_writing, _PATIENCE_S)

    def _write_all(self) -> None:
        """Writes queued lines until the process ends. Runs in the thread."""
        num_lost = 0
        while True:
            lines, num_dropped = self._take()
            num_lost += num_dropped + sum(number for piece, number in self._pieces(lines) if not self._write(piece))
            if num_lost and self._write(self._encoded(self._notice(num_lost))):
                num_lost = 0

    def _take(self) -> tuple[list[str], int]:
        """Waits for lines. Returns them and the number of lines dropped after them."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting)
        time.sleep(_GATHER_S)
        with self._changed:
            self._is_writing = True
            lines, num_dropped = self._waiting, self._num_dropped
            self._waiting, self._num_dropped = [], 0
            return lines, num_dropped

    def _pieces(self, lines: Sequence[str]) -> Iterator[tuple[bytes, int]]:
        """Yields pieces of lines and their number of lines. A pipe takes a piece in one write.

        So other processes cannot write between its lines. Each write also releases the interpreter's lock, and getting
        it back from a busy thread takes 5 ms.
        """
        piece, number = b"", 0
        for line in map(self._encoded, lines):
            if piece and len(piece) + len(line) > PIPE_BUF:
                yield piece, number
                piece, number = b"", 0
            piece, number = piece + line, number + 1
        yield piece, number

    def _encoded(self, line: str) -> bytes:
        return f"{line}\n".encode(self._stream.encoding, "backslashreplace")

    def _write(self, piece: bytes) -> bool:
        """Writes lines. Returns whether they could be written.

        Writes to the descriptor: a blocked write would hold the lock of the stream's buffer and block the exit of the
        process.
        """
        try:
            while piece:
                piece = piece[os.write(self._stream.fileno(), piece) :]
        except (OSError, ValueError):  # the reader has gone, the disk is full, or the stream is closed
            return False
        return True

    def _notice(self, num_lost: int) -> str:
        text = "%d log lines before this one are lost: they were not read in time, or could not be written"
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (num_lost,), None)
        return self.format(record)


def flush_logs() -> bool:
    """Waits at most a second until all logged lines are written.

    Returns:
        Whether they are. If not, stderr has no reader, and writing to it directly would block.
    """
    handlers = logging.getLogger().handlers
    return all(each.wait_written() for each in handlers if isinstance(each, BackgroundHandler))


def configure_logging(level: str, line_format: str) -> None:
    """Sends all loggers, those of libraries too, to stderr, without waiting for its reader.

    Args:
        level: Lowest level that is logged, such as "info".
        line_format: "console" or "json".
    """
    stderr: dict[str, Any] = {"class": "logging.NullHandler"}
    if sys.stderr is not None:  # Python has None for what was closed
        stderr = {"()": BackgroundHandler, "stream": sys.stderr, "formatter": line_format}
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {
                "console": {"format": "%(asctime)s %(levelname)-7s %(name)s: %(message)s", "datefmt": "%H:%M:%S"},
                "json": {"()": JsonFormatter},
            },
            "handlers": {"stderr": stderr},
            "root": {"level": level.upper(), "handlers": ["stderr"]},
            "loggers": {name: {"level": "WARNING"} for name in ("httpx", "httpcore", "urllib3", "filelock")},
        }
    )
