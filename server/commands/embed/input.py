"""The input of `penstock embed`: lines, JSONL or Parquet, read row by row in bounded memory."""

from __future__ import annotations

import base64
import codecs
import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from penstock.engine.model_files.json_files import one_line

from ...settings import CommandError, UsageError

PARQUET_ROWS_AT_ONCE: Final = 1024


class Row(NamedTuple):
    """One row of the input.

    Attributes:
        line: Its line in the file, or its row in Parquet, counted from 1.
        text: The text to embed.
        record: Its fields; those of a Parquet row only from `full_rows`.
        raw: Its line of JSONL.
    """

    line: int
    text: str
    record: dict[str, Any]
    raw: str = ""


class BadRow(NamedTuple):
    """A row that cannot be read.

    Attributes:
        line: As in Row.
        reason: Why.
    """

    line: int
    reason: str


class Survey(NamedTuple):
    """The rows of an input.

    Attributes:
        lengths: The number of good rows by the characters of their text.
        num_rows: All rows, bad ones included.
    """

    lengths: Counter[int]
    num_rows: int


class BadRowError(CommandError):
    """A row cannot be read or embedded; the message names the file and the line."""


class InputFile(ABC):
    """A file of texts.

    Args:
        path: The file.
        field: Name of the field that holds the text, where rows have fields.
    """

    unit = "line"

    def __init__(self, path: Path, field: str) -> None:
        self.path = path
        self.field = field

    @abstractmethod
    def rows(self) -> Iterator[Row | BadRow]:
        """Yields all rows in order, bad rows in their places. Raises BadRowError if the file cannot be read on."""

    def full_rows(self) -> Iterator[Row | BadRow]:
        """Yields all rows with all of their fields."""
        return self.rows()

    def json_object(self, row: Row) -> bytes:
        """Returns a row of `full_rows` as a JSON object. Raises TypeError if JSON cannot hold a value."""
        return orjson.dumps(row.record, option=orjson.OPT_NON_STR_KEYS, default=_plain)

    def check(self, visit: Callable[[Row], None], *, skip_bad: bool = False) -> Survey:
        """Reads every row once, so that a bad row is found before any work is done.

        Args:
            visit: Called with every good row.
            skip_bad: Count bad rows instead of refusing them.

        Raises:
            BadRowError: A row is bad, or `visit` refuses one.
        """
        lengths, num_rows = Counter[int](), 0
        for row in self.rows():
            num_rows += 1
            if isinstance(row, Row):
                visit(row)
                lengths[len(row.text)] += 1
            elif not skip_bad:
                raise self.refused_row(row.line, row.reason)
        return Survey(lengths, num_rows)

    def digest(self) -> str:
        """Returns the SHA-256 of the file."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def bad_row(self, line: int, reason: str) -> BadRowError:
        """Returns the error for a row."""
        return BadRowError(f"{self.path}, {self.unit} {line}: {reason}")

    def refused_row(self, line: int, reason: str) -> BadRowError:
        """Returns the error for a row that --on-bad-row skip would leave out."""
        return self.bad_row(line, f"{reason}; correct it, or leave bad rows out with --on-bad-row skip")


class TextLines(InputFile):
    """One text a line; an empty line is an empty text."""

    def rows(self) -> Iterator[Row | BadRow]:
        """See InputFile."""
        for number, line in self._lines():
            yield line if isinstance(line, BadRow) else Row(number, line, {self.field: line})

    def _lines(self) -> Iterator[tuple[int, str | BadRow]]:
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                try:
                    text: str | BadRow = line.rstrip(b"\r\n").decode("utf-8")
                except UnicodeDecodeError as error:
                    text = BadRow(number, f"not valid UTF-8 ({error.reason})")
                yield number, text


class JsonLines(TextLines):
    """One JSON object a line. A blank line is a bad row, except at the end of the file."""

    def rows(self) -> Iterator[Row | BadRow]:
        """See InputFile."""
        num_blank = 0  # directly before this line
        for number, line in self._lines():
            if isinstance(line, str) and not line.strip():
                num_blank += 1
                continue
            for blank in range(number - num_blank, number):
                yield BadRow(blank, "a blank line holds no row")
            num_blank = 0
            yield line if isinstance(line, BadRow) else self._row(number, line)

    def json_object(self, row: Row) -> bytes:
        """See InputFile. These are the bytes of the line: no value changes, however large or precise it is."""
        return row.raw.encode()

    def _row(self, number: int, line: str) -> Row | BadRow:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            return BadRow(number, f"not valid JSON ({error})")
        if not isinstance(record, dict):
            return BadRow(number, "not a JSON object")
        if self.field not in record:
            return BadRow(number, f"no field {self.field!r}; it has {', '.join(record) or 'none'}; see --field")
        text = record[self.field]
        if not isinstance(text, str):
            return BadRow(number, f"the field {self.field!r} holds no text")
        return Row(number, text, record, line.strip())


class ParquetRows(InputFile):
    """A Parquet file; needs pyarrow."""

    unit = "row"

    def rows(self) -> Iterator[Row | BadRow]:
        """See InputFile. Reads the text column only."""
        return self._read([self.field])

    def full_rows(self) -> Iterator[Row | BadRow]:
        """See InputFile."""
        return self._read(None)

    def column_names(self) -> list[str]:
        """Returns the names of all columns. Raises BadRowError as `batches` does."""
        from pyarrow import ArrowException, parquet

        try:
            return list(parquet.read_schema(self.path).names)
        except (ArrowException, OSError, ValueError) as error:
            raise self._damaged("", error) from error

    def _read(self, columns: list[str] | None) -> Iterator[Row | BadRow]:
        from pyarrow import ArrowException

        number = 0
        for batch in self.batches(columns):
            try:
                records = batch.to_pylist()
            except (ArrowException, OverflowError, ValueError) as error:
                raise self._damaged(self._near(number), error) from error
            for record in records:
                number += 1
                text = record[self.field]
                if isinstance(text, str):
                    yield Row(number, text, record)
                else:
                    yield BadRow(number, f"the column {self.field!r} holds no text")

    def batches(self, columns: list[str] | None) -> Iterator[Any]:
        """Yields pyarrow.RecordBatch. Raises BadRowError where the file is no Parquet, or a damaged one."""
        from pyarrow import ArrowException, parquet

        num_rows = 0
        try:
            with parquet.ParquetFile(self.path) as file:
                names = file.schema_arrow.names
                if self.field not in names:
                    raise BadRowError(f"{self.path}: no column {self.field!r}; it has {', '.join(names)}; see --field")
                if names.count(self.field) > 1:
                    raise BadRowError(f"{self.path}: two columns are named {self.field!r}; rename one")
                for batch in file.iter_batches(PARQUET_ROWS_AT_ONCE, columns=columns):
                    yield batch
                    num_rows += batch.num_rows
        except (ArrowException, OSError, OverflowError, ValueError) as error:
            raise self._damaged(self._near(num_rows), error) from error

    def _near(self, num_rows: int) -> str:
        return f", {self.unit} {num_rows + 1} or one soon after it" if num_rows else ""

    def _damaged(self, place: str, error: Exception) -> BadRowError:
        return BadRowError(
            f"{self.path}{place}: it cannot be read as Parquet ({one_line(error)}); it is damaged, "
            "holds values that Python has no type for, or is another kind of file: write it again"
        )


def _plain(value: object) -> str:
    """Returns a value that JSON has no type for as text: bytes as base64, all else as Python shows it."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def open_input(path: Path, field: str) -> InputFile:
    """Returns the input for a file, by its suffix.

    Raises:
        UsageError: No such file, an unknown suffix, or pyarrow is missing.
    """
    if not path.is_file():
        raise UsageError(f"FILE: there is no file {path}")
    match path.suffix.lower():
        case ".txt":
            return TextLines(path, field)
        case ".jsonl" | ".ndjson":
            return JsonLines(path, field)
        case ".parquet":
            require_pyarrow("FILE")
            return ParquetRows(path, field)
    raise UsageError(f"FILE: {path.name} must end in .txt, .jsonl or .parquet")


def require_pyarrow(flag: str) -> None:
    """Raises UsageError that says how to install pyarrow where it is missing."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{flag}: Parquet needs pyarrow: run `pip install penstock[parquet]`") from error
