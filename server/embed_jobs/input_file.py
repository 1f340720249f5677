"""The input of a job: text lines, JSONL, CSV, Parquet or a folder of images, in bounded memory and in shards."""

from __future__ import annotations

import base64
import codecs
import contextlib
import csv
import hashlib
import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from penstock.engine.model_files.model_folder import one_line
from penstock.engine.protocol.errors import InvalidRequestError
from penstock.engine.protocol.images import ImageInput

from ..settings import CommandError, UsageError
from .image_values import SUFFIXES, ImageValueError, read_image_value
from .job_folder import COLUMN, Shard

PARQUET_ROWS_AT_ONCE: Final = 1024
PARQUET_IMAGES_AT_ONCE: Final = 64
_MAX_VALUE_CHARS: Final = 1 << 24
"""Maximum characters of a CSV value: a missing quote must not read the rest of a large file into memory."""
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
FILE_FIELD: Final = "file"
"""Field of a folder's rows with the path of the image."""


class Row(NamedTuple):
    """One row of the input.

    Attributes:
        line: Line number in the file, or row number in Parquet, from 1.
        content: The text to embed; or an image: the bytes or the path of its file.
        size: Characters of the text, or the work for the image in characters.
        record: Its fields. Parquet rows have fields only in `full_rows`.
        raw: Its JSONL line.
    """

    line: int
    content: str | bytes | Path
    size: int
    record: dict[str, Any]
    raw: str = ""

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
        line: See Row.
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
        num_bytes = len(image) if isinstance(image, bytes) else image.stat().st_size
        return Row(line, image, max(IMAGE_CHARS, num_bytes // _BYTES_PER_CHAR), record, raw)

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
        return orjson.dumps(row.record, option=orjson.OPT_NON_STR_KEYS, default=plain)

    def summarize(self, visit: Callable[[Row], None], *, skip_bad: bool = False) -> InputSummary:
        """Reads every row once, to find bad rows before any row is embedded.

        Args:
            visit: Called with every good row.
            skip_bad: Count bad rows instead of raising an error.

        Raises:
            BadRowError: A row is bad, or `visit` raises the error.
        """
        sizes, starts, num_chars, number, files = Counter[int](), [0], 0, -1, list[str]()
        for number, row in enumerate(self.rows()):
            num_new = 0
            if isinstance(row, Row):
                visit(row)
                num_new = row.size
                sizes[num_new] += 1
                if isinstance(row.content, Path):
                    files.append(_stat_of(row.content))
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
        """Returns the error for a row."""
        return BadRowError(f"{self.path}, {self.unit} {line}: {reason}")

    def skippable_row_error(self, line: int, reason: str) -> BadRowError:
        """Returns the error for a row that --on-bad-row skip would leave out."""
        return self.row_error(line, f"{reason}; correct it, or leave bad rows out with --on-bad-row skip")


class TextLines(InputFile):
    """One text per line. An empty line is an empty text."""

    def check_no_vectors(self) -> None:
        """See InputFile. The field has the name that the user chose."""
        if self.field == COLUMN:
            raise UsageError(f"--field: {COLUMN!r} is the name of the output column; use another name")

    def rows(self) -> Iterator[Row | BadRow]:
        """See InputFile."""
        for number, line in self._lines():
            yield line if isinstance(line, BadRow) else self.row(number, line, {self.field: line})

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
    """One JSON object per line. A blank line is a bad row, except at the end of the file."""

    def names(self) -> list[str]:
        """Returns the keys of all rows in order of first appearance. Reads the file."""
        rows = (row for row in self.rows() if isinstance(row, Row))
        return list(dict.fromkeys(name for row in rows for name in row.record))

    def check_no_vectors(self) -> None:
        """Does nothing: each row is checked when the file is read."""

    def rows(self) -> Iterator[Row | BadRow]:
        """See InputFile."""
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
        """See InputFile. Returns the bytes of the line, so that large or precise numbers do not change."""
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
        """See InputFile."""
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
        csv.field_size_limit(_MAX_VALUE_CHARS)
        with self.path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.reader(file, delimiter=self._delimiter, strict=True)
            while True:
                line = reader.line_num + 1
                try:
                    values = next(reader, None)
                except csv.Error as error:  # the start of the next record is unknown
                    raise self.row_error(line, f"not valid CSV ({error}); correct the quotes") from error
                if values is None:
                    return
                yield line, values


def _has_surrogates(value: str) -> bool:
    """Returns whether a value contains bytes that are not UTF-8."""
    return any("\ud800" <= char <= "\udfff" for char in value) if not value.isascii() else False


class ParquetRows(InputFile):
    """A Parquet file; needs pyarrow."""

    unit = "row"
    part = "column"

    def rows(self) -> Iterator[Row | BadRow]:
        """See InputFile. Reads one column only."""
        return self._read([self.field])

    def full_rows(self) -> Iterator[Row | BadRow]:
        """See InputFile."""
        return self._read(None)

    def _read(self, columns: list[str] | None) -> Iterator[Row | BadRow]:
        number = 0
        for batch in self.batches(columns):
            with self._errors(number):
                records = batch.to_pylist()
            for record in records:
                number += 1
                yield self.row(number, record[self.field], record)

    def names(self) -> list[str]:
        """See InputFile."""
        return list(self.schema().names)

    def schema(self) -> Any:
        """Returns the pyarrow schema.

        Raises:
            BadRowError: The file is damaged.
            UsageError: The text column is missing or duplicate.
        """
        from pyarrow import parquet

        with self._errors(0):
            schema = parquet.read_schema(self.path)
        if self.field not in schema.names:
            raise UsageError(f"{self.path} has no column {self.field!r}; it has {', '.join(schema.names)}; see --field")
        if schema.names.count(self.field) > 1:
            raise UsageError(f"{self.path}: two columns are named {self.field!r}; rename one")
        return schema

    def batches(self, columns: list[str] | None) -> Iterator[Any]:
        """Yields pyarrow.RecordBatch. Raises BadRowError if the file is damaged, and UsageError as `schema` does."""
        from pyarrow import parquet

        self.schema()
        num_rows = 0
        with self._errors(0):
            file = parquet.ParquetFile(self.path)
        with file:
            rows_at_once = PARQUET_IMAGES_AT_ONCE if self.has_images else PARQUET_ROWS_AT_ONCE
            iterator = file.iter_batches(rows_at_once, columns=columns)
            while True:
                with self._errors(num_rows):
                    batch = next(iterator, None)
                if batch is None:
                    return
                yield batch
                num_rows += batch.num_rows

    def shards(self, max_rows: int, first: int) -> list[Shard]:
        """Returns all rows in shards of `max_rows`, without reading rows. The last shard may be shorter.

        Args:
            max_rows: Maximum number of rows per shard.
            first: Number of the first shard.
        """
        from pyarrow import parquet

        with self._errors(0):
            total = parquet.read_metadata(self.path).num_rows
        return [
            Shard(first + i, str(self.path), start, min(max_rows, total - start))
            for i, start in enumerate(range(0, total, max_rows))
        ]

    def table(self, shard: Shard) -> Any:
        """Returns the rows of a shard as a pyarrow.Table with all columns. Memory is little more than these rows.

        Raises:
            BadRowError: The file cannot be read any more, or was changed.
        """
        import pyarrow as pa
        from pyarrow import parquet

        with self._errors(shard.start), parquet.ParquetFile(self.path) as file:
            counts = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            starts = [0, *itertools.accumulate(counts)]
            end = shard.start + shard.num_rows
            groups = [group for group in range(len(counts)) if starts[group] < end and starts[group + 1] > shard.start]
            skip = shard.start - starts[groups[0]] if groups else 0
            slices = _sliced(file.iter_batches(row_groups=groups), skip, shard.num_rows)
            table = pa.Table.from_batches(slices, schema=file.schema_arrow)
        if len(table) != shard.num_rows:
            raise BadRowError(f"{self.path} was changed while it was read; start over with --overwrite")
        return table

    @contextlib.contextmanager
    def _errors(self, num_rows: int) -> Iterator[None]:
        """Converts an error of pyarrow after `num_rows` rows to BadRowError."""
        from pyarrow import ArrowException

        try:
            yield
        except (ArrowException, OSError, OverflowError, ValueError) as error:
            near = f", {self.unit} {num_rows + 1} or one soon after it" if num_rows else ""
            raise BadRowError(
                f"{self.path}{near}: it cannot be read as Parquet ({one_line(error)}); it is damaged, "
                "has values without a Python type, or is not a Parquet file: write it again"
            ) from error


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
        """See InputFile."""
        for number, name in enumerate(self._names(), 1):
            yield self.row(number, name, {self.field: name})

    def digest(self) -> str:
        """Returns a digest of the paths. InputSummary.files has sizes and times."""
        return hashlib.sha256("\0".join(self._names()).encode(errors="surrogateescape")).hexdigest()

    def _names(self) -> list[str]:
        paths = (path.relative_to(self.path) for path in self.path.rglob("*") if path.suffix.lower() in SUFFIXES)
        return sorted(str(path) for path in paths if not any(part.startswith(".") for part in path.parts))


def _stat_of(path: Path) -> str:
    status = path.stat()
    return repr((str(path), status.st_size, status.st_mtime_ns))


def _sliced(batches: Iterable[Any], skip: int, num_rows: int) -> Iterator[Any]:
    for batch in batches:
        if skip >= len(batch):
            skip -= len(batch)
            continue
        part = batch.slice(skip, num_rows)
        skip, num_rows = 0, num_rows - len(part)
        yield part
        if not num_rows:
            return


def plain(value: object) -> str:
    """Returns a value without a JSON type as text: bytes as base64, others with `str`."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def parquet_inputs(path: str, field: str) -> list[ParquetRows]:
    """Returns one Parquet file, or all Parquet files of a folder sorted by name.

    Raises:
        UsageError: There is no file, a file lacks the text column or has a column `embedding`, or columns of files
            differ.
        BadRowError: One cannot be read.
    """
    root = Path(path).resolve()
    inputs = [ParquetRows(path, field) for path in ([root] if root.is_file() else sorted(root.glob("*.parquet")))]
    if not inputs:
        raise UsageError(f"IN: there is no Parquet file at {path}")
    first = inputs[0].schema().remove_metadata()
    for rows in inputs:
        rows.check_no_vectors()
        if not rows.schema().remove_metadata().equals(first):
            raise UsageError(f"{rows.path} has other columns than {inputs[0].path}; embed each file separately")
    return inputs


def stat_digest(inputs: Iterable[InputFile]) -> str:
    """Returns a digest of names, sizes and modification times, to avoid reading large files."""
    return hashlib.sha256("".join(_stat_of(rows.path) for rows in inputs).encode()).hexdigest()


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
    raise UsageError(f"FILE: {path.name} must end in .txt, .jsonl, .csv, .tsv or .parquet")


def require_pyarrow(flag: str) -> None:
    """Raises UsageError with the command to install pyarrow if it is missing."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{flag}: Parquet needs pyarrow: run `pip install 'penstock[parquet]'`") from error
