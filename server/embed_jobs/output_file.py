"""The output of `penstock embed`: shards joined into one file, which is moved into place when complete."""

from __future__ import annotations

import csv
import errno
import json
import operator
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from penstock.engine.model_files.model_folder import one_line

from ..settings import CommandError, UsageError
from .input_file import BadRow, InputFile, Row, value_to_text
from .input_formats import JsonLines
from .job_folder import COLUMN, ShardVectorReader, replace_file, write_npy_header
from .parquet_file import JsonColumns, ParquetRows, append_vectors, require_pyarrow

ROWS_AT_ONCE: Final = 1024
CHARS_AT_ONCE: Final = 1 << 26
"""Maximum characters of the rows that are written to Parquet together, unless one row has more."""


def writer_for(output: Path) -> Writer:
    """Returns the function that writes a file like `output`.

    Raises:
        UsageError: The suffix is unknown, the folder does not exist or cannot be written, or pyarrow is missing.
    """
    if not output.parent.is_dir():
        raise UsageError(f"--output: there is no folder {output.parent}")
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise UsageError(f"--output: the folder {output.parent} cannot be written: {os.strerror(errno.EACCES)}")
    match output.suffix.lower():
        case ".npy":
            return write_npy
        case ".jsonl" | ".ndjson":
            return write_jsonl
        case ".csv":
            return write_csv
        case ".tsv":
            return partial(write_csv, delimiter="\t")
        case ".parquet":
            require_pyarrow("--output")
            return write_parquet
    raise UsageError(f"--output: {output.name} must end in .parquet, .jsonl, .ndjson, .csv, .tsv or .npy")


class UnsupportedColumnsError(Exception):
    """The format of the output cannot hold a value or a column of the input."""


class JobResult(NamedTuple):
    """The outcome of a run.

    Attributes:
        vectors: One row per row of the input; NaN for bad and rejected rows.
        rejected: Row index, from 0, to the reason why the model rejected the row.
        num_skipped: Number of bad and rejected rows.
        columns: Columns of a JSONL input, for Parquet output.
    """

    vectors: ShardVectorReader
    rejected: Mapping[int, str]
    num_skipped: int
    columns: JsonColumns | None


Writer = Callable[[Path, InputFile, JobResult], None]


def json_columns_for(source: InputFile, output: Path) -> JsonColumns | None:
    """Returns an empty JsonColumns if the input is JSONL and the output is Parquet, else None.

    Raises:
        UsageError: The output cannot hold the columns of the input.
    """
    suffix = output.suffix.lower()
    if suffix == ".npy":
        return None
    source.check_no_vectors()
    if suffix == ".parquet":
        return JsonColumns(source) if isinstance(source, JsonLines) else None
    if isinstance(source, ParquetRows) and len(set(names := source.names())) < len(names):
        raise UsageError(f"FILE: {source.path} has several columns with the same name; rename them, or write .parquet")
    return None


def check_no_embedding_field(source: InputFile, row: Row) -> None:
    """Raises BadRowError if a row already has a field `embedding`."""
    if COLUMN in row.record:
        raise source.row_error(row.line, f"it has a field {COLUMN!r}, the name of the output field; rename it")


def report_path(output: Path) -> Path:
    """Returns the path of the list of skipped rows."""
    return output.with_name(f"{output.name}.skipped.jsonl")


def write_output(output: Path, write: Writer, source: InputFile, results: JobResult) -> None:
    """Writes the list of skipped rows, then the output. Each replaces an earlier file atomically.

    Args:
        output: Path of the output; its suffix has selected `write`.
        write: Writes the output in its format; from `writer_for`.
        source: The input. Its rows are read again.
        results: Results of the run.

    Raises:
        CommandError: The disk fails, or the format does not support the columns. The message has the next step.
    """
    temporary = output.with_name(f".{output.name}.tmp")
    try:
        if results.num_skipped:
            replace_file(report_path(output), temporary, lambda path: _write_report(path, source, results.rejected))
        else:
            report_path(output).unlink(missing_ok=True)  # from an earlier run
        replace_file(output, temporary, lambda path: write(path, source, results))
    except OSError as error:
        raise CommandError(
            f"{output} cannot be written: {error.strerror or error}; the vectors "
            f"of all {results.vectors.num_rows} rows are kept: run the same command again later"
        ) from error
    except UnsupportedColumnsError as error:
        raise CommandError(
            f"{output} cannot be written: its format does not support the columns of {source.path} "
            f"({one_line(error)}). All embeddings are kept: rename the folder "
            f"{output.name}.partial to {output.stem}.npy.partial, and run the same command with an output "
            f"{output.stem}.npy"
        ) from error


def _write_report(path: Path, source: InputFile, rejected: Mapping[int, str]) -> None:
    with path.open("wb") as file:
        for number, row in enumerate(source.rows()):
            reason = row.reason if isinstance(row, BadRow) else rejected.get(number)
            if reason is not None:
                file.write(orjson.dumps({source.unit: row.line, "reason": reason}) + b"\n")


