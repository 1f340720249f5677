"""Batches of a server that is killed, whose disk is full, and whose clients want answers beside them."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

MIB = 2**20
COMMAND = (sys.executable, "-P", "-m", "penstock.server")
ENDS = ("completed", "failed", "expired", "cancelled")


def jsonl(num_lines: int, text: str = "text number {}", **body: object) -> bytes:
    return b"".join(
        json.dumps(
            {
                "custom_id": f"line-{i}",
                "method": "POST",
                "url": "/v1/embeddings",
                "body": {"input": text.format(i), "encoding_format": "base64", **body},
            }
        ).encode()
        + b"\n"
        for i in range(num_lines)
    )


def begin(url: str, content: bytes) -> str:
    """Upload a file and begin its batch; returns the batch's id."""
    with httpx.Client(base_url=url, timeout=60) as client:
        form = {"files": {"file": ("lines.jsonl", content)}, "data": {"purpose": "batch"}}
        file = client.post("/v1/files", **form).raise_for_status().json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
        return client.post("/v1/batches", json=body).raise_for_status().json()["id"]


def batch_of(url: str, batch_id: str) -> dict[str, Any]:
    return httpx.get(f"{url}/v1/batches/{batch_id}", timeout=60).raise_for_status().json()


def wait_for_lines(url: str, batch_id: str, num_lines: int) -> dict[str, Any]:
    """Wait until so many lines are answered, or the batch has ended."""
    give_up_s = time.monotonic() + 240
    while True:
        batch = batch_of(url, batch_id)
        if batch["request_counts"]["completed"] >= num_lines or batch["status"] in ENDS:
            return batch
        assert time.monotonic() < give_up_s, batch
        time.sleep(0.02)


def wait_for_end(url: str, batch_id: str) -> dict[str, Any]:
    give_up_s = time.monotonic() + 240
    while (batch := batch_of(url, batch_id))["status"] not in ENDS:
        assert time.monotonic() < give_up_s, batch
        time.sleep(0.05)
    return batch


