"""Input files of batches. Lines are checked before the batch runs, and read again one by one when they run."""

from __future__ import annotations

import codecs
import contextlib
import itertools
import time
from collections.abc import Container, Generator, Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import orjson

from ..errors import quote
from ..http.json_reader import count_values
from .records import LineError

MAX_LINES: Final = 50_000
MAX_INPUTS: Final = 50_000
"""Maximum number of texts to embed in all lines together."""
MAX_ERRORS: Final = 100
"""Maximum number of reported errors per file."""
MAX_ID_CHARS: Final = 512
_INPUT_KEYS: Final = ("input", "inputs", "texts")
_SMALL_BYTES: Final = 64 * 1024
"""Bytes. Values are counted before parsing only in longer lines. Also the size of one read."""
_SPANS_PER_READ: Final = 100
"""Number of line spans per read."""
_WORK_S: Final = 0.001
"""Seconds of reading after which the thread sleeps for the same time, so that other threads get the GIL."""


class LineSpan(NamedTuple):
    """Position of a line in its file.

    Attributes:
        number: Line number, from 1.
        offset: Offset of the first byte.
        num_bytes: Length, line end included.
    """

    number: int
    offset: int
    num_bytes: int


class CheckResult(NamedTuple):
    """Result of checking an input file.

    Attributes:
        num_lines: Requests in the file.
        errors: Errors; empty if the batch can run.
    """

    num_lines: int
    errors: list[LineError]