def write_npy(path: Path, source: InputFile, results: JobResult) -> None:
    """Writes the vectors [N, D] float32. Row i belongs to row i of the input; NaN if it was skipped."""
    del source
    vectors = results.vectors
    with path.open("wb") as file:
        write_npy_header(file, vectors.num_rows, vectors.width)
        for start in range(0, vectors.num_rows, ROWS_AT_ONCE):
            block = vectors.rows(range(start, min(start + ROWS_AT_ONCE, vectors.num_rows)))
            file.write(np.ascontiguousarray(block, "<f4").data)


def write_jsonl(path: Path, source: InputFile, results: JobResult) -> None:
    """Writes each row with all its fields and the field `embedding`."""
    with path.open("wb") as file:
        for number, row in _good_rows(source.full_rows(), results.rejected):
            (vector,) = results.vectors.rows([number])
            try:
                fields = source.json_object(row)
            except orjson.JSONEncodeError as error:
                raise source.row_error(
                    row.line,
                    f"its fields cannot be written as JSON ({error}). All embeddings are kept: rename the "
                    "folder OUTPUT.jsonl.partial to OUTPUT.npy.partial, and run the same command with an OUTPUT.npy",
                ) from error
            values = orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY)
            file.write(b'%b,"%b":%b}\n' % (fields[:-1].rstrip(), COLUMN.encode(), values))


def write_csv(path: Path, source: InputFile, results: JobResult, *, delimiter: str = ",") -> None:
    """Writes a header and the rows, with all columns of the input and the column `embedding`, a JSON list of numbers.

    A null or missing value is empty. Lists, objects, numbers, true and false are written as JSON.
    """
    names = source.names()
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        writer.writerow([*names, COLUMN])
        for number, row in _good_rows(source.full_rows(), results.rejected):
            (vector,) = results.vectors.rows([number])
            try:
                record = json.loads(row.raw) if row.raw else row.record
                values = [_csv_value(record.get(name)) for name in names]
            except RecursionError as error:  # lists in lists
                raise UnsupportedColumnsError(f"{source.unit} {row.line}: {error}") from error
            writer.writerow([*values, orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY).decode()])


def _csv_value(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=value_to_text)


def write_parquet(path: Path, source: InputFile, results: JobResult) -> None:
    """Writes the columns of the input and the column `embedding`. Fields missing in a JSONL row are null."""
    import pyarrow as pa
    from pyarrow import parquet

    schema = _parquet_schema(source, results.columns)
    column = pa.field(COLUMN, pa.list_(pa.float32(), results.vectors.width))
    try:
        with parquet.ParquetWriter(path, schema.append(column)) as writer:
            for numbers, table in _tables(source, results, schema):
                writer.write_table(append_vectors(table, results.vectors.rows(numbers)))
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:  # the errors of pyarrow for values
        raise UnsupportedColumnsError(str(error)) from error


def _tables(source: InputFile, results: JobResult, schema: Any) -> Iterator[tuple[list[int], Any]]:
    import pyarrow as pa

    if isinstance(source, ParquetRows):
        start = 0
        for batch in source.batches(None):
            values = batch.column(source.field).to_pylist()
            places = [
                i
                for i, value in enumerate(values)
                if isinstance(source.row(i, value, {}), Row) and start + i not in results.rejected
            ]
            table = pa.Table.from_batches([batch], schema=schema)
            if len(places) < len(values):
                table = table.take(pa.array(places, pa.int64()))
            yield [start + i for i in places], table
            start += len(values)
        return
    rows = _good_rows(source.full_rows(), results.rejected)
    record = operator.attrgetter("record") if results.columns is None else results.columns.record
    numbers: list[int] = []
    records: list[Mapping[str, Any]] = []
    num_chars = 0
    for number, row in rows:
        numbers.append(number)
        records.append(record(row))  # without the decoded image
        num_chars += len(row.raw) or sum(map(len, row.record.values()))
        if len(numbers) == ROWS_AT_ONCE or num_chars >= CHARS_AT_ONCE:
            yield numbers, pa.Table.from_pylist(records, schema=schema)
            numbers = []
            records = []
            num_chars = 0
    if numbers:
        yield numbers, pa.Table.from_pylist(records, schema=schema)


def _good_rows(rows: Iterator[Row | BadRow], rejected: Collection[int]) -> Iterator[tuple[int, Row]]:
    return ((n, row) for n, row in enumerate(rows) if isinstance(row, Row) and n not in rejected)


def _parquet_schema(source: InputFile, columns: JsonColumns | None) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    if columns is not None:
        return pa.schema(columns.fields())
    if not isinstance(source, ParquetRows):
        return pa.schema([pa.field(name, pa.string()) for name in source.names()])
    return parquet.read_schema(source.path)
