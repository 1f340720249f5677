"""Fake routes, and functions that upload files, create batches and wait for them."""

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import ClassVar

from penstock.server.batches.internal_client import RouteResponse
from penstock.server.batches.records import BatchRecord, BatchStatus
from penstock.server.batches.service import BatchService
from penstock.server.routing import BatchUse
from penstock.server.schemas.batch_bodies import BatchRequest

from ...waiting import TIMEOUT_S

DAY_S = 24 * 3600
_JSON = {b"content-type": b"application/json"}


class Routes:
    """Implements InternalClient. The input of a line is its number, and `status_of` returns its status.

    A number with `holds(number)` waits for the gate. `engine_dies` means that a 503 came from the end of the engine.
    """

    batch_uses: ClassVar = {"/v1/embeddings": BatchUse.EMBEDDING}

    def __init__(self, status_of: Callable[[int], int] = lambda number: 200) -> None:
        self.status_of = status_of
        self.holds: Callable[[int], bool] = lambda number: True
        self.gate = asyncio.Event()
        self.gate.set()
        self.engine_dies = False
        self.received: Counter[int] = Counter()
        self.max_at_once = self.max_bytes_at_once = 0
        self._running: list[int] = []

    async def send(self, path: str, content: bytes, owner: str, name: str) -> RouteResponse:
        number = json.loads(content)["input"]
        self.received[number] += 1
        self._running.append(len(content))
        self.max_at_once = max(self.max_at_once, len(self._running))
        self.max_bytes_at_once = max(self.max_bytes_at_once, sum(self._running))
        try:
            await asyncio.sleep(0)
            if self.holds(number):
                await self.gate.wait()
        finally:
            self._running.remove(len(content))
        body = json.dumps({"number": number}).encode()
        status = self.status_of(number)
        return RouteResponse(status, _JSON, body, name, "m", 3, reached_engine=status == 503 and self.engine_dies)


def lines(numbers: range, **body: object) -> bytes:
    rows = (
        {"custom_id": f"{i}", "method": "POST", "url": "/v1/embeddings", "body": {"input": i, **body}} for i in numbers
    )
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def record(**more: object) -> BatchRecord:
    names = "id", "owner", "endpoint", "input_file_id", "output_id", "error_id", "completion_window"
    numbers = {"output_expires_s": 1, "created_at": 2, "expires_at": 3}
    return BatchRecord(**dict.fromkeys(names, "x"), **numbers, metadata=None, **more)


async def upload(batches: BatchService, content: bytes, owner: str = "me", seconds: int = 3600) -> str:
    parts = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": str(seconds)}
    form = b"".join(
        b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), value.encode())
        for name, value in parts.items()
    )
    form += b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n%b\r\n--x--\r\n' % content

    async def body() -> AsyncIterator[bytes]:
        for start in range(0, len(form), 1000):
            yield form[start : start + 1000]

    return (await batches.files.receive("multipart/form-data; boundary=x", body(), owner)).id


async def create(batches: BatchService, file_id: str, hours: int = 24, owner: str = "me") -> BatchRecord:
    fields = {"input_file_id": file_id, "endpoint": "/v1/embeddings", "completion_window": f"{hours}h"}
    return await batches.create(BatchRequest(**fields), owner)


async def begin(batches: BatchService, content: bytes, hours: int = 24) -> BatchRecord:
    return await create(batches, await upload(batches, content), hours)


async def until_stored(batches: BatchService, batch: BatchRecord, holds: Callable[[BatchRecord], bool]) -> BatchRecord:
    async with asyncio.timeout(TIMEOUT_S):
        while not holds(batch := await batches.find(batch.id, "me")):
            await asyncio.sleep(0.005)
    return batch


async def until_status(batches: BatchService, batch: BatchRecord, status: BatchStatus) -> BatchRecord:
    return await until_stored(batches, batch, lambda stored: stored.status is status)


async def until_completed(batches: BatchService, batch: BatchRecord, num_lines: int) -> None:
    await until_stored(batches, batch, lambda stored: stored.num_completed >= num_lines)


def output_files(batches: BatchService, batch: BatchRecord) -> tuple[list[dict], list[dict]]:
    """The lines of the output file and of the error file."""
    found = []
    for file_id, num_bytes in ((batch.output_id, batch.num_output_bytes), (batch.error_id, batch.num_error_bytes)):
        path = batches.files.path(file_id)
        assert path.exists() is bool(num_bytes)
        found.append([json.loads(line) for line in path.read_text().splitlines()] if num_bytes else [])
    return found[0], found[1]


def numbers(rows: list[dict]) -> list[int]:
    return sorted(int(row["custom_id"]) for row in rows)


def killed(folder: Path, copy: Path) -> Path:
    """Copy the data folder as a killed server would leave it."""
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("lock"))
    return copy
