"""The input of `penstock embed`: lines, JSONL or Parquet, read row by row in bounded memory."""

from __future__ import annotations

import codecs
import hashlib
import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
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
        text: What is embedded.
        record: All of its fields.
    """

    line: int
    text: str
    record: dict[str, Any]


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
    def rows(self) -> Iterator[Row]:
        """Yields all rows. Raises BadRowError on one that holds no text."""

    def check(self) -> Counter[int]:
        """Reads every row once, so that a bad row is found before any work is done.

        Returns:
            The number of rows by the characters of their text.

        Raises:
            BadRowError: A row holds no text.
        """
        return Counter(len(row.text) for row in self.rows())

    def digest(self) -> str:
        """Returns the SHA-256 of the file."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def bad_row(self, line: int, reason: str) -> BadRowError:
        """Returns the error for a row."""
        return BadRowError(f"{self.path}, {self.unit} {line}: {reason}")


class TextLines(InputFile):
    """One text a line; an empty line is an empty text."""

    def rows(self) -> Iterator[Row]:
        """See InputFile."""
        for number, line in self._lines():
            yield Row(number, line, {self.field: line})

    def _lines(self) -> Iterator[tuple[int, str]]:
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                try:
                    yield number, line.rstrip(b"\r\n").decode("utf-8")
                except UnicodeDecodeError as error:
                    raise self.bad_row(number, f"not valid UTF-8 ({error.reason})") from error


class JsonLines(TextLines):
    """One JSON object a line; blank lines are skipped."""

    def rows(self) -> Iterator[Row]:
        """See InputFile."""
        for number, line in self._lines():
            if line.strip():
                record = self._record(number, line)
                yield Row(number, record[self.field], record)

    def _record(self, number: int, line: str) -> dict[str, Any]:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise self.bad_row(number, f"not valid JSON ({error})") from error
        if not isinstance(record, dict):
            raise self.bad_row(number, "not a JSON object")
        if self.field not in record:
            raise self.bad_row(number, f"no field {self.field!r}; it has {', '.join(record) or 'none'}; see --field")
        if not isinstance(record[self.field], str):
            raise self.bad_row(number, f"the field {self.field!r} holds no text")
        return record


class ParquetRows(InputFile):
    """A Parquet file; needs pyarrow."""

    unit = "row"

    def rows(self) -> Iterator[Row]:
        """See InputFile."""
        return self._read(None)

    def check(self) -> Counter[int]:
        """See InputFile. Reads the text column only."""
        return Counter(len(row.text) for row in self._read([self.field]))

    def _read(self, columns: list[str] | None) -> Iterator[Row]:
        number = 0
        for records in self._batches(columns):
            for record in records:
                number += 1
                text = record[self.field]
                if not isinstance(text, str):
                    raise self.bad_row(number, f"the column {self.field!r} holds no text")
                yield Row(number, text, record)

    def _batches(self, columns: list[str] | None) -> Iterator[list[dict[str, Any]]]:
        """Yields some rows at a time. Raises BadRowError where the file is no Parquet, or a damaged one."""
        from pyarrow import ArrowException, parquet

        num_rows = 0
        try:
            with parquet.ParquetFile(self.path) as file:
                names = file.schema_arrow.names
                if self.field not in names:
                    raise BadRowError(f"{self.path}: no column {self.field!r}; it has {', '.join(names)}; see --field")
                for batch in file.iter_batches(PARQUET_ROWS_AT_ONCE, columns=columns):
                    yield batch.to_pylist()
                    num_rows += batch.num_rows
        except (ArrowException, OSError, OverflowError, ValueError) as error:
            place = f", {self.unit} {num_rows + 1} or one soon after it" if num_rows else ""
            raise BadRowError(
                f"{self.path}{place}: it cannot be read as Parquet ({one_line(error)}); it is damaged, "
                "holds values that Python has no type for, or is another kind of file: write it again"
            ) from error


def blocks(rows: Iterator[Row], size: int) -> Iterator[list[Row]]:
    """Yields the rows in lists of `size`, of which the last one may be shorter."""
    while block := list(itertools.islice(rows, size)):
        yield block


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
