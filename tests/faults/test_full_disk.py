"""A full disk under the model cache, the log, the sockets and the outputs. The disks are real, of a few megabytes."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.server.embed_jobs.job_folder import JobFolder, Shard, ShardVectors
from penstock.server.settings import CommandError

from ..servers import COMMAND, MIB, Launch, Server
from ..waiting import wait_until

COMMIT = "0" * 40


@pytest.fixture
def hub(small_bert: Path) -> Iterator[str]:
    """The URL of a model hub with one model, owner/name."""
    files = [path for path in small_bert.iterdir() if path.is_file()]
    tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": COMMIT} for f in files]
    card = {"id": "owner/name", "sha": COMMIT, "siblings": [{"rfilename": f.name} for f in files]}

    class Hub(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            file = small_bert / self.path.rpartition("/")[2]
            headers = {"content-type": "application/json"}
            if self.path.startswith("/api/models/"):
                content = json.dumps(tree if "/tree/" in self.path else card).encode()
            elif file.is_file():
                content = file.read_bytes()
                headers = {"etag": f'"{hashlib.sha256(content).hexdigest()}"', "x-repo-commit": COMMIT}
            else:
                self.send_error(404)
                return
            self.send_response(200)
            for name, value in {**headers, "content-length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                with contextlib.suppress(ConnectionError):  # the client's disk is full
                    self.wfile.write(content)

        do_GET = do_HEAD

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def failed_start(server: Server) -> str:
    """Wait for the end of a server that cannot load its model. Returns the error line."""
    assert server.process.wait(100) == 3
    assert "Traceback" not in server.log.read_text()
    (line,) = [line for line in server.log.read_text().splitlines() if " ERROR " in line]
    return line


@pytest.mark.slow
def test_download_that_fills_the_disk_succeeds_later(launch: Launch, hub: str, small_disk) -> None:
    disk = small_disk(4 * MIB)  # the model has 8
    online = {"HF_ENDPOINT": hub, "HF_HOME": str(disk.folder), "HF_HUB_OFFLINE": "0"}
    line = failed_start(launch(model="owner/name", ready=False, **online))
    assert "No space left on device" in line
    assert str(disk.folder) in line
    # Offline, an incomplete download is no model.
    failed_start(launch(model="owner/name", ready=False, **online | {"HF_HUB_OFFLINE": "1"}))
    disk.free(64 * MIB)
    assert launch(model="owner/name", **online).embed("a").status_code == 200


@pytest.mark.slow
def test_server_on_a_full_disk_serves_and_replaces_its_engine(launch: Launch, small_disk) -> None:
    disk = small_disk(8 * MIB)
    folders = {name: str(disk.folder) for name in ("TMPDIR", "HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR")}
    server = launch("--access-log", log=disk.folder / "log.txt", HF_HUB_OFFLINE="1", **folders)
    disk.fill()
    for _ in range(50):
        assert server.embed(["word " * 20] * 4).status_code == 200
    (worker,) = server.children()
    os.kill(worker, signal.SIGKILL)
    server.wait_for("/health/ready", 503)
    server.wait_for("/health/ready", 200)
    assert server.embed("a").status_code == 200
    assert server.metric("penstock_engine_restarts_total") == 1
    size = server.log.stat().st_size
    disk.free()
    server.embed("a")
    wait_until(lambda: server.log.stat().st_size > size)
    assert server.stop() == 0


@pytest.mark.slow
def test_server_without_space_for_its_log_serves(launch: Launch) -> None:
    server = launch("--access-log", "--log-level", "debug", log=Path("/dev/full"))
    for _ in range(20):
        assert server.embed("a").status_code == 200
    assert server.stop() == 0


def test_job_on_a_full_disk_loses_no_shard(small_disk) -> None:
    disk, rows = small_disk(MIB), np.arange(64 * 1024, dtype=np.float32).reshape(-1, 64)
    job, identity = JobFolder(disk.folder / "out.npy.partial", ".npy", "delete the folder"), {"input": "x"}
    shards: list[Shard] = []

    def write() -> None:
        with job.locked():
            job.begin(identity)
            while True:
                shard = Shard(len(shards), "in.txt", len(shards) * len(rows), len(rows))
                with job.writing():
                    job.write_vectors(shard, rows)
                shards.append(shard)

    with pytest.raises(CommandError, match=r"out.npy.partial cannot be written: No space left on device"):
        write()
    assert shards
    job.begin(identity)
    assert job.left(shards) == []
    vectors = ShardVectors(job, shards)
    np.testing.assert_array_equal(vectors.rows(range(vectors.num_rows)), np.concatenate([rows] * len(shards)))
    disk.free()
    job.begin(identity)
    assert job.left(shards) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["npy", "jsonl", "parquet"])
def test_embed_on_a_full_disk_continues_later(kind: str, small_bert: Path, small_disk, tmp_path: Path) -> None:
    num_rows = 6_000  # of 256 bytes
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"hello {i}\n" for i in range(num_rows)))
    disk = small_disk(MIB)
    output = disk.folder / f"out.{kind}"
    flags = ("--dtype", "float32", "--device", "cpu", "--batch-size", "256")

    def embed() -> tuple[int, str]:
        command = [*COMMAND, "embed", str(texts), "--model", str(small_bert), "--output", str(output), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr.splitlines()[-1]

    code, line = embed()
    assert code == 1
    assert "No space left on device" in line
    assert str(disk.folder) in line
    parts = (disk.folder / f"out.{kind}.partial").glob("part-*.npy")
    assert 0 < sum(len(np.load(part)) for part in parts) < num_rows
    disk.free(int(1.8 * MIB))  # enough for the shards, not for the output beside them
    code, line = embed()
    assert code == 1
    assert f"all {num_rows} rows are done and kept" in line
    assert not output.exists()
    disk.free(64 * MIB)
    assert embed()[0] == 0
    assert output.stat().st_size > num_rows * 256
    assert [path.name for path in disk.folder.iterdir()] == [output.name]
