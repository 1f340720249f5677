"""A set of Parquet files in pieces of rows: what an engine embeds at once, and a file of the output each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.engine.model_files.json_files import one_line

from ..settings import CommandError, UsageError

COLUMN: Final = "embedding"
"""What the output has beside the columns of the input."""


class ParquetInput(NamedTuple):
    """One file of the input.

    Attributes:
        path: Absolute.
        group_rows: Rows of each of its row groups.
        num_bytes: Its size.
        modified_ns: When it was written.
    """

    path: str
    group_rows: tuple[int, ...]
    num_bytes: int
    modified_ns: int


class Piece(NamedTuple):
    """Consecutive rows of one file.

    Attributes:
        number: Its place in the output, counted from 0.
        path: The file.
        start: Number of its first row in the file, counted from 0.
        num_rows: Its rows.
        groups: The row groups that hold them.
        skip: Rows of these groups before the first one.
    """

    number: int
    path: str
    start: int
    num_rows: int
    groups: tuple[int, ...]
    skip: int

    @property
    def file_name(self) -> str:
        """Name of its file in the output: in the order of names they are in the order of the input."""
        return f"part-{self.number:08d}.parquet"


def list_inputs(place: str, field: str) -> list[ParquetInput]:
    """Returns the Parquet files of the input, one file or all of a folder in the order of their names.

    Raises:
        UsageError: There is none, one cannot be read, lacks the column or has one named `embedding`, or their columns
            differ.
    """
    from pyarrow import ArrowException, parquet

    root = Path(place).resolve()
    paths = [root] if root.is_file() else sorted(root.glob("*.parquet"))
    if not paths:
        raise UsageError(f"IN: there is no Parquet file at {place}")
    inputs, first = [], None
    for path in paths:
        try:
            with parquet.ParquetFile(path) as file:
                groups = tuple(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))
                schema = file.schema_arrow.remove_metadata()
        except (ArrowException, OSError, ValueError) as error:
            raise UsageError(f"IN: {path} cannot be read as Parquet: {one_line(error)}") from error
        if field not in schema.names:
            raise UsageError(f"IN: {path} has no column {field!r}; it has {', '.join(schema.names)}; see --field")
        if COLUMN in schema.names:
            raise UsageError(f"IN: {path} has a column {COLUMN!r}, the name of the one that is added; rename it")
        first = first or schema
        if not schema.equals(first):
            raise UsageError(f"IN: {path} has other columns than {paths[0]}; embed them one by one")
        status = path.stat()
        inputs.append(ParquetInput(str(path), groups, status.st_size, status.st_mtime_ns))
    return inputs


def check_apart(inputs: Iterable[ParquetInput], folder: Path) -> None:
    """Raises UsageError where a file of the input lies in the folder of the output, which --overwrite clears."""
    inside = [source.path for source in inputs if Path(source.path).resolve().is_relative_to(folder.resolve())]
    if inside:
        raise UsageError(f"OUT: {folder} holds the input {inside[0]}; name another folder")


def digest_of(inputs: Iterable[ParquetInput]) -> str:
    """Returns what tells one input from another: its files, and when they were written."""
    return hashlib.sha256(repr([tuple(source) for source in inputs]).encode()).hexdigest()


def pieces_of(inputs: Iterable[ParquetInput], most_rows: int) -> list[Piece]:
    """Returns the rows of all files in pieces of `most_rows`; the last one of each file may be shorter."""
    pieces: list[Piece] = []
    for source in inputs:
        starts = _starts(source.group_rows)
        for start in range(0, starts[-1], most_rows):
            end = min(start + most_rows, starts[-1])
            groups = tuple(
                group
                for group, rows in enumerate(source.group_rows)
                if starts[group] < end and starts[group] + rows > start
            )
            skip = start - starts[groups[0]]
            pieces.append(Piece(len(pieces), source.path, start, end - start, groups, skip))
    return pieces


def read_piece(piece: Piece) -> Any:
    """Returns the rows of a piece as a pyarrow.Table, with all columns. Holds little more than them.

    Raises:
        CommandError: The file cannot be read any more.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(piece.path) as file:
            slices = _sliced(file.iter_batches(row_groups=list(piece.groups)), piece.skip, piece.num_rows)
            table = pa.Table.from_batches(slices, schema=file.schema_arrow)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CommandError(f"{piece.path} cannot be read: {one_line(error)}") from error
    if len(table) != piece.num_rows:
        raise CommandError(f"{piece.path} was changed while it was read; start over with --overwrite")
    return table


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


def _starts(rows: Sequence[int]) -> list[int]:
    """Returns the number of the first row of each group, and of the row behind the last."""
    starts = [0]
    for count in rows:
        starts.append(starts[-1] + count)
    return starts
