import csv
import itertools
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.engine.protocol.errors import InvalidRequestError
from penstock.server.embed_jobs import input_file as input_module
from penstock.server.embed_jobs.input_file import BadRow, ParquetRows, Row, open_input, parquet_inputs, stat_digest
from penstock.server.embed_jobs.job_folder import Shard
from penstock.server.settings import CommandError, UsageError


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


@pytest.mark.parametrize(("max_rows", "max_chars"), [(5, 10**6), (1000, 60), (1, 1)])
def test_shards_are_bounded_in_rows_and_characters(max_rows: int, max_chars: int, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(input_module, "SHARD_ROWS", max_rows)
    monkeypatch.setattr(input_module, "SHARD_CHARS", max_chars)
    texts = [f"text number {i}" for i in range(23)] + ["", "naïve 東京"]
    (tmp_path / "in.txt").write_text("\n".join(texts))
    source = open_input(tmp_path / "in.txt", "text")
    summarize = source.summarize(lambda row: None)
    shards = [[row.content for row in rows] for _, rows in source.read_shards(summarize.shards)]
    assert [text for shard in shards for text in shard] == texts
    assert summarize.num_rows == len(texts)
    for shard in shards:
        assert len(shard) == 1 or (len(shard) <= max_rows and sum(map(len, shard)) <= max_chars)
    for before, after in itertools.pairwise(shards):
        assert len(before) == max_rows or sum(map(len, before)) + len(after[0]) > max_chars


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


def test_shard_may_begin_far_inside_a_row_group(tmp_path: Path) -> None:
    (rows,) = parquet_inputs(str(write(tmp_path / "a.parquet", range(140_000), 200_000)), "text")
    for shard in rows.shards(60_000, 0):
        ids = rows.table(shard).column("id").to_pylist()
        assert ids == list(range(shard.start, min(shard.start + 60_000, 140_000)))


@pytest.mark.parametrize("name", ["in.csv", "in.tsv", "in.jsonl"])
def test_long_values_are_read(tmp_path: Path, name: str) -> None:
    text, before = "a" * 300_000, csv.field_size_limit(1000)
    (tmp_path / name).write_text(f'{{"text": "{text}"}}' if name == "in.jsonl" else f"text\n{text}\n")
    try:
        assert [row.content for row in open_input(tmp_path / name, "text").rows() if isinstance(row, Row)] == [text]
    finally:
        csv.field_size_limit(before)


def test_file_that_became_shorter_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text("a\nb\n")
    source = open_input(path, "text")
    shards = source.summarize(lambda row: None).shards
    path.write_text("a\n")
    with pytest.raises(CommandError, match=r"in\.txt was changed while it was read; start over"):
        list(source.read_shards(shards))


def test_unreadable_images_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"0123")
    (row,) = open_input(tmp_path, "").rows()
    assert isinstance(row, Row)
    path.unlink()
    with pytest.raises(InvalidRequestError, match=r"a\.png cannot be read: No such file"):
        row.read()
    path.write_bytes(b"01234")
    for limit, kind in ((5, Row), (4, BadRow)):
        monkeypatch.setattr("penstock.server.embed_jobs.image_values._MAX_FILE_BYTES", limit)
        (found,) = open_input(tmp_path, "").rows()
        assert type(found) is kind
    assert "'a.png', which is larger than 256 MiB" in str(found)


def test_missing_pyarrow_names_the_pip_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", range(1))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UsageError, match=r"^FILE: Parquet needs pyarrow: run `pip install 'penstock\[parquet\]'`"):
        open_input(path, "text")


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


def test_rewritten_input_is_rejected_and_has_another_digest(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", range(30))
    inputs = parquet_inputs(str(path), "text")
    first, (shard,) = stat_digest(inputs), shards_of(inputs, 100)
    assert first == stat_digest(parquet_inputs(str(path), "text"))
    write(path, range(29))
    assert first != stat_digest(inputs)
    with pytest.raises(CommandError, match="was changed while it was read"):
        read(shard)
    path.unlink()
    with pytest.raises(CommandError, match="cannot be read"):
        read(shard)
