"""`penstock embed` and `penstock info` as processes on a real model."""

import json
import subprocess
import time
from pathlib import Path

import httpx
import numpy as np


def test_a_killed_embed_run_goes_on(tmp_path: Path, penstock, run, server, http: httpx.Client) -> None:
    texts = [f"text number {i} about water and gates" for i in range(200)]
    source, output = tmp_path / "in.txt", tmp_path / "out.npy"
    source.write_text("\n".join(texts))
    embed = ("embed", str(source), "--output", str(output), "--dtype", "float32", "--batch-size", "16")
    first = subprocess.Popen([*penstock, *embed], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    job = tmp_path / "out.npy.partial" / "job.json"
    while not (job.is_file() and json.loads(job.read_text())["num_rows"]):
        assert first.poll() is None
        time.sleep(0.01)
    first.kill()
    first.wait()
    num_done = json.loads(job.read_text())["num_rows"]
    assert 0 < num_done < len(texts)
    assert not output.exists()

    second = run(*embed)
    assert second.returncode == 0, second.stderr
    assert f"{len(texts)}/{len(texts)}" in second.stderr  # the progress bar
    vectors = np.load(output)
    answer = http.post("/v1/embeddings", json={"input": texts}).json()
    np.testing.assert_allclose(vectors, [row["embedding"] for row in answer["data"]], atol=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.npy"]


def test_info_shows_the_resolved_table(run, default_model: Path) -> None:
    done = run("info")
    lines = {line.split()[0]: line for line in done.stdout.splitlines()[2:]}
    assert "MEAN" in lines["sequence_pooling"]
    assert "1_Pooling/config.json" in lines["sequence_pooling"]
    assert "256" in lines["max_model_len"]
