"""The readers of text lines, JSONL, CSV and folders of images, and the choice of a reader by the suffix of a file."""

from __future__ import annotations

import codecs
import csv
import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import orjson

from ..settings import UsageError
from .input_file import BadRow, InputFile, Row
from .job_folder import COLUMN
from .parquet_file import ParquetRows, require_pyarrow

_MAX_LINE_BYTES: Final = 1 << 26
"""Maximum bytes of a line of text or JSONL, its end included. A base64 image of 48 MiB fits."""
_MAX_VALUE_CHARS: Final = 1 << 24
"""Maximum characters of a CSV value: a missing quote must not read the rest of a large file into memory."""
FILE_FIELD: Final = "file"
"""Field of a folder's rows with the path of the image."""
SUFFIXES: Final = frozenset((".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"))
"""Suffixes of the files in a folder that are images."""


class TextLines(InputFile):
    """One text per line. An empty line is an empty text."""

    def check_no_vectors(self) -> None:
        """Raises UsageError if --field, which names the column of the texts, is `embedding`."""
        if self.field == COLUMN:
            raise UsageError(f"--field: {COLUMN!r} is the name of the output column; use another name")

    def rows(self) -> Iterator[Row | BadRow]:
        """Yields one row for each line. A line that is too long or not UTF-8 is a BadRow."""
        for number, line in self._lines():
            yield line if isinstance(line, BadRow) else self.row(number, line, {self.field: line})

    def _lines(self) -> Iterator[tuple[int, str | BadRow]]:
        with self.path.open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(_MAX_LINE_BYTES + 1)
                if not line:
                    return
                if len(line) > _MAX_LINE_BYTES:
                    while line and not line.endswith(b"\n"):
                        line = file.readline(_MAX_LINE_BYTES)
                    yield number, BadRow(number, f"longer than {_MAX_LINE_BYTES} bytes")
                    continue
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                try:
                    text: str | BadRow = line.rstrip(b"\r\n").decode("utf-8")
                except UnicodeDecodeError as error:
                    text = BadRow(number, f"not valid UTF-8 ({error.reason})")
                yield number, text


class JsonLines(TextLines):
    """One JSON object per line. A blank line is a bad row, except at the end of the file."""

    def names(self) -> list[str]:
        """Returns the keys of all rows in order of first appearance. Reads the file."""
        rows = (row for row in self.rows() if isinstance(row, Row))
        return list(dict.fromkeys(name for row in rows for name in row.record))

    def check_no_vectors(self) -> None:
        """Does nothing: each row is checked when the file is read."""

    def rows(self) -> Iterator[Row | BadRow]:
        """Yields one row for each line. A blank line is a BadRow, except at the end of the file."""
        num_blank = 0  # number of blank lines directly before this line
        for number, line in self._lines():
            if isinstance(line, str) and not line.strip():
                num_blank += 1
                continue
            for blank in range(number - num_blank, number):
                yield BadRow(blank, "a blank line is not a row")
            num_blank = 0
            yield line if isinstance(line, BadRow) else self._row(number, line)

    def json_object(self, row: Row) -> bytes:
        """Returns the bytes of the line of a row, so that large or precise numbers do not change."""
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
        return self.row(number, record[self.field], record, line.strip())


