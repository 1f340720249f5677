"""`penstock embed` and `penstock info` as processes on a real model."""

import signal
import subprocess
import time
from pathlib import Path

import httpx
import numpy as np
import pytest


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGKILL, -9, ""),
        (signal.SIGTERM, 143, "penstock: terminated; the same command goes on where it stopped\n"),
    ],
)
def test_stopped_embed_run_goes_on(
    number: int, code: int, said: str, tmp_path: Path, penstock, run, server, http: httpx.Client
) -> None:
    """Stopped as soon as a shard is done, long before the last shard."""
    texts = [f"text number {i} about water and gates" + ", water and gates" * 30 for i in range(1200)]
    source, output = tmp_path / "in.txt", tmp_path / "out.npy"
    source.write_text("\n".join(texts))
    embed = ("embed", str(source), "--output", str(output), "--dtype", "float32")
    first = subprocess.Popen([*penstock, *embed], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (num_done := rows_done(output)):
        assert first.poll() is None, "the run ended before it was stopped"
        time.sleep(0.01)
    first.send_signal(number)
    assert first.communicate(timeout=240)[1].endswith(said)
    assert first.returncode == code
    assert num_done <= rows_done(output) < len(texts)
    assert not output.exists()

    second = run(*embed)
    assert second.returncode == 0, second.stderr
    assert f"1200 rows are in {output}" in second.stderr
    assert "\r" not in second.stderr
    vectors = np.load(output)
    answer = http.post("/v1/embeddings", json={"input": texts}).json()
    np.testing.assert_allclose(vectors, [row["embedding"] for row in answer["data"]], atol=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.npy"]


def rows_done(output: Path) -> int:
    return sum(len(np.load(path)) for path in output.with_name(output.name + ".partial").glob("part-*.npy"))


def test_info_shows_the_resolved_table(run, default_model: Path) -> None:
    done = run("info")
    lines = {line.split()[0]: line for line in done.stdout.splitlines()[2:]}
    assert "MEAN" in lines["sequence_pooling"]
    assert "1_Pooling/config.json" in lines["sequence_pooling"]
    assert "256" in lines["max_model_len"]
