"""The input of a job: rows with a text or an image, in bounded memory and in shards.

Each format has a reader that inherits from InputFile; see input_formats.py and parquet_file.py.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from penstock.engine.images.values import ImageValueError, read_image_value
from penstock.engine.protocol.errors import InvalidRequestError
from penstock.engine.protocol.images import ImageInput

from ..settings import CommandError, UsageError
from .job_folder import COLUMN, Shard

SHARD_ROWS: Final = 2048
SHARD_CHARS: Final = 200_000
"""Maximum size of a shard: about ten seconds on a CPU. After an interruption, unfinished shards are computed again."""
IMAGE_CHARS: Final = 800
"""Work for an image, as characters of text: about 200 tokens."""
_BYTES_PER_CHAR: Final = 320
"""Bytes of a large image that count as a character: a shard has at most 64 MiB of images, unless one has more."""
KINDS: Final[Mapping[type, str]] = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}
"""Types of JSON values, for messages."""


class Row(NamedTuple):
    """One row of the input.

    Attributes:
        line: Line number in the file, or row number in Parquet, from 1.
        content: The text to embed; or an image: the bytes or the path of its file.
        size: Characters of the text, or the work for the image in characters.
        record: Its fields. Parquet rows have fields only in `full_rows`.
        raw: Its JSONL line.
        file: Name, size and time of the file of the image; "" for other contents.
    """

    line: int
    content: str | bytes | Path
    size: int
    record: dict[str, Any]
    raw: str = ""
    file: str = ""

    def read(self) -> str | ImageInput:
        """Returns the text or the image. Raises InvalidRequestError if the file of the image cannot be read."""
        match self.content:
            case str():
                return self.content
            case bytes():
                return ImageInput(self.content, "the image")
        try:
            return ImageInput(self.content.read_bytes(), str(self.content))
        except OSError as error:
            raise InvalidRequestError(f"{self.content} cannot be read: {error.strerror}.") from error


class BadRow(NamedTuple):
    """A row that cannot be read.

    Attributes:
        line: Line number in the file, or row number in Parquet, from 1.
    """

    line: int
    reason: str


class InputSummary(NamedTuple):
    """The rows of an input.

    Attributes:
        sizes: Row.size to number of good rows.
        shards: All rows, including bad rows.
        files: Digest of the names, sizes and times of all image files; "" without any.
    """

    sizes: Counter[int]
    shards: list[Shard]
    files: str

    @property
    def num_rows(self) -> int:
        """Number of all rows, including bad rows."""
        return sum(shard.num_rows for shard in self.shards)


class BadRowError(CommandError):
    """A row cannot be read or embedded. The message names the file and the line."""


class InputFile(ABC):
    """A file of texts or images.

    Args:
        field: Name of the field with the text or the image, if rows have fields.
        has_images: Whether the field has images.
    """

    unit = "line"
    part = "field"

    def __init__(self, path: Path, field: str, *, has_images: bool = False) -> None:
        self.path = path
        self.field = field
        self.has_images = has_images
        self.image_folder = path.parent

    def row(self, line: int, value: object, record: dict[str, Any], raw: str = "") -> Row | BadRow:
        """Returns the row with a value of the field."""
        if not self.has_images:
            if not isinstance(value, str):
                kind = KINDS.get(type(value), f"a value of type {type(value).__name__}")
                reason = "has no text" if value is None else f"has {kind}, not a text"
                return BadRow(line, f"the {self.part} {self.field!r} {reason}")
            return Row(line, value, len(value), record, raw)
        try:
            image = read_image_value(value, self.image_folder)
        except ImageValueError as error:
            return BadRow(line, f"the {self.part} {self.field!r} {error}")
        num_bytes = len(image) if isinstance(image, bytes) else 0
        file = ""
        if isinstance(image, Path):
            try:
                status = image.stat()
            except OSError as error:
                reason = f"has {image.name!r}, which cannot be read: {error.strerror}"
                return BadRow(line, f"the {self.part} {self.field!r} {reason}")
            num_bytes = status.st_size
            file = _identity(image, status)
        return Row(line, image, max(IMAGE_CHARS, num_bytes // _BYTES_PER_CHAR), record, raw, file)

    @abstractmethod
    def rows(self) -> Iterator[Row | BadRow]:
        """Yields all rows in order, including bad rows. Raises BadRowError if the rest of the file cannot be read."""

    def full_rows(self) -> Iterator[Row | BadRow]:
        """Yields all rows with all fields."""
        return self.rows()

    def names(self) -> list[str]:
        """Returns the names of the columns. Raises UsageError or BadRowError if the file declares unusable ones."""
        return [self.field]

    def check_no_vectors(self) -> None:
        """Raises UsageError if a column is named `embedding`, like the column of the output."""
        if COLUMN in self.names():
            raise UsageError(f"{self.path} has a column {COLUMN!r}, the name of the output column; rename it")

    def json_object(self, row: Row) -> bytes:
        """Returns a row of `full_rows` as a JSON object. Raises TypeError if a value cannot be written as JSON."""
        return orjson.dumps(row.record, default=value_to_text)

    def summarize(self, visit: Callable[[Row], None], *, skip_bad: bool) -> InputSummary:
        """Reads every row once, to find bad rows before any row is embedded.

        Args:
            visit: Called with every good row.
            skip_bad: Count bad rows instead of raising an error.

        Raises:
            BadRowError: A row is bad, or `visit` raises the error.
        """
        sizes = Counter[int]()
        starts = [0]
        num_chars = 0
        number = -1
        files: list[str] = []
        for number, row in enumerate(self.rows()):
            num_new = 0
            if isinstance(row, Row):
                visit(row)
                num_new = row.size
                sizes[num_new] += 1
                if row.file:
                    files.append(row.file)
            elif not skip_bad:
                raise self.skippable_row_error(row.line, row.reason)
            num_rows = number - starts[-1]
            if num_rows and (num_rows == SHARD_ROWS or num_chars + num_new > SHARD_CHARS):
                starts.append(number)
                num_chars = 0
            num_chars += num_new
        ends = [*starts[1:], number + 1]
        path = str(self.path)
        shards = [Shard(i, path, start, end - start) for i, (start, end) in enumerate(zip(starts, ends, strict=True))]
        return InputSummary(sizes, shards, hashlib.sha256("".join(files).encode()).hexdigest() if files else "")

    def read_shards(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, list[Row | BadRow]]]:
        """Yields all shards of the file in order, each with its rows. Raises BadRowError if rows are missing."""
        rows = self.rows()
        for shard in shards:
            found = list(itertools.islice(rows, shard.num_rows))
            if len(found) < shard.num_rows:
                raise BadRowError(f"{self.path} was changed while it was read; start over")
            yield shard, found

    def digest(self) -> str:
        """Returns the SHA-256 of the file."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def row_error(self, line: int, reason: str) -> BadRowError:
        """Returns an error that names the file and the line of a row."""
        return BadRowError(f"{self.path}, {self.unit} {line}: {reason}")

    def skippable_row_error(self, line: int, reason: str) -> BadRowError:
        """Returns the error for a row that --on-bad-row skip would leave out."""
        return self.row_error(line, f"{reason}; correct it, or leave bad rows out with --on-bad-row skip")


def _identity(path: Path, status: os.stat_result) -> str:
    return repr((str(path), status.st_size, status.st_mtime_ns))


def value_to_text(value: object) -> str:
    """Returns a value without a JSON type as text: bytes as base64, others with `str`."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def stat_digest(inputs: Iterable[InputFile]) -> str:
    """Returns a digest of names, sizes and modification times, to avoid reading large files."""
    return hashlib.sha256("".join(_identity(rows.path, rows.path.stat()) for rows in inputs).encode()).hexdigest()