class CsvRows(InputFile):
    """A CSV file (RFC 4180) with a header: .csv with commas, .tsv with tabs. All values are texts.

    A row with more or fewer values than the header is bad, and so is a blank line, except at the end of the file.
    """

    def rows(self) -> Iterator[Row | BadRow]:
        """Yields one row for each record after the header."""
        names = self.names()
        blank_lines: list[int] = []
        for line, values in itertools.islice(self._records(), 1, None):
            if not values:
                blank_lines.append(line)
                continue
            yield from (BadRow(blank, "a blank line is not a row") for blank in blank_lines)
            blank_lines.clear()
            if len(values) != len(names):
                yield BadRow(line, f"it has {len(values)} values, but the header has {len(names)} columns")
            elif any(_has_surrogates(value) for value in values):
                yield BadRow(line, "not valid UTF-8")
            else:
                record = dict(zip(names, values, strict=True))
                yield self.row(line, record[self.field], record)

    def names(self) -> list[str]:
        """Returns the names of the columns.

        Raises:
            UsageError: The file has no header, no column `field`, or two columns with the same name.
            BadRowError: The header is not valid CSV.
        """
        _, names = next(self._records(), (1, []))
        if not names:
            raise UsageError(f"{self.path} has no header; write the names of the columns into its first line")
        if any(_has_surrogates(name) for name in names):
            raise UsageError(f"{self.path}: its header is not valid UTF-8")
        if self.field not in names:
            separator = "tabs" if self._delimiter == "\t" else "commas"
            raise UsageError(
                f"{self.path} has no column {self.field!r}; it has {', '.join(map(repr, names))}, separated by "
                f"{separator}; see --field"
            )
        if len(set(names)) < len(names):
            name = next(name for name in names if names.count(name) > 1)
            raise UsageError(f"{self.path}: two columns are named {name!r}; rename one")
        return names

    @property
    def _delimiter(self) -> str:
        return "\t" if self.path.suffix.lower() == ".tsv" else ","

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """Yields the first line and the values of each record, the header included."""
        with self.path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.reader(file, delimiter=self._delimiter, strict=True)
            while True:
                line = reader.line_num + 1
                limit = csv.field_size_limit(_MAX_VALUE_CHARS)  # of all readers of the process
                try:
                    values = next(reader, None)
                except csv.Error as error:  # the start of the next record is unknown
                    raise self.row_error(line, f"not valid CSV ({error}); correct the quotes") from error
                finally:
                    csv.field_size_limit(limit)
                if values is None:
                    return
                yield line, values


def _has_surrogates(value: str) -> bool:
    """Returns whether a value contains bytes that are not UTF-8."""
    return any("\ud800" <= char <= "\udfff" for char in value) if not value.isascii() else False


class ImageFolder(InputFile):
    """The images in a folder and its subfolders, in the order of their paths. Hidden files and folders are left out.

    Args:
        path: The folder.
    """

    unit = "image"

    def __init__(self, path: Path) -> None:
        super().__init__(path, FILE_FIELD, has_images=True)
        self.image_folder = path

    def rows(self) -> Iterator[Row | BadRow]:
        """Yields one row for each image file, in the order of the paths. A name that is not UTF-8 gives a BadRow."""
        for number, name in enumerate(self._names(), 1):
            shown = os.fsencode(name).decode(errors="backslashreplace")
            if shown == name:
                yield self.row(number, name, {self.field: name})
            else:
                yield BadRow(number, f"the file name {shown} is not UTF-8; rename the file")

    def digest(self) -> str:
        """Returns a digest of the paths. InputSummary.files has sizes and times."""
        return hashlib.sha256("\0".join(self._names()).encode(errors="surrogateescape")).hexdigest()

    def _names(self) -> list[str]:
        found = (path for path in self.path.rglob("*") if path.suffix.lower() in SUFFIXES)
        # Unlike Path.is_dir, it raises no error for a file that may not be read: its row reports it.
        files = (path for path in found if not os.path.isdir(path))  # noqa: PTH112
        paths = (path.relative_to(self.path) for path in files)
        return sorted(str(path) for path in paths if not any(part.startswith(".") for part in path.parts))


def open_input(path: Path, field: str, *, has_images: bool = False) -> InputFile:
    """Returns the input for a folder of images, or for a file by its suffix.

    Raises:
        UsageError: The file does not exist, its suffix is unknown, its CSV header is wrong, or pyarrow is missing.
    """
    if path.is_dir():
        return ImageFolder(path)
    if not path.is_file():
        raise UsageError(f"FILE: there is no file {path}")
    match path.suffix.lower():
        case ".txt":
            return TextLines(path, field, has_images=has_images)
        case ".jsonl" | ".ndjson":
            return JsonLines(path, field, has_images=has_images)
        case ".csv" | ".tsv":
            rows = CsvRows(path, field, has_images=has_images)
            rows.names()
            return rows
        case ".parquet":
            require_pyarrow("FILE")
            return ParquetRows(path, field, has_images=has_images)
    raise UsageError(f"FILE: {path.name} must end in .txt, .jsonl, .ndjson, .csv, .tsv or .parquet")
