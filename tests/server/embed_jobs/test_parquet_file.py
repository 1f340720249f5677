"""Every row of Parquet is read once. Every column of the input is in the output, or the error names the value."""

import json
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.server.embed_jobs import output_file, parquet_file
from penstock.server.embed_jobs.input_file import stat_digest
from penstock.server.embed_jobs.input_formats import open_input
from penstock.server.embed_jobs.job_folder import Shard
from penstock.server.embed_jobs.parquet_file import ColumnError, ColumnType, ParquetRows, parquet_inputs
from penstock.server.settings import CommandError, UsageError

from ...tables import cases, table

ROWS = table(__file__, "rows")
META_KEYS = ("tags", "at", "lang")
COLUMNS = [
    {name: row.get(name) for name in ("id", "text", "score", "meta", "flag", "list", "none")}
    | {"meta": row["meta"] and {key: row["meta"].get(key) for key in META_KEYS}}
    for row in ROWS
]


def write_jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def without_vectors(rows: list[dict]) -> list[dict]:
    assert all(len(row.pop("embedding")) for row in rows)
    return rows


def test_jsonl_to_parquet_keeps_every_column(run, tmp_path: Path) -> None:
    run(write_jsonl(tmp_path / "in.jsonl", *ROWS), tmp_path / "out.parquet")
    table = parquet.read_table(tmp_path / "out.parquet")
    assert str(table.schema.field("id").type) == "int64"
    assert str(table.schema.field("score").type) == "double"
    assert without_vectors(table.to_pylist()) == COLUMNS