class BatchInput:
    """An input file of a batch.

    Args:
        endpoint: The route that all lines must name.
        max_line_bytes: Maximum length of a line; equals the limit of request bodies.
        max_values: Maximum number of JSON values in a line; see --max-json-values.
        counts_inputs: Whether MAX_INPUTS limits the inputs of all lines together.
    """

    def __init__(self, path: Path, endpoint: str, max_line_bytes: int, max_values: int, *, counts_inputs: bool) -> None:
        self._path = path
        self._endpoint = endpoint
        self._max_line_bytes = max_line_bytes
        self._max_values = max_values
        self._counts_inputs = counts_inputs

    def check(self) -> CheckResult:
        """Checks all lines. Blocks, so call it in a thread. Yields to other threads. Raises OSError."""
        seen: dict[str, int] = {}
        errors: list[LineError] = []
        num_lines = num_inputs = 0
        with self._path.open("rb") as file:
            for span in self._spans():
                num_lines += 1
                if num_lines > MAX_LINES:
                    message = f"The file has more than {MAX_LINES} lines; split it."
                    return CheckResult(0, [LineError("too_many_lines", message, line=span.number)])
                try:
                    line = self._parsed(self._text(span, file))
                    custom_id = line["custom_id"]
                    try:
                        orjson.dumps(line["body"])  # as `read` does; orjson's parser allows deeper nesting
                    except TypeError:
                        raise _LineError("invalid_body", "body nests values too deeply.", "body") from None
                    if (first := seen.setdefault(custom_id, span.number)) != span.number:
                        message = f"custom_id is {quote(custom_id)}, as in line {first}; each line needs its own."
                        raise _LineError("duplicate_custom_id", message, "custom_id")
                    if self._counts_inputs:
                        num_inputs += _num_inputs(line["body"])
                    del line  # free the line before the next one is read
                except _LineError as error:
                    errors.append(LineError(error.code, error.message, error.param, span.number))
                if len(errors) >= MAX_ERRORS:
                    break
        if not num_lines:
            errors.append(LineError("empty_file", "The file has no lines."))
        if num_inputs > MAX_INPUTS:
            message = f"The lines hold {num_inputs} inputs together; the limit is {MAX_INPUTS}. Split the file."
            errors.append(LineError("too_many_inputs", message))
        return CheckResult(num_lines, errors)

    def next_spans(self, done: Container[int], after: LineSpan | None = None) -> list[LineSpan]:
        """Returns the spans of the next lines after `after` that are not in `done`, at most 100. Raises OSError."""
        with contextlib.closing(self._spans(after)) as spans:
            return list(itertools.islice((span for span in spans if span.number not in done), _SPANS_PER_READ))

    def read(self, span: LineSpan) -> tuple[str, bytes]:
        """Returns the custom id of a line of a checked file, and the JSON body for the route. Raises OSError."""
        with self._path.open("rb") as file:
            line = self._parsed(self._text(span, file))
        return line["custom_id"], orjson.dumps(line["body"])

    def custom_ids(self, spans: Iterable[LineSpan]) -> list[tuple[int, str]]:
        """Returns numbers and custom ids of lines. One line at a time is in memory. Raises OSError."""
        with self._path.open("rb") as file:
            return [(span.number, self._parsed(self._text(span, file))["custom_id"]) for span in spans]

    def _text(self, span: LineSpan, file: BinaryIO) -> bytes:
        """Returns a line without surrounding white space, or the first bytes of a line that is too long."""
        file.seek(span.offset)
        text = file.read(min(span.num_bytes, self._max_line_bytes + 1))
        num_left = span.num_bytes - len(text)
        while num_left > 0 and (piece := file.read(min(num_left, _SMALL_BYTES))):
            if piece.strip():
                return text
            num_left -= len(piece)
        return _stripped(span.number, text)

    def _spans(self, after: LineSpan | None = None) -> Generator[LineSpan]:
        """Yields the spans of the lines that are not empty. Reads a small part of the file at a time."""
        with self._path.open("rb") as file:
            number, offset = (0, 0) if after is None else (after.number, after.offset + after.num_bytes)
            file.seek(offset)
            next_pause_s = time.monotonic() + _WORK_S
            while piece := file.readline(_SMALL_BYTES):
                if time.monotonic() > next_pause_s:
                    time.sleep(_WORK_S)
                    next_pause_s = time.monotonic() + _WORK_S
                number += 1
                num_bytes = len(piece)
                is_empty = not _stripped(number, piece)
                while not piece.endswith(b"\n") and (piece := file.readline(_SMALL_BYTES)):
                    num_bytes += len(piece)
                    is_empty = is_empty and not piece.strip()
                if not is_empty:
                    yield LineSpan(number, offset, num_bytes)
                offset += num_bytes

    def _parsed(self, text: bytes) -> dict[str, Any]:
        """Parses a line. Raises _LineError if it is not a request for the endpoint."""
        if len(text) > self._max_line_bytes:
            raise _LineError("line_too_long", f"The line is longer than {self._max_line_bytes} bytes.")
        if len(text) > _SMALL_BYTES and any(count > self._max_values for count in count_values(text)):
            message = f"The line holds more than {self._max_values} values; send fewer inputs at once."
            raise _LineError("line_too_long", message)
        try:
            line = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise _LineError("invalid_json_line", f"The line is not valid JSON: {error}.") from None
        if not isinstance(line, dict):
            raise _LineError("invalid_json_line", f"The line is {quote(line)}; it must be an object.")
        custom_id, body = line.get("custom_id"), line.get("body")
        for name in ("custom_id", "method", "url", "body"):
            if line.get(name) is None:
                raise _LineError("missing_required_parameter", f"{name} is missing.", name)
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
            message = f"custom_id is {quote(custom_id)}; it must be a text of 1 to {MAX_ID_CHARS} characters."
            raise _LineError("invalid_custom_id", message, "custom_id")
        if line["method"] != "POST":
            raise _LineError("invalid_method", f"method is {quote(line['method'])}; it must be 'POST'.", "method")
        if line["url"] != self._endpoint:
            message = f"url is {quote(line['url'])}; the batch's endpoint is {self._endpoint!r}."
            raise _LineError("mismatched_url", message, "url")
        if not isinstance(body, dict):
            raise _LineError("invalid_body", f"body is {quote(body)}; it must be an object.", "body")
        return line


class _LineError(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def _stripped(number: int, text: bytes) -> bytes:
    """Returns a line without surrounding white space; the first line without its byte order mark."""
    return (text.removeprefix(codecs.BOM_UTF8) if number == 1 else text).strip()


def _num_inputs(body: dict[str, Any]) -> int:
    """Returns the number of texts in a line. A list of numbers is one text."""
    for key in _INPUT_KEYS:
        if isinstance(inputs := body.get(key), list):
            return 1 if inputs and isinstance(inputs[0], int | float) else len(inputs)
    return 1
