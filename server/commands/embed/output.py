"""The output of `penstock embed`: .npy, JSONL or Parquet, written in blocks and moved into place when complete."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from penstock.engine.model_files.json_files import one_line

from ...settings import CommandError, UsageError
from .input import InputFile, ParquetRows, blocks, require_pyarrow

Vectors = NDArray[np.float32]
Writer = Callable[[Path, InputFile, Vectors], None]

ROWS_AT_ONCE: Final = 1024
COLUMN: Final = "embedding"


def writer_for(output: Path) -> Writer:
    """Returns the function that writes a file like `output`.

    Raises:
        UsageError: An unknown suffix, no such folder, or pyarrow is missing.
    """
    if not output.parent.is_dir():
        raise UsageError(f"--output: there is no folder {output.parent}")
    match output.suffix.lower():
        case ".npy":
            return write_npy
        case ".jsonl" | ".ndjson":
            return write_jsonl
        case ".parquet":
            require_pyarrow("--output")
            return write_parquet
    raise UsageError(f"--output: {output.name} must end in .parquet, .jsonl or .npy")


def write_output(output: Path, write: Writer, source: InputFile, vectors: Vectors) -> None:
    """Writes the whole output beside its place and moves it there.

    Args:
        output: The file; one that is there is replaced in one step.
        write: See `writer_for`.
        source: The input; its rows are read again.
        vectors: [N, D] float32, a row for each of the input.

    Raises:
        CommandError: The disk refuses, or the format; the message says what to do.
    """
    temporary = output.with_name(f".{output.name}.tmp")
    try:
        write(temporary, source, vectors)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(output)
    except OSError as error:
        raise CommandError(
            f"{output} cannot be written: {error.strerror or error}; all {len(vectors)} rows are done and kept: "
            "give the same command again when it can"
        ) from error
    except (ArithmeticError, LookupError, NotImplementedError, TypeError, ValueError) as error:
        raise CommandError(
            f"{output} cannot be written: its format cannot hold the columns of {source.path} "
            f"({one_line(error)}). All embeddings are done and kept: rename the folder "
            f"{output.name}.partial to {output.stem}.npy.partial, and give the same command with an output "
            f"{output.stem}.npy"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_npy(path: Path, source: InputFile, vectors: Vectors) -> None:
    """Writes the vectors alone, [N, D] float32, in the order of the rows."""
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": vectors.shape}
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(vectors), ROWS_AT_ONCE):
            file.write(np.ascontiguousarray(vectors[start : start + ROWS_AT_ONCE], "<f4").data)


def write_jsonl(path: Path, source: InputFile, vectors: Vectors) -> None:
    """Writes each row with all of its fields and the field `embedding`."""
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    with path.open("wb") as file:
        for row, vector in zip(source.rows(), vectors, strict=True):
            record = {**row.record, COLUMN: np.asarray(vector)}
            try:
                file.write(orjson.dumps(record, option=option, default=str))
            except orjson.JSONEncodeError as error:
                raise source.bad_row(
                    row.line,
                    f"its fields cannot be written as JSON ({error}). All embeddings are done and kept: rename the "
                    "folder OUTPUT.jsonl.partial to OUTPUT.npy.partial, and give the same command with an OUTPUT.npy",
                ) from error


def write_parquet(path: Path, source: InputFile, vectors: Vectors) -> None:
    """Writes a Parquet input's own columns, or the text of any other input, and the column `embedding`."""
    import pyarrow as pa
    from pyarrow import parquet

    kept = _parquet_schema(source)
    column = pa.field(COLUMN, pa.list_(pa.float32(), vectors.shape[1]))
    with parquet.ParquetWriter(path, kept.append(column)) as writer:
        for start, rows in zip(itertools.count(0, ROWS_AT_ONCE), blocks(source.rows(), ROWS_AT_ONCE), strict=False):
            block = np.ascontiguousarray(vectors[start : start + len(rows)])
            table = pa.Table.from_pylist([row.record for row in rows], schema=kept)
            values = pa.FixedSizeListArray.from_arrays(pa.array(block.ravel()), vectors.shape[1])
            writer.write_table(table.append_column(column, values))


def _parquet_schema(source: InputFile) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    if not isinstance(source, ParquetRows):
        return pa.schema([pa.field(source.field, pa.string())])
    schema = parquet.read_schema(source.path)
    return pa.schema([field for field in schema if field.name != COLUMN], schema.metadata)
