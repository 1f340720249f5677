"""Log lines in the formats console and json, for the server and the engine process.

Secrets and input texts are never logged.
"""

from __future__ import annotations

import logging
import logging.config
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from select import PIPE_BUF
from typing import Any, Final, TextIO

import orjson

_MAX_WAITING: Final = 4096
"""Maximum number of lines in the queue; more lines are lost and counted."""
_WRITE_DELAY_S: Final = 0.01
"""Seconds to collect lines before a write: waking the thread for each line would double the cost of a line."""
_EXIT_WAIT_S: Final = 1.0
"""Seconds to wait at exit for the reader of the lines."""


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON: time, level, logger, message, its `fields`, and its exception if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line for `record`."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()


class BackgroundHandler(logging.Handler):
    """Writes lines in order from its own thread, so that callers do not wait for a slow reader.

    The thread runs until the process ends, because other libraries close all handlers when they configure logging, and
    then continue to log.

    Args:
        stream: A file with a descriptor, such as sys.stderr.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._waiting: list[str] = []
        self._num_dropped = 0
        self._is_writing = False
        self._changed = threading.Condition()  # its lock is reentrant, because signal handlers also log
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Adds the line for `record` to the queue, or drops it if the queue is full."""
        try:
            line = self.format(record)  # now, because its arguments may change
        except Exception:  # noqa: BLE001 - arguments of a caller may raise anything
            self.handleError(record)
            return
        with self._changed:
            if len(self._waiting) == _MAX_WAITING:
                self._num_dropped += 1
                return
            self._waiting.append(line)
            if len(self._waiting) == 1:
                self._changed.notify_all()

    def flush(self) -> None:
        """Waits at most a second until all lines are written; logging calls it when the process ends."""
        self.wait_written()

    def wait_written(self) -> bool:
        """Waits as `flush` does and returns whether all lines are written."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._is_writing, _EXIT_WAIT_S)

    def _write_all(self) -> None:
        """Writes the lines of the queue until the process ends."""
        num_lost = 0
        while True:
            lines, num_dropped = self._take()
            num_lost += num_dropped + sum(count for block, count in self._blocks(lines) if not self._write(block))
            if num_lost and self._write(self._encoded(self._notice(num_lost))):
                num_lost = 0

    def _take(self) -> tuple[list[str], int]:
        """Waits for lines; returns them and the number of lines that were dropped after them."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting)
        time.sleep(_WRITE_DELAY_S)
        with self._changed:
            self._is_writing = True
            lines, num_dropped = self._waiting, self._num_dropped
            self._waiting = []
            self._num_dropped = 0
            return lines, num_dropped

    def _blocks(self, lines: Sequence[str]) -> Iterator[tuple[bytes, int]]:
        """Yields blocks of lines, with the number of lines, that fit into one write to a pipe.

        Other processes cannot write between the lines of a block. Fewer writes are also faster: each one releases the
        lock of the interpreter, and getting it back from a busy thread takes 5 ms.
        """
        block, count = b"", 0
        for line in map(self._encoded, lines):
            if block and len(block) + len(line) > PIPE_BUF:
                yield block, count
                block, count = b"", 0
            block, count = block + line, count + 1
        yield block, count

    def _encoded(self, line: str) -> bytes:
        return f"{line}\n".encode(self._stream.encoding, "backslashreplace")

    def _write(self, block: bytes) -> bool:
        """Writes lines and returns whether that was possible.

        It writes to the descriptor, because a blocked write to the stream would keep the lock of its buffer and block
        the exit of the process.
        """
        try:
            while block:
                block = block[os.write(self._stream.fileno(), block) :]
        except (OSError, ValueError):  # the reader has ended, the disk is full, or the stream is closed
            return False
        return True

    def _notice(self, num_lost: int) -> str:
        text = "%d log lines before this one are lost: they were not read in time, or could not be written"
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (num_lost,), None)
        return self.format(record)


def flush_logs() -> bool:
    """Waits at most a second until all logged lines are written.

    Returns:
        Whether all lines are written. If not, stderr has no reader, and writing to it directly would block.
    """
    handlers = logging.getLogger().handlers
    return all(each.wait_written() for each in handlers if isinstance(each, BackgroundHandler))


def configure_logging(level: str, line_format: str) -> None:
    """Sends the lines of all loggers, including those of libraries, to stderr, without waiting for its reader."""
    stderr: dict[str, Any] = {"class": "logging.NullHandler"}
    if sys.stderr is not None:  # None if stderr was closed
        stderr = {"()": BackgroundHandler, "stream": sys.stderr, "formatter": line_format}
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {
                "console": {
                    "format": "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s",
                    "datefmt": "%Y-%m-%d %H:%M:%S",
                },
                "json": {"()": JsonFormatter},
            },
            "handlers": {"stderr": stderr},
            "root": {"level": level.upper(), "handlers": ["stderr"]},
            "loggers": {name: {"level": "WARNING"} for name in ("httpx", "httpcore", "urllib3", "filelock")},
        }
    )
