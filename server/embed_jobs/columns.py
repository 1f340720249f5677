"""Infers the Parquet columns of a JSONL file: one type per column, from all rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .input_file import KINDS, BadRowError, InputFile, Row

_EXACT: Final = 1 << 53
"""Integers up to here are exact as float64."""
_MAX_DEPTH: Final = 64
"""Maximum nesting of lists and objects in a column."""


class ColumnError(Exception):
    """A value does not match the type of its column.

    Args:
        line: Line number of the value.
        column: Name of the column, such as "meta.years[]".
        reason: Predicate of a sentence whose subject is the column.
    """

    def __init__(self, line: int, column: str, reason: str) -> None:
        super().__init__(reason)
        self.line, self.column, self.reason = line, column, reason


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
        self._smallest, self._largest = (0, 0), (0, 0)  # smallest and largest integer, each with its line
        self._items: ColumnType | None = None
        self._fields: dict[str, ColumnType] = {}

    def add(self, value: object, line: int) -> None:
        """Adds a value. Raises ColumnError if earlier values have another type."""
        if value is None:
            return
        kind = KINDS[type(value)]
        if not self._kind:
            self._kind, self._line = kind, line
        elif self._kind != kind:
            raise ColumnError(line, self._column, f"holds {kind}, but {self._kind} in line {self._line}")
        if isinstance(value, list | dict) and self._depth > _MAX_DEPTH:
            raise ColumnError(
                line, self._column[:40] + "...", f"has more than {_MAX_DEPTH} levels of lists and objects"
            )
        if isinstance(value, float):
            self._is_float = True
        elif isinstance(value, int) and not isinstance(value, bool):
            self._smallest, self._largest = min(self._smallest, (value, line)), max(self._largest, (value, line))
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