@cases(__file__, "values", "kind")
def test_type_of_a_column_holds_all_values(run, values: list, kind: str, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", *({"text": "a", "id": value} for value in values))
    run(source, tmp_path / "out.parquet")
    column = parquet.read_table(tmp_path / "out.parquet")["id"]
    assert (str(column.type), column.to_pylist()) == (kind, values)


def test_field_of_a_late_row_is_a_column(run, tmp_path: Path) -> None:
    rows = [{"text": str(i)} for i in range(3000)]
    run(write_jsonl(tmp_path / "in.jsonl", *rows, {"text": "z", "late": "here"}), tmp_path / "out.parquet")
    column = parquet.read_table(tmp_path / "out.parquet")["late"].to_pylist()
    assert column == [None] * 3000 + ["here"]


def test_jsonl_to_jsonl_keeps_values_to_the_digit(run, tmp_path: Path) -> None:
    line = (
        '{"n": 123456789012345678901234567890, "f": 0.10000000000000000001, "text": "é", "o": {}, "l": [1, "x", null]}'
    )
    run(write_jsonl(tmp_path / "in.jsonl", line), tmp_path / "out.jsonl")
    (written,) = (tmp_path / "out.jsonl").read_text().splitlines()
    assert written.startswith(line[:-1] + ',"embedding":[')
    assert json.loads(written)["n"] == 123456789012345678901234567890


def test_parquet_to_jsonl_keeps_every_column(run, tmp_path: Path) -> None:
    table = pa.table({"id": pa.array([2**64 - 1, None], pa.uint64()), "text": ["a", "b"], "b": [b"\0", b"\1"]})
    parquet.write_table(table, tmp_path / "in.parquet")
    run(tmp_path / "in.parquet", tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert without_vectors(rows) == [
        {"id": 2**64 - 1, "text": "a", "b": "AA=="},
        {"id": None, "text": "b", "b": "AQ=="},
    ]
    run(tmp_path / "in.parquet", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text().startswith(f'id,text,b,embedding\n{2**64 - 1},a,"""AA==""","[')


def test_parquet_to_parquet_keeps_types_and_metadata(run, tmp_path: Path) -> None:
    table = pa.table(
        {
            "text": ["a", "b"],
            "at": pa.array([1, 2], pa.timestamp("ns", "UTC")),
            "kind": pa.array(["x", "x"]).dictionary_encode(),
            "price": pa.array([1, 2], pa.decimal128(20, 3)),
            "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int8())),
        }
    ).replace_schema_metadata({"made": "by hand"})
    parquet.write_table(table, tmp_path / "in.parquet")
    before = parquet.read_table(tmp_path / "in.parquet")
    run(tmp_path / "in.parquet", tmp_path / "out.parquet")
    after = parquet.read_table(tmp_path / "out.parquet")
    assert after.drop_columns(["embedding"]).equals(before)
    assert after.schema.metadata[b"made"] == b"by hand"


@cases(__file__, "rows", "part")
def test_value_without_parquet_type_fails_before_the_run(run, rows: list, part: str, fake, tmp_path: Path) -> None:
    rows = [row if isinstance(row, str) else {"text": "a", **row} for row in rows]
    with pytest.raises(CommandError) as error:
        run(write_jsonl(tmp_path / "in.jsonl", *rows), tmp_path / "out.parquet")
    assert part in str(error.value)
    assert not fake.calls
    run(tmp_path / "in.jsonl", tmp_path / "out.jsonl")


def test_column_may_have_64_levels() -> None:
    for value, deeper in (([], lambda inner: [inner]), ({}, lambda inner: {"a": inner})):
        for _ in range(63):
            value = deeper(value)
        ColumnType("k", 1).add(value, 1)
        with pytest.raises(ColumnError, match="more than 64 levels"):
            ColumnType("k", 1).add(deeper(value), 1)


def test_row_without_a_python_value_is_named_nearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "PARQUET_ROWS_AT_ONCE", 2)
    late = pa.array([0, 0, 0, 0, 0, 2**60], pa.timestamp("ms"))  # beyond the years of datetime
    source = ParquetRows(write(tmp_path / "a.parquet", range(6), at=late), "text")
    assert len(list(source.rows())) == 6
    with pytest.raises(CommandError, match=r"a\.parquet, row 5 or one soon after it: it cannot be read as Parquet"):
        list(source.full_rows())


@pytest.mark.parametrize(("name", "text"), [("in.jsonl", '{"text": "%s"}\n'), ("in.csv", "%s\n")])
def test_rows_of_parquet_are_written_in_bounded_groups(run, name: str, text: str, tmp_path: Path, monkeypatch) -> None:
    source, output = tmp_path / name, tmp_path / "out.parquet"
    source.write_text("text\n" * (name == "in.csv") + "".join(text % ("a" * 30) for _ in range(10)))
    num_chars = len(text % ("a" * 30)) - 1
    pairs = [2] * 5
    for max_rows, max_chars, sizes in ((4, 10**6, [4, 4, 2]), (9, 2 * num_chars, pairs), (9, num_chars + 1, pairs)):
        monkeypatch.setattr(output_file, "ROWS_AT_ONCE", max_rows)
        monkeypatch.setattr(output_file, "CHARS_AT_ONCE", max_chars)
        run(source, output, overwrite=True)
        groups = parquet.read_metadata(output)
        assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == sizes


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_column_named_embedding_is_rejected(run, suffix: str, fake, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", {"text": "a"}, {"text": "b", "embedding": [1]})
    with pytest.raises(CommandError, match="line 2: it has a field 'embedding'"):
        run(source, tmp_path / f"out{suffix}")
    parquet.write_table(pa.table({"text": ["a"], "embedding": [1]}), tmp_path / "in.parquet")
    with pytest.raises(UsageError, match="has a column 'embedding'"):
        run(tmp_path / "in.parquet", tmp_path / f"out{suffix}")
    (tmp_path / "in.txt").write_text("a\n")
    with pytest.raises(UsageError, match="--field: 'embedding'"):
        run(tmp_path / "in.txt", tmp_path / f"out{suffix}", field="embedding")
    assert not fake.calls
    run(source, tmp_path / "out.npy")  # has no columns
    assert len(np.load(tmp_path / "out.npy")) == 2


def write(path: Path, rows: range, group: int = 1000, **columns: list[object]) -> Path:
    texts = [f"text {row}" for row in rows]
    parquet.write_table(pa.table({"id": list(rows), "text": texts, **columns}), path, row_group_size=group)
    return path


def shards_of(inputs: list[ParquetRows], max_rows: int) -> list[Shard]:
    shards: list[Shard] = []
    for rows in inputs:
        shards += rows.shards(max_rows, len(shards))
    return shards


def read(shard: Shard) -> pa.Table:
    return ParquetRows(Path(shard.path), "text").table(shard)


@pytest.mark.parametrize(("group", "max_rows"), [(7, 10), (1000, 10), (3, 100), (10, 10), (1, 4)])
def test_every_parquet_row_is_in_one_shard(tmp_path: Path, group: int, max_rows: int) -> None:
    write(tmp_path / "b.parquet", range(50, 73), group)
    write(tmp_path / "a.parquet", range(50), group)
    shards = shards_of(parquet_inputs(str(tmp_path), "text"), max_rows)
    tables = [read(shard) for shard in shards]
    assert pa.concat_tables(tables).column("id").to_pylist() == list(range(73))
    assert [len(table) for table in tables] == [shard.num_rows for shard in shards]
    assert [shard.number for shard in shards] == list(range(len(shards)))
    assert all(1 <= shard.num_rows <= max_rows for shard in shards)


def test_unusable_parquet_inputs_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="IN: there is no Parquet file"):
        parquet_inputs(str(tmp_path), "text")
    write(tmp_path / "a.parquet", range(3))
    with pytest.raises(UsageError, match="has no column 'body'; it has id, text; see --field"):
        parquet_inputs(str(tmp_path), "body")
    write(tmp_path / "b.parquet", range(3), other=[1, 2, 3])
    with pytest.raises(UsageError, match=r"b\.parquet has other columns than"):
        parquet_inputs(str(tmp_path), "text")
    twice = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(UsageError, match="two columns are named 'text'; rename one"):
        parquet_inputs(str(tmp_path / "twice.parquet"), "text")


def test_damaged_file_and_missing_column_are_named(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, output = write(tmp_path / "a.parquet", range(6), 2), tmp_path / "out.npy"
    monkeypatch.setattr(parquet_file, "PARQUET_ROWS_AT_ONCE", 2)
    with pytest.raises(UsageError, match="has no column 'body'"):
        run(path, output, field="body")
    content, page = path.read_bytes(), parquet.read_metadata(path).row_group(2).column(1).data_page_offset
    path.write_bytes(content[:page] + b"\xff" * 16 + content[page + 16 :])
    with pytest.raises(CommandError, match=r"a\.parquet, row 5 or one soon after it: it cannot be read as Parquet"):
        run(path, output)
    path.write_bytes(content[:-1])
    with pytest.raises(CommandError, match=r"a\.parquet: it cannot be read as Parquet"):
        run(path, output)


def test_rewritten_input_is_rejected_and_has_another_digest(tmp_path: Path, monkeypatch) -> None:
    path = write(tmp_path / "a.parquet", range(30))
    inputs = parquet_inputs(str(path), "text")
    first, (shard,) = stat_digest(inputs), shards_of(inputs, 100)
    assert first == stat_digest(parquet_inputs(str(path), "text"))
    write(path, range(29))
    assert first != stat_digest(inputs)
    with pytest.raises(CommandError, match="was changed while it was read"):
        read(shard)
    path.unlink()
    with pytest.raises(CommandError, match=r"a\.parquet: it cannot be read: No such file or directory$"):
        read(shard)
    write(path, range(30))
    monkeypatch.setattr(parquet_file, "_sliced", Mock(side_effect=LookupError))
    with pytest.raises(LookupError):  # an error of our own is not one of the file
        read(shard)


def test_shard_may_begin_far_inside_a_row_group(tmp_path: Path) -> None:
    (rows,) = parquet_inputs(str(write(tmp_path / "a.parquet", range(140_000), 200_000)), "text")
    for shard in rows.shards(60_000, 0):
        ids = rows.table(shard).column("id").to_pylist()
        assert ids == list(range(shard.start, min(shard.start + 60_000, 140_000)))


def test_missing_pyarrow_names_the_pip_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", range(1))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UsageError, match=r"^FILE: Parquet needs pyarrow: run `pip install 'penstock\[parquet\]'`"):
        open_input(path, "text")
    with pytest.raises(UsageError, match=r"^--output: Parquet needs pyarrow"):
        output_file.writer_for(path)
