import asyncio
import gc
import sqlite3
import threading
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
from fastapi import HTTPException

from penstock.engine.protocol.errors import InvalidRequestError, StorageError
from penstock.server.batches.database import BatchDatabase
from penstock.server.batches.file_store import DataDir, FileStore
from penstock.server.batches.records import FileRecord
from penstock.server.batches.service import BatchService
from penstock.server.batches.upload import Upload
from penstock.server.settings import ServerSettings, UsageError

from ...tables import cases
from ...waiting import until

HEAD = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\nContent-Type: x/y\r\n\r\n'
END = b"\r\n--b--\r\n"


async def in_parts(body: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


@pytest.fixture
async def files(tmp_path: Path):
    data, threads = DataDir(tmp_path / "data"), set(threading.enumerate())
    store = BatchDatabase(data.database)
    yield FileStore(data, store, 100_000, time.time, 10_000)
    await store.close()
    data.close()
    assert not [each for each in threading.enumerate() if each not in threads and each.name.startswith("batches")]


async def receive(files: FileStore, body: bytes, size: int = 1000, media: str = "multipart/form-data") -> FileRecord:
    return await files.receive(f"{media}; boundary=b", in_parts(body, size), "me")


def is_empty(files: FileStore) -> bool:
    return not list(files.path("x").parent.iterdir())


async def test_invalid_boundary_is_rejected(files: FileStore) -> None:
    with pytest.raises(InvalidRequestError, match="The form cannot be read: "):
        await files.receive(f"multipart/form-data; boundary={'b' * 300}", in_parts(b"", 1), "me")
    assert is_empty(files)


async def test_file_above_the_limit_is_rejected(files: FileStore) -> None:
    await receive(files, HEAD + FILE + bytes(100_000) + END)
    with pytest.raises(HTTPException, match=r"larger than the limit of 100000 bytes \(--max-file-bytes\)") as rejected:
        await receive(files, HEAD + FILE + bytes(100_001) + END)
    assert (rejected.value.status_code, rejected.value.headers) == (413, {"connection": "close"})


@pytest.mark.parametrize("size", [1, 7, 10**6])
async def test_file_is_stored_unchanged(files: FileStore, size: int, monkeypatch) -> None:
    monkeypatch.setattr("penstock.server.batches.upload._PIECE_BYTES", size)
    content = b"\r\n--c\r\n-\r\n--\r\n" * 20 + bytes(range(256))
    file = await receive(files, HEAD + FILE + content + END, size)
    assert files.path(file.id).read_bytes() == content
    assert (file.filename, file.num_bytes, file.purpose) == ("a.jsonl", len(content), "batch")
    assert (await files.find(file.id, "me")) == file


@pytest.mark.parametrize("form", [FILE + b"x\r\n" + HEAD + END[2:], HEAD * 15 + FILE + b"x" + END])
async def test_parts_in_any_order_up_to_sixteen_are_read(files: FileStore, form: bytes) -> None:
    file = await receive(files, form)
    assert files.path(file.id).read_bytes() == b"x"


def field(name: str, value: str) -> bytes:
    return b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), value.encode())


def expiry(seconds: str) -> bytes:
    return field("expires_after[anchor]", "created_at") + field("expires_after[seconds]", seconds)


WRONG = [
    (FILE + b"x" + END, "purpose is null"),
    (field("purpose", "vision") + FILE + b"x" + END, "must be 'batch'"),
    (HEAD + END[2:], "has no file"),
    (HEAD + FILE + b"x\r\n" + FILE + b"y" + END, "more than one file"),
    (HEAD + FILE + b"x\r\n--b", "ends before its last boundary"),
    (b"no form", "cannot be read"),
    (HEAD + b"--b\r\nX: y\r\n\r\nz\r\n" + FILE + b"x" + END, "'' has no use here"),
    (field("other", "1") + HEAD + FILE + b"x" + END, "'other' has no use here"),
    (field("n" * 65, "1" * 4097) + HEAD + FILE + b"x" + END, "longer than 4096 bytes"),
    (field("n" * 65, "1" * 4096) + HEAD + FILE + b"x" + END, "has no use here"),
    (HEAD * 16 + FILE + b"x" + END, "more than 16 parts"),
    (field("expires_after[anchor]", "now") + HEAD + FILE + b"x" + END, "must be 'created_at'"),
    (field("expires_after[seconds]", "3600") + HEAD + FILE + b"x" + END, "must be 'created_at'"),
    *((expiry(seconds) + HEAD + FILE + b"x" + END, "3600 to 2592000") for seconds in ("3599", "2592001", "", "1h")),
    (b"--b\r\n" + b"X-Long: " + b"y" * 100_000 + b"\r\n\r\nx" + END, "cannot be read"),
]


@pytest.mark.parametrize(("body", "part"), WRONG, ids=[part for _, part in WRONG])
async def test_invalid_form_is_rejected_and_leaves_no_file(files: FileStore, body: bytes, part: str) -> None:
    with pytest.raises(InvalidRequestError, match=part) as error:
        await receive(files, body)
    assert len(error.value.param or "") <= 64
    assert is_empty(files)


