"""A full disk under the model cache, the log, the sockets and the outputs. The disks are real, of a few megabytes."""

import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ..servers import COMMAND, MIB, Launch
from ..waiting import wait_until


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
    assert f"the vectors of all {num_rows} rows are kept" in line
    assert not output.exists()
    disk.free(64 * MIB)
    assert embed()[0] == 0
    assert output.stat().st_size > num_rows * 256
    assert [path.name for path in disk.folder.iterdir()] == [output.name]
