import csv
import itertools
from pathlib import Path

import pytest

from penstock.engine.protocol.errors import InvalidRequestError
from penstock.server.embed_jobs import input_file as input_module, input_formats
from penstock.server.embed_jobs.input_file import BadRow, Row
from penstock.server.embed_jobs.input_formats import open_input


@pytest.mark.parametrize(("max_rows", "max_chars"), [(5, 10**6), (1000, 39), (1000, 38), (1, 1)])
def test_shards_are_bounded_in_rows_and_characters(max_rows: int, max_chars: int, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(input_module, "SHARD_ROWS", max_rows)
    monkeypatch.setattr(input_module, "SHARD_CHARS", max_chars)
    texts = [f"text number {i}" for i in range(23)] + ["", "naïve 東京"]
    (tmp_path / "in.txt").write_text("\n".join(texts))
    source = open_input(tmp_path / "in.txt", "text")
    summarize = source.summarize(lambda row: None, skip_bad=False)
    shards = [[row.content for row in rows] for _, rows in source.read_shards(summarize.shards)]
    assert [text for shard in shards for text in shard] == texts
    assert summarize.num_rows == len(texts)
    for shard in shards:
        assert len(shard) == 1 or (len(shard) <= max_rows and sum(map(len, shard)) <= max_chars)
    for before, after in itertools.pairwise(shards):
        assert len(before) == max_rows or sum(map(len, before)) + len(after[0]) > max_chars


@pytest.mark.parametrize("name", ["in.csv", "in.tsv", "in.jsonl"])
def test_long_values_are_read(tmp_path: Path, name: str) -> None:
    text, before = "a" * 300_000, csv.field_size_limit(1000)
    (tmp_path / name).write_text(f'{{"text": "{text}"}}' if name == "in.jsonl" else f"text\n{text}\n")
    try:
        assert [row.content for row in open_input(tmp_path / name, "text").rows() if isinstance(row, Row)] == [text]
        assert csv.field_size_limit() == 1000
    finally:
        csv.field_size_limit(before)


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_too_long_lines_are_bad_rows(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_formats, "_MAX_LINE_BYTES", 16)
    rows = ["b", "b" * 4, "b" * 5, "b" * 99, "b", "b" * 20]
    path = tmp_path / f"in.{suffix}"
    path.write_text("\n".join(f'{{"text":"{row}"}}' for row in rows))
    found = list(open_input(path, "text").rows())
    assert [type(row) for row in found] == [Row, Row, BadRow, BadRow, Row, BadRow]
    assert found[2] == BadRow(3, "longer than 16 bytes")


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
        monkeypatch.setattr("penstock.engine.images.values._MAX_FILE_BYTES", limit)
        (found,) = open_input(tmp_path, "").rows()
        assert type(found) is kind
    assert "'a.png', which is larger than 0 MiB" in str(found)
    read_image_value = "penstock.server.embed_jobs.input_file.read_image_value"
    monkeypatch.setattr(read_image_value, lambda name, folder: folder / "b.png")  # removed after its check
    (found,) = open_input(tmp_path, "").rows()
    assert "'b.png', which cannot be read: No such file" in str(found)


def test_image_removed_while_rows_are_counted_stays_a_row(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"0123")
    found = open_input(tmp_path, "").summarize(lambda row: Path(row.content).unlink(), skip_bad=False)
    assert (found.num_rows, found.sizes.total()) == (1, 1)
