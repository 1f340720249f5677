"""Batches of a server that is killed, whose disk is full, and whose clients want answers beside them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from .. import gated_server
from ..gated_server import Gate

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


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


@pytest.fixture
def launch_gated(launch: Any, gate: Gate) -> Any:
    """Start a server whose lines wait for the gate."""

    def start(*flags: str, model: Path) -> Any:
        return launch(*flags, model=model, program=gated_server.COMMAND, **gate.environment)

    return start


def check_killed_twice(launch_gated: Any, gate: Gate, model: Path, data_dir: Path, num_lines: int) -> None:
    """Kill a server when it has answered a third of a batch, and when it has answered two thirds."""
    flags = ("--data-dir", str(data_dir))
    gate.let_through(num_lines // 3)
    server = launch_gated(*flags, model=model)
    batch_id = begin(server.url, jsonl(num_lines))
    for share in (1, 2):
        batch = wait_for_lines(server.url, batch_id, share * num_lines // 3)
        assert (batch["status"], batch["request_counts"]["completed"]) == ("in_progress", share * num_lines // 3)
        server.process.kill()
        server.process.wait()
        server = launch_gated(*flags, model=model)
        after = batch_of(server.url, batch_id)["request_counts"]["completed"]
        assert after == share * num_lines // 3, "an answer has been lost, or a line has passed the gate"
        gate.let_through(2 * num_lines // 3)
    gate.open()
    batch = wait_for_end(server.url, batch_id)
    answers = check_all_answered_once(server.url, batch, num_lines)
    rows = np.stack([np.frombuffer(_decoded(answer), "<f4") for answer in answers[:: num_lines // 20]])
    texts = [f"text number {answer['custom_id'][5:]}" for answer in answers[:: num_lines // 20]]
    alone = httpx.post(f"{server.url}/v1/embeddings", json={"input": texts}, timeout=60).json()
    np.testing.assert_allclose(rows, [row["embedding"] for row in alone["data"]], atol=1e-6)
    names = {batch["input_file_id"], batch["output_file_id"]}
    assert {path.name for path in (data_dir / "files").iterdir()} == names
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0


def _decoded(answer: dict[str, Any]) -> bytes:
    import base64

    return base64.b64decode(answer["response"]["body"]["data"][0]["embedding"])


def test_killed_server_continues_its_batch(launch_gated, gate: Gate, small_bert: Path, tmp_path: Path) -> None:
    check_killed_twice(launch_gated, gate, small_bert, tmp_path / "data", 900)


@pytest.mark.slow
def test_10_000_lines_and_two_kills(launch_gated, gate: Gate, minilm_folder: Path, tmp_path: Path) -> None:
    check_killed_twice(launch_gated, gate, minilm_folder, tmp_path / "data", 10_000)


def test_line_that_kills_the_server_fails_alone(launch_gated, gate: Gate, small_bert: Path, tmp_path: Path) -> None:
    """The server is killed whenever line 20 is the one under way, as the OOM killer would do."""
    flags = ("--data-dir", str(tmp_path / "data"))
    gate.let_through(19)
    server = launch_gated(*flags, model=small_bert)
    batch_id = begin(server.url, jsonl(60))
    for num_starts in range(2, 5):
        batch = wait_for_lines(server.url, batch_id, 19)
        assert (batch["status"], batch["request_counts"]["completed"]) == ("in_progress", 19)
        if num_starts > 2:  # a line that runs alone is recorded before it runs
            wait_for_suspect(tmp_path / "data" / "penstock.db", 20)
        server.process.kill()
        server.process.wait()
        server = launch_gated(*flags, model=small_bert)
    gate.open()
    batch = wait_for_end(server.url, batch_id)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 60, "completed": 59, "failed": 1}
    output, errors = (
        [json.loads(line) for line in httpx.get(f"{server.url}/v1/files/{batch[name]}/content").text.splitlines()]
        for name in ("output_file_id", "error_file_id")
    )
    assert sorted(answer["custom_id"] for answer in output) == sorted(f"line-{i}" for i in range(60) if i != 19)
    assert [(error["custom_id"], error["error"]["code"]) for error in errors] == [("line-19", "server_crashed")]


def wait_for_suspect(database: Path, line: int) -> None:
    """Wait until the server has recorded that it runs a line alone."""
    give_up_s = time.monotonic() + 240
    while True:
        with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            if connection.execute("SELECT 1 FROM suspects WHERE line = ? AND is_running", (line,)).fetchone():
                return
        assert time.monotonic() < give_up_s
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.alone
def test_batch_beside_one_request_a_second(launch, tmp_path: Path) -> None:
    """Prints lines per second and the latency of a client, each alone and beside the other."""
    server = launch("--data-dir", str(tmp_path / "data"))

    def lines_per_s() -> float:
        batch_id = begin(server.url, jsonl(3000))
        before = wait_for_lines(server.url, batch_id, 100)["request_counts"]["completed"]
        began_s = time.monotonic()
        time.sleep(10)
        done = batch_of(server.url, batch_id)["request_counts"]["completed"] - before
        rate = done / (time.monotonic() - began_s)
        httpx.post(f"{server.url}/v1/batches/{batch_id}/cancel", timeout=60)
        wait_for_end(server.url, batch_id)
        return rate

    alone, beside = [], []
    latency_alone = p99_ms(server.url, 1, 10, pause_s=1.0)
    latency_beside = []
    for _ in range(3):
        alone.append(lines_per_s())
        with ThreadPoolExecutor(1) as pool:
            latency = pool.submit(p99_ms, server.url, 1, 12, pause_s=1.0)
            beside.append(lines_per_s())
            latency_beside.append(latency.result())
    for name, rates in (("alone", alone), ("beside a request a second", beside)):
        print(f"lines/s {name}: {', '.join(f'{rate:.1f}' for rate in rates)}")
    print(f"ratio of the medians: {statistics.median(beside) / statistics.median(alone):.2f}")
    print("p50/p99 ms of the client alone: {:.1f}/{:.1f} of {}".format(*latency_alone))
    for figures in latency_beside:
        print("p50/p99 ms of the client beside a batch: {:.1f}/{:.1f} of {}".format(*figures))


def p99_ms(url: str, num_clients: int, seconds: float, *, pause_s: float = 0.002) -> tuple[float, float, int]:
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
                time.sleep(pause_s)

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
def test_batch_waits_while_the_disk_is_full(launch_gated, gate: Gate, small_bert: Path, small_disk) -> None:
    disk = small_disk(8 * MIB)
    flags = ("--data-dir", str(disk.folder / "data"))
    gate.let_through(100)
    server = launch_gated(*flags, model=small_bert)
    batch_id = begin(server.url, jsonl(2000))
    batch = wait_for_lines(server.url, batch_id, 100)
    disk.fill()
    gate.let_through(1000)  # their answers find no room
    wait_for_log(server, "answers cannot be written")
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
    server.process.kill()  # and killed beside it
    server.process.wait()
    disk.make_room()
    gate.open()
    server = launch_gated(*flags, model=small_bert)
    check_all_answered_once(server.url, wait_for_end(server.url, batch_id), 2000)
    gate.let_through(100)
    batch_id = begin(server.url, jsonl(2000))
    wait_for_lines(server.url, batch_id, 100)
    disk.fill()
    gate.let_through(1000)
    wait_for_log(server, "answers cannot be written")
    disk.make_room()
    gate.open()
    check_all_answered_once(server.url, wait_for_end(server.url, batch_id), 2000)


def wait_for_log(server: Any, text: str) -> None:
    give_up_s = time.monotonic() + 240
    while text not in server.log.read_text():
        assert time.monotonic() < give_up_s, server.log.read_text()
        time.sleep(0.05)


def test_lines_wait_for_an_engine_that_starts_again(launch_gated, gate: Gate, small_bert: Path, tmp_path: Path) -> None:
    gate.let_through(100)
    server = launch_gated("--data-dir", str(tmp_path / "data"), model=small_bert)
    batch_id = begin(server.url, jsonl(2000))
    assert wait_for_lines(server.url, batch_id, 100)["status"] == "in_progress"
    (worker,) = server.children()
    os.kill(worker, signal.SIGKILL)
    gate.open()
    check_all_answered_once(server.url, wait_for_end(server.url, batch_id), 2000)


def test_a_folder_has_one_server(launch, small_bert: Path, tmp_path: Path) -> None:
    flags = ("serve", str(small_bert), "--device", "cpu", "--port", "0", "--data-dir", str(tmp_path / "data"))
    launch(*flags[-2:], model=small_bert)
    done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()[-1:]
    assert "--data-dir: another server uses" in line
