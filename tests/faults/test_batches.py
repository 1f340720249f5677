"""Batches of servers that are killed or have a full disk."""

import base64
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from .. import gated_server
from ..gated_server import Gate
from ..servers import MIB, Launch, Server
from ..waiting import wait_until

TERMINAL_STATUSES = ("completed", "failed", "expired", "cancelled")


def jsonl(num_lines: int, text: str = "text number {}") -> bytes:
    body = {"encoding_format": "base64"}
    line = {"method": "POST", "url": "/v1/embeddings"}
    lines = [line | {"custom_id": f"line-{i}", "body": body | {"input": text.format(i)}} for i in range(num_lines)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def create(server: Server, content: bytes) -> str:
    """Upload a file and create its batch. Returns the id of the batch."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        form = {"files": {"file": ("lines.jsonl", content)}, "data": {"purpose": "batch"}}
        file = client.post("/v1/files", **form).raise_for_status().json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
        return client.post("/v1/batches", json=body).raise_for_status().json()["id"]


def retrieve(server: Server, batch_id: str) -> dict[str, Any]:
    return httpx.get(f"{server.url}/v1/batches/{batch_id}", timeout=60).raise_for_status().json()


def wait_for_lines(server: Server, batch_id: str, num_lines: int) -> None:
    """Wait until a batch that waits at the gate has this number of completed lines."""
    wait_until(lambda: retrieve(server, batch_id)["request_counts"]["completed"] >= num_lines)
    batch = retrieve(server, batch_id)
    assert (batch["status"], batch["request_counts"]["completed"]) == ("in_progress", num_lines)


def wait_for_end(server: Server, batch_id: str) -> dict[str, Any]:
    wait_until(lambda: retrieve(server, batch_id)["status"] in TERMINAL_STATUSES, 240)
    return retrieve(server, batch_id)


def download(server: Server, file_id: str) -> list[dict[str, Any]]:
    text = httpx.get(f"{server.url}/v1/files/{file_id}/content", timeout=60).text
    return [json.loads(line) for line in text.splitlines()]


def check_completed(server: Server, batch_id: str, num_lines: int) -> list[dict[str, Any]]:
    """Wait for the end of a batch and check that it has one answer for each line. Returns the answers."""
    batch = wait_for_end(server, batch_id)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": num_lines, "completed": num_lines, "failed": 0}
    answers = download(server, batch["output_file_id"])
    assert sorted(answer["custom_id"] for answer in answers) == sorted(f"line-{i}" for i in range(num_lines))
    assert batch["usage"]["total_tokens"] == sum(a["response"]["body"]["usage"]["total_tokens"] for a in answers)
    return answers


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


@pytest.fixture
def launch_gated(launch: Launch, gate: Gate, small_bert: Path, tmp_path: Path) -> Launch:
    """Start a server with batch lines that wait for the gate. A second server continues the first one's batches."""

    def start(data: Path = tmp_path / "data") -> Server:
        return launch("--data-dir", str(data), model=small_bert, command=gated_server.COMMAND, **gate.environment)

    return start


def kill(server: Server) -> None:
    server.process.kill()
    server.process.wait()


def test_killed_server_continues_its_batch(launch_gated: Launch, gate: Gate, tmp_path: Path) -> None:
    gate.let_through(100)
    server = launch_gated()
    batch_id = create(server, jsonl(200))
    wait_for_lines(server, batch_id, 100)
    kill(server)
    server = launch_gated()
    wait_for_lines(server, batch_id, 100)
    gate.open()
    answers = check_completed(server, batch_id, 200)[::10]
    rows = [answer["response"]["body"]["data"][0]["embedding"] for answer in answers]
    alone = server.embed([f"text number {answer['custom_id'][5:]}" for answer in answers]).json()["data"]
    found = [np.frombuffer(base64.b64decode(row), "<f4") for row in rows]
    np.testing.assert_allclose(found, [row["embedding"] for row in alone], atol=1e-6)
    batch = retrieve(server, batch_id)
    names = {batch["input_file_id"], batch["output_file_id"]}
    assert {path.name for path in (tmp_path / "data" / "files").iterdir()} == names
    assert server.stop() == 0


def test_lines_wait_for_the_restart_of_an_engine(launch_gated: Launch, gate: Gate) -> None:
    gate.let_through(100)
    server = launch_gated()
    batch_id = create(server, jsonl(300))
    wait_for_lines(server, batch_id, 100)
    (worker,) = server.children()
    os.kill(worker, signal.SIGKILL)
    gate.open()
    check_completed(server, batch_id, 300)


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_batch_waits_while_the_disk_is_full(launch_gated: Launch, gate: Gate, small_disk, is_killed: bool) -> None:
    disk = small_disk(8 * MIB)
    gate.let_through(100)
    server = launch_gated(disk.folder / "data")
    batch_id = create(server, jsonl(2000))
    wait_for_lines(server, batch_id, 100)
    disk.fill()
    gate.let_through(1000)
    server.wait_for_log("responses cannot be written")
    batch = retrieve(server, batch_id)
    assert (batch["status"], batch["error_file_id"]) == ("in_progress", None)
    assert batch["request_counts"]["completed"] < 2000
    assert server.embed("a").status_code == 200
    form = {"files": {"file": ("a", bytes(100_000))}, "data": {"purpose": "batch"}}
    body = {"input_file_id": batch["input_file_id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
    upload = httpx.post(f"{server.url}/v1/files", timeout=60, **form)
    assert upload.status_code == 507
    assert "almost full" in upload.json()["error"]["message"]
    assert server.post("/v1/batches", body).status_code == 507
    if is_killed:
        kill(server)
    disk.free()
    gate.open()
    if is_killed:
        server = launch_gated(disk.folder / "data")
    check_completed(server, batch_id, 2000)
