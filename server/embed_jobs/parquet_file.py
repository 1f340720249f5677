"""Parquet files: the reader of an input, the column types of a JSONL input, and the added column of vectors.

Parquet has one type for each column, so ColumnType infers it from all rows of a JSONL file. All of it needs pyarrow.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.engine.model_files.model_folder import one_line

from ..settings import UsageError
from .input_file import KINDS, BadRow, BadRowError, InputFile, Row
from .job_folder import COLUMN, Shard

PARQUET_ROWS_AT_ONCE: Final = 1024
PARQUET_IMAGES_AT_ONCE: Final = 64
_EXACT: Final = 1 << 53
"""Integers up to here are exact as float64."""
_MAX_DEPTH: Final = 64
"""Maximum nesting of lists and objects in a column."""


class ParquetRows(InputFile):
    """A Parquet file; needs pyarrow."""

    unit = "row"
    part = "column"

    def rows(self) -> Iterator[Row | BadRow]:
        """Yields all rows, with the column of the field only."""
        return self._read([self.field])

    def full_rows(self) -> Iterator[Row | BadRow]:
        """Yields all rows, with all columns."""
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
        """Returns the names of the columns. Raises the errors of `schema`."""
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
        with self._errors(0):
            file = parquet.ParquetFile(self.path)
        with file:
            rows_at_once = PARQUET_IMAGES_AT_ONCE if self.has_images else PARQUET_ROWS_AT_ONCE
            yield from self._checked(file.iter_batches(rows_at_once, columns=columns), 0)

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

        with self._errors(shard.start):
            file = parquet.ParquetFile(self.path)
        with file:
            counts = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            starts = [0, *itertools.accumulate(counts)]
            end = shard.start + shard.num_rows
            groups = [group for group in range(len(counts)) if starts[group] < end and starts[group + 1] > shard.start]
            skip = shard.start - starts[groups[0]] if groups else 0
            batches = self._checked(file.iter_batches(row_groups=groups), shard.start - skip)
            slices = _sliced(batches, skip, shard.num_rows)
            table = pa.Table.from_batches(slices, schema=file.schema_arrow)
        if len(table) != shard.num_rows:
            raise BadRowError(f"{self.path} was changed while it was read; start over with --overwrite")
        return table

    def _checked(self, batches: Iterator[Any], num_rows: int) -> Iterator[Any]:
        """Yields batches that follow `num_rows` rows. Raises BadRowError if pyarrow cannot read one."""
        while True:
            with self._errors(num_rows):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch
            num_rows += batch.num_rows

    @contextlib.contextmanager
    def _errors(self, num_rows: int) -> Iterator[None]:
        """Converts an error of pyarrow after `num_rows` rows to BadRowError."""
        from pyarrow import ArrowException

        try:
            yield
        except (ArrowException, LookupError, OSError, OverflowError, ValueError) as error:  # LookupError: a time zone
            near = f", {self.unit} {num_rows + 1} or one soon after it" if num_rows else ""
            if isinstance(error, OSError) and error.errno is not None:  # errors of damaged files have no number
                raise BadRowError(f"{self.path}{near}: it cannot be read: {os.strerror(error.errno)}") from error
            raise BadRowError(
                f"{self.path}{near}: it cannot be read as Parquet ({one_line(error)}); it is damaged, "
                "has values without a Python type, or is not a Parquet file: write it again"
            ) from error


def parquet_inputs(path: str, field: str) -> list[ParquetRows]:
    """Returns one Parquet file, or all Parquet files of a folder sorted by name.

    Raises:
        UsageError: There is no file, a file lacks the text column or has a column `embedding`, or columns of files
            differ.
        BadRowError: One cannot be read.
    """
    root = Path(path).resolve()
    files = [root] if root.is_file() else sorted(root.glob("*.parquet"))
    inputs = [ParquetRows(file, field) for file in files]
    if not inputs:
        raise UsageError(f"IN: there is no Parquet file at {path}")
    first = inputs[0].schema().remove_metadata()
    for rows in inputs:
        rows.check_no_vectors()
        if not rows.schema().remove_metadata().equals(first):
            raise UsageError(f"{rows.path} has other columns than {inputs[0].path}; embed each file separately")
    return inputs


def _sliced(batches: Iterable[Any], skip: int, num_rows: int) -> Iterator[Any]:
    for batch in batches:
        if skip >= len(batch):
            skip -= len(batch)
            continue
        part = batch.slice(skip, num_rows)
        skip = 0
        num_rows -= len(part)
        yield part
        if not num_rows:
            return


def require_pyarrow(flag: str) -> None:
    """Raises UsageError with the command to install pyarrow if it is missing."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{flag}: Parquet needs pyarrow: run `pip install 'penstock[parquet]'`") from error


def append_vectors(table: Any, vectors: NDArray[np.float32]) -> Any:
    """Returns a pyarrow.Table with an additional column `embedding` of type FixedSizeList of float32."""
    import pyarrow as pa

    width = vectors.shape[1]
    values = pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(vectors).ravel()), width)
    return table.append_column(pa.field(COLUMN, pa.list_(pa.float32(), width)), values)


