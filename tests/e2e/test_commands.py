"""`penstock embed` and `penstock info` as processes on a real model."""

import json
import re
import subprocess
from pathlib import Path

import httpx
import numpy as np


def test_a_killed_embed_run_goes_on(tmp_path: Path, penstock, run, server, http: httpx.Client) -> None:
    """Killed as soon as anything is shown, long before 256 rows: nothing that was shown is done again."""
    texts = [f"text number {i} about water and gates" + ", water and gates" * 30 for i in range(500)]
    source, output = tmp_path / "in.txt", tmp_path / "out.npy"
    source.write_text("\n".join(texts))
    embed = ("embed", str(source), "--output", str(output), "--dtype", "float32")
    first = subprocess.Popen([*penstock, *embed], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    num_shown, line = 0, b""
    while not num_shown:
        byte = first.stderr.read(1)
        assert byte, "the run ended before it was killed"
        line = b"" if byte == b"\r" else line + byte
        if found := re.match(rb"(\d+)/500 rows", line):
            num_shown = int(found[1])
    first.kill()
    first.wait()
    first.stderr.close()
    job = json.loads((tmp_path / "out.npy.partial" / "job.json").read_bytes())
    num_done = sum(end - start for start, end in job["done"])
    assert 0 < num_shown <= num_done < len(texts)
    assert not output.exists()

    second = run(*embed)
    assert second.returncode == 0, second.stderr
    counts = [int(count) for count in re.findall(r"(\d+)/500 rows", second.stderr)]
    assert counts == sorted(counts)
    assert (counts[-1], "100%" in second.stderr) == (len(texts), True)
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
