"""Parquet in pieces, without Ray."""

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st
from pyarrow import parquet

from penstock.server.cluster.pieces import ParquetInput, digest_of, list_inputs, pieces_of, read_piece
from penstock.server.settings import CommandError, UsageError


def write(path: Path, rows: range, group: int = 1000, **columns: list[object]) -> Path:
    texts = columns.pop("text", [f"text {row}" for row in rows])
    parquet.write_table(pa.table({"id": list(rows), "text": texts, **columns}), path, row_group_size=group)
    return path


@settings(max_examples=200)
@given(st.lists(st.lists(st.integers(1, 30), max_size=6), min_size=1, max_size=4), st.integers(1, 40))
def test_every_row_is_in_one_piece(files: list[list[int]], most_rows: int) -> None:
    inputs = [ParquetInput(str(number), tuple(groups), 0, 0) for number, groups in enumerate(files)]
    pieces = pieces_of(inputs, most_rows)
    rows = [(piece.path, row) for piece in pieces for row in range(piece.start, piece.start + piece.num_rows)]
    assert rows == [(source.path, row) for source in inputs for row in range(sum(source.group_rows))]
    assert [piece.number for piece in pieces] == list(range(len(pieces)))
    assert all(1 <= piece.num_rows <= most_rows for piece in pieces)
    for piece in pieces:
        groups = inputs[int(piece.path)].group_rows
        before = sum(groups[: piece.groups[0]])
        assert before + piece.skip == piece.start
        assert piece.skip < groups[piece.groups[0]]
        assert piece.skip + piece.num_rows <= sum(groups[group] for group in piece.groups)


@pytest.mark.parametrize(("group", "most_rows"), [(7, 10), (1000, 10), (3, 100), (10, 10), (1, 4)])
def test_pieces_read_what_they_say(tmp_path: Path, group: int, most_rows: int) -> None:
    write(tmp_path / "b.parquet", range(50, 73), group)
    write(tmp_path / "a.parquet", range(50), group)
    pieces = pieces_of(list_inputs(str(tmp_path), "text"), most_rows)
    tables = [read_piece(piece) for piece in pieces]
    assert pa.concat_tables(tables).column("id").to_pylist() == list(range(73))
    assert [len(table) for table in tables] == [piece.num_rows for piece in pieces]
    assert sorted(piece.file_name for piece in pieces) == [piece.file_name for piece in pieces]


def test_what_cannot_be_an_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="IN: there is no Parquet file"):
        list_inputs(str(tmp_path), "text")
    write(tmp_path / "a.parquet", range(3))
    with pytest.raises(UsageError, match="has no column 'body'; it has id, text; see --field"):
        list_inputs(str(tmp_path), "body")
    write(tmp_path / "b.parquet", range(3), other=[1, 2, 3])
    with pytest.raises(UsageError, match=r"b\.parquet has other columns than"):
        list_inputs(str(tmp_path), "text")
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    with pytest.raises(UsageError, match=r"b\.parquet cannot be read as Parquet"):
        list_inputs(str(tmp_path), "text")


def test_an_input_that_was_written_anew_is_another(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", range(30))
    first = list_inputs(str(path), "text")
    assert digest_of(first) == digest_of(list_inputs(str(path), "text"))
    write(path, range(29))
    assert digest_of(first) != digest_of(list_inputs(str(path), "text"))
    with pytest.raises(CommandError, match="was changed while it was read"):
        read_piece(pieces_of(first, 100)[0])
    path.unlink()
    with pytest.raises(CommandError, match="cannot be read"):
        read_piece(pieces_of(first, 100)[0])
