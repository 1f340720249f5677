"""A disk without a free byte: real ones, of a few megabytes, under the cache, the log, the sockets and the outputs."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from penstock.server.embed_jobs.job_folder import JobFolder, Shard, ShardVectors
from penstock.server.settings import CommandError

MIB = 2**20
COMMAND = (sys.executable, "-P", "-m", "penstock.server")
COMMIT = "0" * 40


@pytest.fixture
def hub(small_bert: Path) -> Iterator[str]:
    """The address of a model hub that has one model, owner/name."""

    class Hub(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            files = [path for path in small_bert.iterdir() if path.is_file()]
            file = small_bert / self.path.rpartition("/")[2]
            headers = {"content-type": "application/json"}
            if "/tree/" in self.path:
                sizes = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": COMMIT} for f in files]
                content = json.dumps(sizes).encode()
            elif self.path.startswith("/api/models/"):
                siblings = [{"rfilename": f.name} for f in files]
                content = json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": siblings}).encode()
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
                self.wfile.write(content)

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # the client's disk is full
                super().handle()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_download_that_fills_the_disk(launch, hub: str, small_disk) -> None:
    disk = small_disk(4 * MIB)  # the model has 8
    environment = {"HF_ENDPOINT": hub, "HF_HOME": str(disk.folder), "HF_HUB_OFFLINE": "0"}
    began_s = time.monotonic()
    server = launch(model="owner/name", ready=False, **environment)
    assert server.process.wait(100) == 3
    (line,) = [line for line in server.log.read_text().splitlines() if " ERROR " in line]
    print(f"given up after {time.monotonic() - began_s:.1f} s: {line}")
    assert "No space left on device" in line
    assert str(disk.folder) in line
    assert "Traceback" not in server.log.read_text()

    offline = launch(model="owner/name", ready=False, HF_HOME=str(disk.folder), HF_HUB_OFFLINE="1")
    assert offline.process.wait(100) == 3  # half a model is never taken for a whole one
    (line,) = [line for line in offline.log.read_text().splitlines() if " ERROR " in line]
    print(f"the next start, offline: {line}")

    disk.make_room(64 * MIB)
    server = launch(model="owner/name", **environment)
    response = httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}, timeout=60)
    print(f"the next start with room: {response.status_code}, {disk.num_free / MIB:.0f} MiB free")
    assert response.status_code == 200


@pytest.mark.slow
def test_a_disk_that_fills_up_under_a_running_server(launch, small_disk) -> None:
    disk = small_disk(8 * MIB)
    places = {name: str(disk.folder) for name in ("TMPDIR", "HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR")}
    server = launch("--access-log", log=disk.folder / "log.txt", HF_HUB_OFFLINE="1", **places)
    disk.fill()
    size = server.log.stat().st_size
    body = {"input": ["word " * 20] * 4}
    with httpx.Client(base_url=server.url, timeout=120) as client:
        for _ in range(50):
            assert client.post("/v1/embeddings", json=body).status_code == 200
        (worker,) = server.children()
        os.kill(worker, signal.SIGKILL)
        server.wait_until("/health/ready", 503)
        ready_s = server.wait_until("/health/ready", 200)  # sockets on the disk and lines in the log, or no longer
        assert client.post("/v1/embeddings", json=body).status_code == 200
        assert client.get("/metrics").status_code == 200
    lost = server.log.stat().st_size - size
    disk.make_room()
    httpx.post(f"{server.url}/v1/embeddings", json=body)
    time.sleep(0.2)
    print(f"52 answers and a new engine after {ready_s:.1f} s on a full disk; the log grew by {lost} bytes")
    assert server.log.stat().st_size > size + lost, "the log does not go on when there is room again"
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0


@pytest.mark.slow
def test_a_server_whose_log_goes_nowhere_from_the_start(launch) -> None:
    server = launch("--access-log", "--log-level", "debug", log=Path("/dev/full"))
    for _ in range(20):
        assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}, timeout=60).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    code = server.process.wait(60)
    print(f"20 answers with a log that takes nothing; exit code {code}")
    assert code == 0


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
    disk.make_room()
    job.begin(identity)
    assert job.left(shards) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["npy", "jsonl", "parquet"])
def test_embedding_a_file_onto_a_full_disk(kind: str, small_bert: Path, small_disk, tmp_path: Path) -> None:
    num_rows = 6_000  # of 256 bytes
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"hello {i}\n" for i in range(num_rows)))
    disk = small_disk(MIB)
    output = disk.folder / f"out.{kind}"
    command = [*COMMAND, "embed", str(texts), "--model", str(small_bert), "--device", "cpu"]
    command += ["--dtype", "float32", "--output", str(output), "--batch-size", "256"]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)

    done = run()
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    print(line)
    assert "No space left on device" in line
    assert str(disk.folder) in line
    parts = (disk.folder / f"out.{kind}.partial").glob("part-*.npy")
    assert 0 < sum(len(np.load(part)) for part in parts) < num_rows
    disk.make_room(int(1.8 * MIB))  # enough for the rows, not for the output beside them
    done = run()
    line = done.stderr.splitlines()[-1]
    print(line)
    assert done.returncode == 1
    assert f"all {num_rows} rows are done and kept" in line
    assert not output.exists()
    disk.make_room(64 * MIB)
    done = run()
    assert done.returncode == 0, done.stderr
    assert output.stat().st_size > num_rows * 256
    assert [path.name for path in disk.folder.iterdir()] == [output.name]