def check_all_answered_once(url: str, batch: dict[str, Any], num_lines: int) -> list[dict[str, Any]]:
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": num_lines, "completed": num_lines, "failed": 0}
    text = httpx.get(f"{url}/v1/files/{batch['output_file_id']}/content", timeout=60).text
    answers = [json.loads(line) for line in text.splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == sorted(f"line-{i}" for i in range(num_lines))
    assert batch["usage"]["total_tokens"] == sum(a["response"]["body"]["usage"]["total_tokens"] for a in answers)
    return answers


def check_killed_twice(launch: Any, model: Path, data_dir: Path, num_lines: int) -> None:
    """Kill a server when it has answered a third of a batch, and when it has answered two thirds."""
    flags = ("--data-dir", str(data_dir))
    server = launch(*flags, model=model)
    batch_id = begin(server.url, jsonl(num_lines))
    began_s = time.monotonic()
    seen = []
    for share in (1, 2):
        batch = wait_for_lines(server.url, batch_id, share * num_lines // 3)
        seen.append(batch["request_counts"]["completed"])
        server.process.kill()
        server.process.wait()
        assert batch["status"] == "in_progress", "it was done before it could be killed"
        server = launch(*flags, model=model)
        after = batch_of(server.url, batch_id)["request_counts"]["completed"]
        assert after >= seen[-1], "what was answered has been lost"
    batch = wait_for_end(server.url, batch_id)
    answers = check_all_answered_once(server.url, batch, num_lines)
    rows = np.stack([np.frombuffer(_decoded(answer), "<f4") for answer in answers[:: num_lines // 20]])
    texts = [f"text number {answer['custom_id'][5:]}" for answer in answers[:: num_lines // 20]]
    alone = httpx.post(f"{server.url}/v1/embeddings", json={"input": texts}, timeout=60).json()
    np.testing.assert_allclose(rows, [row["embedding"] for row in alone["data"]], atol=1e-6)
    seconds = time.monotonic() - began_s
    print(
        f"{num_lines} lines, killed after {seen[0]} and {seen[1]}: all answered once, in {seconds:.1f} s with 2 starts"
    )
    names = {batch["input_file_id"], batch["output_file_id"]}
    assert {path.name for path in (data_dir / "files").iterdir()} == names
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0


def _decoded(answer: dict[str, Any]) -> bytes:
    import base64

    return base64.b64decode(answer["response"]["body"]["data"][0]["embedding"])


def test_a_server_that_is_killed_goes_on_with_its_batch(launch, small_bert: Path, tmp_path: Path) -> None:
    check_killed_twice(launch, small_bert, tmp_path / "data", 900)


@pytest.mark.slow
def test_10_000_lines_and_two_kills(launch, minilm_folder: Path, tmp_path: Path) -> None:
    check_killed_twice(launch, minilm_folder, tmp_path / "data", 10_000)


def p99_ms(url: str, num_clients: int, seconds: float) -> tuple[float, float, int]:
    """The median and the 99th percentile of requests for one short text, and how many there were."""
    took: list[float] = []

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            body = {"input": "What holds back the water?"}
            client.post("/v1/embeddings", json=body)
            end_s = time.monotonic() + seconds
            while (began_s := time.monotonic()) < end_s:
                assert client.post("/v1/embeddings", json=body).status_code == 200
                took.append(1000 * (time.monotonic() - began_s))
                time.sleep(0.002)

    clients = [threading.Thread(target=ask) for _ in range(num_clients)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return statistics.median(took), float(np.quantile(took, 0.99)), len(took)


@pytest.mark.slow
@pytest.mark.parametrize(("num_clients", "texts"), [(1, 1), (4, 1), (1, 50)])
def test_clients_do_not_wait_for_batches(launch, tmp_path: Path, num_clients: int, texts: int) -> None:
    """Rounds with and without a batch take turns; the medians of their p99 are compared. It wants an idle machine."""
    server = launch("--data-dir", str(tmp_path / "data"))
    figures: dict[bool, list[tuple[float, float, int]]] = {False: [], True: []}
    done = []
    seconds = 4 if texts == 1 else 8  # a long line is followed by a pause of some seconds
    for _ in range(4):
        figures[False].append(p99_ms(server.url, num_clients, seconds))
        body = {} if texts == 1 else {"input": ["A gate in a dam. " * 5] * texts}
        batch_id = begin(server.url, jsonl(20_000 // texts, **body))
        before = wait_for_lines(server.url, batch_id, 1)["request_counts"]["completed"]
        figures[True].append(p99_ms(server.url, num_clients, seconds))
        done.append(batch_of(server.url, batch_id)["request_counts"]["completed"] - before)
        httpx.post(f"{server.url}/v1/batches/{batch_id}/cancel", timeout=60).raise_for_status()
        wait_for_end(server.url, batch_id)
    for is_beside, rounds in figures.items():
        shown = ", ".join(f"{p50:.1f}/{p99:.1f} of {count}" for p50, p99, count in rounds)
        print(f"{num_clients} clients, {'beside a batch' if is_beside else 'alone'}: p50/p99 ms {shown}")
    ratio = statistics.median(r[1] for r in figures[True]) / statistics.median(r[1] for r in figures[False])
    print(f"p99 beside a batch of {texts} texts a line: {ratio:.2f} times that alone; {done} lines done meanwhile")
    assert all(done) if texts == 1 else any(done), "the batch stood still"
    assert ratio < 1.5


@pytest.mark.slow
def test_a_batch_waits_while_the_disk_is_full(launch, small_bert: Path, small_disk) -> None:
    disk = small_disk(8 * MIB)
    server = launch("--data-dir", str(disk.folder / "data"), model=small_bert)
    batch_id = begin(server.url, jsonl(2000))
    wait_for_lines(server.url, batch_id, 100)
    disk.fill()
    time.sleep(1)
    batch = batch_of(server.url, batch_id)
    assert (batch["status"], batch["error_file_id"]) == ("in_progress", None)
    done = batch["request_counts"]["completed"]
    assert done < 2000
    for _ in range(5):
        assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}, timeout=60).status_code == 200
    form = {"files": {"file": ("a", bytes(100_000))}, "data": {"purpose": "batch"}}
    response = httpx.post(f"{server.url}/v1/files", timeout=60, **form)
    assert response.status_code == 507, response.text
    assert "almost full" in response.json()["error"]["message"]
    body = {"input_file_id": batch["input_file_id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
    response = httpx.post(f"{server.url}/v1/batches", json=body, timeout=60)
    assert response.status_code == 507, response.text
    assert "waits" in server.log.read_text()
    server.process.kill()  # and killed beside it
    server.process.wait()
    disk.make_room()
    server = launch("--data-dir", str(disk.folder / "data"), model=small_bert)
    check_all_answered_once(server.url, wait_for_end(server.url, batch_id), 2000)
    batch_id = begin(server.url, jsonl(2000))
    wait_for_lines(server.url, batch_id, 100)
    disk.fill()
    time.sleep(1)
    disk.make_room()
    check_all_answered_once(server.url, wait_for_end(server.url, batch_id), 2000)
    print(f"2000 lines, the disk full after {done}: all answered once when there was room again")


def test_lines_wait_for_an_engine_that_starts_again(launch, small_bert: Path, tmp_path: Path) -> None:
    server = launch("--data-dir", str(tmp_path / "data"), model=small_bert)
    batch_id = begin(server.url, jsonl(2000))
    wait_for_lines(server.url, batch_id, 100)
    (worker,) = server.children()
    os.kill(worker, signal.SIGKILL)
    check_all_answered_once(server.url, wait_for_end(server.url, batch_id), 2000)


def test_a_folder_has_one_server(launch, small_bert: Path, tmp_path: Path) -> None:
    flags = ("serve", str(small_bert), "--device", "cpu", "--port", "0", "--data-dir", str(tmp_path / "data"))
    launch(*flags[-2:], model=small_bert)
    done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()[-1:]
    assert "--data-dir: another server uses" in line