@pytest.mark.parametrize(
    "media", ["application/json; boundary=b", "multipart/form-data", "multipart/mixed; boundary=b", ""]
)
async def test_body_that_is_no_form_is_rejected_with_415(files: FileStore, media: str) -> None:
    with pytest.raises(HTTPException) as caught:
        await files.receive(media, in_parts(b"", 1), "me")
    assert caught.value.status_code == 415
    assert is_empty(files)


async def test_upload_cancelled_while_it_is_added_keeps_its_file(files: FileStore, monkeypatch) -> None:
    settle, is_settling, may_move_into_place = files._move_into_place, threading.Event(), threading.Event()

    def slow_move_into_place(part: Path, content: Path) -> None:
        is_settling.set()
        assert may_move_into_place.wait(60)
        settle(part, content)

    monkeypatch.setattr(files, "_move_into_place", slow_move_into_place)
    upload = asyncio.create_task(receive(files, HEAD + FILE + b"x" + END))
    await until(is_settling.is_set)
    upload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await upload
    may_move_into_place.set()
    await until(lambda: not files._running_uploads)
    ((count, num_bytes), (content,)) = await files._store.count_and_bytes("me"), files.path("x").parent.iterdir()
    assert (count, num_bytes, content.read_bytes()) == (1, 1, b"x")


async def test_ended_upload_is_freed_without_the_garbage_collector(files: FileStore, monkeypatch) -> None:
    uploads: list[weakref.ref[Upload]] = []
    close = Upload.close
    monkeypatch.setattr(Upload, "close", lambda upload: (uploads.append(weakref.ref(upload)), close(upload)))
    gc.disable()
    try:
        await receive(files, HEAD + FILE + b"x" + END)
        assert [upload() for upload in uploads] == [None]
    finally:
        gc.enable()


async def test_upload_into_a_removed_folder_is_an_error(files: FileStore) -> None:
    files.path("x").parent.rmdir()
    with pytest.raises(StorageError, match="cannot keep the file"):
        await receive(files, HEAD + FILE + b"x" + END)


@cases(__file__, "options", "filename")
async def test_file_name_of_any_form_is_read(files: FileStore, options: str, filename: str) -> None:
    form = f'--b\r\nContent-Disposition: form-data; name="file"; {options}\r\n\r\nx'
    file = await receive(files, HEAD + form.encode(errors="surrogateescape") + END)
    assert file.filename == filename


@pytest.mark.parametrize(("name", "mode"), [("", 0o777), ("secret", 0o644), ("lock", 0o666)])
def test_world_readable_or_writable_file_is_rejected(tmp_path: Path, name: str, mode: int) -> None:
    folder = tmp_path / "data"
    data = DataDir(folder)
    data.close()
    before = (folder / name).stat().st_mode
    (folder / name).chmod(mode)
    with pytest.raises(UsageError, match=r"--data-dir: .*every user.*, or name another folder"):
        DataDir(folder)
    (folder / name).chmod(before)
    again = DataDir(folder)
    assert again.secret == data.secret
    again.close()


def test_database_of_another_version_is_rejected(tmp_path: Path) -> None:
    settings, file, threads = ServerSettings(data_dir=tmp_path), tmp_path / "penstock.db", set(threading.enumerate())
    tmp_path.chmod(0o700)
    with closing(sqlite3.connect(file, isolation_level=None)) as database:
        database.execute("PRAGMA user_version = 9")
    for _ in range(2):  # the first rejection unlocks the folder
        with pytest.raises(UsageError, match="format 9"):
            BatchService(settings)
    file.write_bytes(b"no database" * 100)
    with pytest.raises(UsageError, match="not a database"):
        BatchService(settings)
    assert set(threading.enumerate()) <= threads, "the thread of the database ends"


def test_folder_that_cannot_be_created_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be used"):
        BatchService(ServerSettings(data_dir=tmp_path / "file" / "data"))


async def test_body_may_have_64_kib_beside_its_file(files: FileStore) -> None:
    form = HEAD + FILE + b"x" + END
    largest = form.ljust(100_000 + 65_536, b"\n")
    assert (await receive(files, largest)).num_bytes == 1
    with pytest.raises(HTTPException, match="larger than the limit"):
        await receive(files, largest + b"\n")


async def test_file_expires_when_its_client_says_or_after_30_days(files: FileStore) -> None:
    for form, seconds in ((b"", 30 * 86_400), (expiry("3600"), 3600), (expiry("2592000"), 2_592_000)):
        file = await receive(files, form + HEAD + FILE + b"x" + END)
        assert file.expires_at == file.created_at + seconds


@pytest.mark.parametrize("preamble", [b"", b"x" * 70_000])
async def test_too_large_file_is_rejected_while_it_is_received(files: FileStore, preamble: bytes) -> None:
    num_read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal num_read
        yield preamble + b"\r\n" + HEAD + FILE
        for _ in range(10_000):
            num_read += 1000
            yield b"x" * 1000

    with pytest.raises(HTTPException) as caught:
        await files.receive("multipart/form-data; boundary=b", body(), "me")
    assert (caught.value.status_code, num_read < 1_000_000) == (413, True)
    assert is_empty(files)
