"""`penstock embed` and `penstock info` as processes on a real model."""

import signal
import subprocess
from pathlib import Path

import httpx
import numpy as np

from ..waiting import wait_until


def test_stopped_embed_command_continues(tmp_path: Path, penstock, run, server, http: httpx.Client) -> None:
    """A command that is killed, then terminated, then completed writes every row once and in order."""
    # The spaces fill shards, which are limited in characters, without tokens.
    texts = [f"text number {i} about water and gates{', water and gates' * 5}{' ' * 6000}" for i in range(330)]
    source, output = tmp_path / "in.txt", tmp_path / "out.npy"
    source.write_text("\n".join(texts))
    embed = ("embed", str(source), "--output", str(output), "--dtype", "float32")

    def rows_done() -> int:
        return sum(len(np.load(path)) for path in output.with_name(output.name + ".partial").glob("part-*.npy"))

    num_done = 0
    for number, code, last_line in [
        (signal.SIGKILL, -9, ""),
        (signal.SIGTERM, 143, "penstock: terminated; run the same command again to continue\n"),
    ]:
        stopped = subprocess.Popen([*penstock, *embed], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        wait_until(lambda stopped=stopped, num_done=num_done: rows_done() > num_done or stopped.poll() is not None)
        stopped.send_signal(number)
        assert stopped.communicate(timeout=240)[1].endswith(last_line)
        assert stopped.returncode == code
        assert num_done < rows_done() < len(texts)
        num_done = rows_done()
        assert not output.exists()

    last = run(*embed)
    assert last.returncode == 0, last.stderr
    assert f"wrote {len(texts)} rows to {output}" in last.stderr
    assert "\r" not in last.stderr
    vectors = np.load(output)
    assert len(vectors) == len(texts)
    answer = http.post("/v1/embeddings", json={"input": texts[::7]}).json()
    np.testing.assert_allclose(vectors[::7], [row["embedding"] for row in answer["data"]], atol=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.npy"]


def test_settings_of_flags_file_and_environment_work_together(launch, tmp_path: Path) -> None:
    """Caches, keys, batches and limits, and a log without keys and texts."""
    config = tmp_path / "penstock.toml"
    config.write_text('max_inputs_per_request = 7\nlog_format = "json"\n')
    flags = ["--config", str(config), "--cache", "1MiB", "--cache-dir", str(tmp_path / "cache"), "--operator-routes"]
    flags += ["--data-dir", str(tmp_path / "data"), "--dtype", "float32", "--num-threads", "1"]
    flags += ["--request-timeout-s", "60", "--response-memory", "64MiB"]
    variables = {"PENSTOCK_SERVED_MODEL_NAME": "one,two", "PENSTOCK_API_KEY": "secret-key", "PENSTOCK_PROT": "1"}
    server = launch(*flags, **variables)
    headers = {"Authorization": "Bearer secret-key"}
    wait_until(lambda: server.metric("penstock_vector_cache_open") == 1)
    first, second = (server.embed(["Water.", "Gate."], **headers).json() for _ in range(2))
    assert first["data"] == second["data"]
    assert first["model"] == "one"
    (card,) = httpx.get(f"{server.url}/v1/models", headers=headers).json()["data"]
    assert (card["id"], card["aliases"]) == ("one", ["two"])
    assert server.metric("penstock_vector_cache_memory_hits_total") == 2
    assert server.embed(["Water."] * 8, **headers).status_code == 400
    assert server.embed("Water.").status_code == 401
    assert httpx.get(f"{server.url}/v1/batches", headers=headers, timeout=60).json()["data"] == []
    server.stop()
    log = server.log.read_text()
    assert log.count("inputs of up to 256 tokens") == 1
    assert log.count("data routes need an API key") == 1
    assert "PENSTOCK_PROT" in log
    assert "secret-key" not in log
    assert "Water." not in log