class ColumnError(Exception):
    """A value does not match the type of its column.

    Args:
        line: Line number of the value.
        column: Name of the column, such as "meta.years[]".
        reason: End of the error message, after the name of the column.
    """

    def __init__(self, line: int, column: str, reason: str) -> None:
        super().__init__(reason)
        self.line = line
        self.column = column
        self.reason = reason


class ColumnType:
    """The type of the values of one column. Null fits every type.

    Args:
        column: Its name for messages.
        depth: Nesting level of its values.
    """

    def __init__(self, column: str, depth: int = 0) -> None:
        self._column = column
        self._depth = depth
        self._kind = ""
        self._line = 0
        self._is_float = False
        self._smallest = (0, 0)  # smallest integer, with its line
        self._largest = (0, 0)  # largest integer, with its line
        self._items: ColumnType | None = None
        self._fields: dict[str, ColumnType] = {}

    def add(self, value: object, line: int) -> None:
        """Adds a value. Raises ColumnError if earlier values have another type."""
        if value is None:
            return
        kind = KINDS[type(value)]
        if not self._kind:
            self._kind = kind
            self._line = line
        elif self._kind != kind:
            raise ColumnError(line, self._column, f"holds {kind}, but {self._kind} in line {self._line}")
        if isinstance(value, list | dict) and self._depth > _MAX_DEPTH:
            raise ColumnError(
                line, self._column[:40] + "...", f"has more than {_MAX_DEPTH} levels of lists and objects"
            )
        if isinstance(value, float):
            self._is_float = True
        elif isinstance(value, int) and not isinstance(value, bool):
            self._smallest = min(self._smallest, (value, line))
            self._largest = max(self._largest, (value, line))
        elif isinstance(value, list):
            self._items = self._items or ColumnType(f"{self._column}[]", self._depth + 1)
            for item in value:
                self._items.add(item, line)
        elif isinstance(value, dict):
            for name, inner in value.items():
                self.field(name).add(inner, line)

    def field(self, name: str) -> ColumnType:
        """Returns the type of a field of objects."""
        column = f"{self._column}.{name}" if self._column else name
        return self._fields.setdefault(name, ColumnType(column, self._depth + 1))

    def arrow(self) -> Any:
        """Returns the pyarrow type. Raises ColumnError if no Parquet type fits all values."""
        import pyarrow as pa

        if not self._kind:
            return pa.null()
        if self._items is not None:
            return pa.list_(self._items.arrow())
        if self._kind == KINDS[dict]:
            if not self._fields:
                raise ColumnError(self._line, self._column, "holds only empty objects ({}), which Parquet cannot store")
            return pa.struct(self.fields())
        return {KINDS[bool]: pa.bool_(), KINDS[str]: pa.string()}.get(self._kind) or self._number()

    def fields(self) -> list[Any]:
        """Returns the pyarrow fields of objects in order of first appearance."""
        import pyarrow as pa

        return [pa.field(name, column.arrow()) for name, column in self._fields.items()]

    def _number(self) -> Any:
        import pyarrow as pa

        (smallest, smallest_line), (largest, largest_line) = self._smallest, self._largest
        widest, line = max((-smallest, smallest_line), (largest, largest_line))
        if self._is_float:
            if widest > _EXACT:
                raise ColumnError(line, self._column, "holds an integer above 2**53 beside fractions")
            return pa.float64()
        if smallest >= -(1 << 63) and largest < 1 << 63:
            return pa.int64()
        if smallest >= 0 and largest < 1 << 64:
            return pa.uint64()
        raise ColumnError(line, self._column, "holds an integer that does not fit into 64 bits")


class JsonColumns:
    """The columns of a JSONL file."""

    def __init__(self, source: InputFile) -> None:
        self._source = source
        self._row = ColumnType("")

    def add(self, row: Row) -> None:
        """Adds a row. Raises BadRowError if a value does not match its column."""
        try:
            for name, value in self.record(row).items():
                self._row.field(name).add(value, row.line)
        except ColumnError as error:
            raise self._rejection(error) from error

    def fields(self) -> Sequence[Any]:
        """Returns the pyarrow fields. Raises BadRowError if Parquet has no type for a column."""
        try:
            return self._row.fields()
        except ColumnError as error:
            raise self._rejection(error) from error

    def record(self, row: Row) -> Mapping[str, Any]:
        """Returns the fields of a row, with integers of any size. Raises BadRowError for a duplicate key."""
        try:
            record: dict[str, Any] = json.loads(row.raw, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            raise self._source.row_error(
                row.line, f"its fields cannot be written as Parquet ({error}); write .jsonl"
            ) from error
        return record

    def _rejection(self, error: ColumnError) -> BadRowError:
        return self._source.row_error(
            error.line,
            f"the column {error.column!r} {error.reason}; Parquet has one type for each column: change the values, or "
            "write .jsonl",
        )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is duplicate")
    return found
