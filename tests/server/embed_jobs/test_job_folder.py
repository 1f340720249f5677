import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.server.embed_jobs.job_folder import MANIFEST, JobFolder, Shard, ShardVectorReader
from penstock.server.settings import CommandError, UsageError

IDENTITY = {"input": "i", "model": "m", "dimensions": None}
SHARDS = [Shard(number, "a.parquet", 4 * number, 4) for number in range(3)]
TABLE = pa.table({"id": [1, 2, 3, 4]})


@pytest.fixture
def output(tmp_path: Path) -> JobFolder:
    return JobFolder(tmp_path / "out", ".parquet", "give --overwrite")


@pytest.fixture
def job(tmp_path: Path) -> JobFolder:
    return JobFolder(tmp_path / "out.npy.partial", ".npy", "delete the folder")


def test_shard_is_finished_when_its_file_is_whole(output: JobFolder, job: JobFolder) -> None:
    for folder, write_rows in (
        (output, lambda num_rows: output.write_table(SHARDS[0], TABLE.slice(0, num_rows))),
        (job, lambda num_rows: job.write_vectors(SHARDS[0], np.ones((num_rows, 8), np.float32))),
    ):
        folder.begin(IDENTITY)
        write_rows(4)
        assert folder.is_finished(SHARDS[0])
        content = folder.path(SHARDS[0]).read_bytes()
        for damaged in (content[:-1], content + b"x", b"", content[:40]):
            folder.path(SHARDS[0]).write_bytes(damaged)
            assert not folder.is_finished(SHARDS[0])
        write_rows(3)
        assert not folder.is_finished(SHARDS[0])


def test_failed_write_leaves_no_file(output: JobFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    output.begin(IDENTITY)

    def full(table: pa.Table, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        output.write_table(SHARDS[0], TABLE)
    assert [path.name for path in output.folder.iterdir()] == [MANIFEST]


def test_manifest_of_a_new_folder_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, synced = JobFolder(tmp_path / "a" / "b", ".npy", ""), list[Path]()
    monkeypatch.setattr("os.fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").readlink()))
    job.begin(IDENTITY)
    manifest = {"identity": IDENTITY, "finished": False}
    assert (job.folder / MANIFEST).read_text() == json.dumps(manifest, indent=2)
    assert [path.name for path in job.folder.iterdir()] == [MANIFEST]
    assert [path.name.startswith(".unfinished-") for path in synced] == [True, False]
    assert synced[1] == job.folder


def test_finished_job_is_not_overwritten(output: JobFolder) -> None:
    output.begin(IDENTITY)
    output.write_table(SHARDS[0], TABLE)
    (output.folder / ".unfinished-of-a-killed-process").write_bytes(b"half")
    output.finish(IDENTITY)
    assert not list(output.folder.glob(".unfinished*"))
    with pytest.raises(UsageError, match="is finished; give --overwrite"):
        output.begin(IDENTITY)


@pytest.mark.parametrize(
    ("name", "overwrite"), [("part-00000000.parquet", False), ("part-00000000.parquet", True), ("job.json", False)]
)
def test_folder_with_other_files_is_left_alone(output: JobFolder, name: str, overwrite: bool) -> None:
    output.folder.mkdir()
    (output.folder / name).write_bytes(b"of another program")
    with pytest.raises(UsageError, match=f"has {name}, which is not a file of a job of this version: use"):
        output.begin(IDENTITY, overwrite=overwrite)
    assert (output.folder / name).read_bytes() == b"of another program"


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"identity": 1, "finished": true}', '{"identity": {}, "finished": 1}']
)
def test_damaged_manifest_is_rejected(output: JobFolder, content: str) -> None:
    output.folder.mkdir()
    (output.folder / MANIFEST).write_text(content)
    with pytest.raises(UsageError, match=rf"{MANIFEST} is damaged \(.*\); give --overwrite to start over"):
        output.begin(IDENTITY)


def test_overwriting_deletes_only_the_files_of_the_job(output: JobFolder) -> None:
    output.begin(IDENTITY)
    output.write_table(SHARDS[0], TABLE)
    (output.folder / ".unfinished-of-a-killed-process").write_bytes(b"half")
    (output.folder / "notes.txt").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"has notes\.txt"):
        output.begin(IDENTITY, overwrite=True)
    assert [path.name for path in output.folder.iterdir()] == ["notes.txt"]
    (output.folder / "notes.txt").unlink()
    later = JobFolder(output.folder, ".parquet", "give --overwrite")
    later.begin({**IDENTITY, "model": "n"}, overwrite=True)
    with pytest.raises(UsageError, match="another model; run the same command again"):
        output.begin(IDENTITY)
    later.write_table(SHARDS[0], TABLE)
    assert (later.is_finished(SHARDS[0]), output.is_finished(SHARDS[0])) == (True, False)
    with pytest.raises(UsageError, match="holds another job now"):
        output.write_table(SHARDS[0], TABLE)


def test_folder_that_cannot_be_written_is_rejected(output: JobFolder) -> None:
    output.folder.write_bytes(b"a file")
    with pytest.raises(UsageError, match="is a file, but it must be the folder"), output.locked():
        pass
    with pytest.raises(CommandError, match="cannot be written: File exists; finished shards are kept there"):
        output.begin(IDENTITY)


def test_shards_are_joined_as_one_array(job: JobFolder) -> None:
    job.begin(IDENTITY)
    rows = np.arange(96, dtype=np.float32).reshape(12, 8)
    job.write_vectors(SHARDS[0], rows[:4])
    job.write_vectors(SHARDS[1], np.zeros((4, 0), np.float32))  # no row has a vector
    job.write_vectors(SHARDS[2], rows[8:])
    vectors = ShardVectorReader(job, SHARDS)
    assert (vectors.num_rows, vectors.width) == (12, 8)
    np.testing.assert_array_equal(vectors.rows([1, 3, 8, 11]), rows[[1, 3, 8, 11]])
    assert np.isnan(vectors.rows([5])).all()


def test_lock_of_a_removed_folder_is_rejected(job: JobFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", lambda *_: job.remove())  # another process ends at this moment
    with pytest.raises(UsageError, match="run the command again"), job.locked():
        pytest.fail("two processes would write to the folder")


def test_second_process_is_rejected_the_folder(job: JobFolder) -> None:
    with job.locked(), pytest.raises(UsageError, match="another process is writing"), job.locked():
        pass
    assert not job.folder.exists(), "a folder without shards is removed"
    with job.locked():
        job.begin(IDENTITY)
        job.write_vectors(SHARDS[0], np.ones((4, 8), np.float32))
    assert job.unfinished_shards(SHARDS) == SHARDS[1:]
