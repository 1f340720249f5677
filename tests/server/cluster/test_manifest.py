"""What a run on a cluster leaves behind, and how it goes on, without Ray."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.server.cluster.embedder import with_vectors
from penstock.server.cluster.manifest import MANIFEST, Output
from penstock.server.cluster.pieces import Piece
from penstock.server.settings import CommandError, UsageError

IDENTITY = {"input": "i", "model": "m", "dimensions": None}
PIECES = [Piece(number, "a.parquet", 4 * number, 4, (0,), 4 * number) for number in range(3)]
TABLE = pa.table({"id": [1, 2, 3, 4]})


@pytest.fixture
def output(tmp_path: Path) -> Output:
    return Output(tmp_path / "out")


def test_a_run_goes_on_with_what_is_not_done(output: Output) -> None:
    output.begin(IDENTITY, overwrite=False)
    assert output.left(PIECES) == PIECES
    output.write(PIECES[1], TABLE)
    output.begin(IDENTITY, overwrite=False)
    assert output.left(PIECES) == [PIECES[0], PIECES[2]]


def test_a_piece_is_done_when_its_file_is_whole(output: Output) -> None:
    output.begin(IDENTITY, overwrite=False)
    path = output.folder / PIECES[0].file_name
    output.write(PIECES[0], TABLE)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert not output.has(PIECES[0])
    path.write_bytes(b"")
    assert not output.has(PIECES[0])
    output.write(PIECES[0], TABLE.slice(1))  # of another --piece-rows, say
    assert not output.has(PIECES[0])
    output.write(PIECES[0], TABLE)
    assert output.has(PIECES[0])


def test_a_piece_that_is_written_twice_is_there_once(output: Output) -> None:
    output.begin(IDENTITY, overwrite=False)
    for _ in range(2):
        output.write(PIECES[0], TABLE)
    assert sorted(path.name for path in output.folder.iterdir()) == [MANIFEST, "part-00000000.parquet"]


def test_a_write_that_fails_leaves_nothing(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    output.begin(IDENTITY, overwrite=False)

    def full(table: pa.Table, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        output.write(PIECES[0], TABLE)
    assert [path.name for path in output.folder.iterdir()] == [MANIFEST]


def test_another_run_is_not_gone_on_with(output: Output) -> None:
    output.begin(IDENTITY, overwrite=False)
    output.write(PIECES[0], TABLE)
    with pytest.raises(UsageError, match="holds a run with another model, dimensions; name another folder"):
        output.begin(IDENTITY | {"model": "n", "dimensions": 8}, overwrite=False)
    output.begin(IDENTITY | {"model": "n"}, overwrite=True)
    assert output.left(PIECES) == PIECES


def test_a_finished_run_is_kept(output: Output) -> None:
    output.begin(IDENTITY, overwrite=False)
    output.write(PIECES[0], TABLE)
    (output.folder / ".unfinished-of-a-killed-process").write_bytes(b"half")
    output.finish(IDENTITY)
    assert not list(output.folder.glob(".unfinished*"))
    with pytest.raises(UsageError, match="is finished; give --overwrite"):
        output.begin(IDENTITY, overwrite=False)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_something_else_is_left_alone(output: Output, overwrite: bool) -> None:
    output.folder.mkdir()
    (output.folder / "part-00000000.parquet").write_bytes(b"of somebody else")
    with pytest.raises(UsageError, match=r"holds part-00000000\.parquet; name a folder that is new or empty"):
        output.begin(IDENTITY, overwrite=overwrite)
    assert (output.folder / "part-00000000.parquet").read_bytes() == b"of somebody else"


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"identity": 1, "finished": False}), "{}"])
def test_a_damaged_manifest_is_named(output: Output, content: str) -> None:
    output.folder.mkdir()
    (output.folder / MANIFEST).write_text(content)
    with pytest.raises(UsageError, match=r"_manifest\.json is damaged"):
        output.begin(IDENTITY, overwrite=False)
    output.begin(IDENTITY, overwrite=True)


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(CommandError, match="cannot be written"):
        Output(tmp_path / "out").begin(IDENTITY, overwrite=False)


def test_vectors_are_a_fixed_size_list() -> None:
    vectors = np.arange(8, dtype=np.float32).reshape(4, 2)
    table = with_vectors(TABLE, vectors)
    assert table.schema.field("embedding").type == pa.list_(pa.float32(), 2)
    assert table.column("embedding").to_pylist() == vectors.tolist()
    assert table.column_names == ["id", "embedding"]
