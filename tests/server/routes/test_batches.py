"""/v1/files and /v1/batches: what OpenAI's clients send, and what they need from the answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from penstock.server.app import create_app
from penstock.server.calls.models import ServedModel
from penstock.server.settings import ServerSettings

ENDS = ("completed", "failed", "expired", "cancelled")


def embedding(number: int, **body: object) -> dict[str, Any]:
    """A line of an input file."""
    body = {"model": "fake-model", "input": f"text {number}", **body}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/embeddings", "body": body}


def jsonl(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def upload(client: httpx.AsyncClient, content: bytes, **fields: str) -> httpx.Response:
    form = {"purpose": "batch", **fields}
    return await client.post("/v1/files", files={"file": ("lines.jsonl", content)}, data=form)


async def begin(client: httpx.AsyncClient, lines: list[Any], **fields: object) -> dict[str, Any]:
    file = (await upload(client, jsonl(lines))).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": "24h", **fields}
    response = await client.post("/v1/batches", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def ended(client: httpx.AsyncClient, batch: dict[str, Any]) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while (batch := (await client.get(f"/v1/batches/{batch['id']}")).json())["status"] not in ENDS:
            await asyncio.sleep(0.01)
    return batch


async def content(client: httpx.AsyncClient, file_id: str) -> list[dict[str, Any]]:
    response = await client.get(f"/v1/files/{file_id}/content")
    assert response.status_code == 200
    return [json.loads(line) for line in response.text.splitlines()]


@pytest.fixture
async def client(serving, engine, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(engine, data_dir=tmp_path / "data") as client:
        yield client


async def test_a_batch_from_its_file_to_its_answers(client, engine) -> None:
    batch = await begin(client, [embedding(i) for i in range(250)], metadata={"note": "x"})
    assert (batch["object"], batch["status"], batch["metadata"]) == ("batch", "validating", {"note": "x"})
    assert batch["expires_at"] == batch["created_at"] + 24 * 3600
    batch = await ended(client, batch)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 250, "completed": 250, "failed": 0}
    assert batch["usage"]["input_tokens"] == batch["usage"]["total_tokens"] == 250 * 4
    assert (batch["model"], batch["error_file_id"], batch["errors"]) == ("fake-model", None, None)
    assert all(batch[f"{name}_at"] for name in ("in_progress", "finalizing", "completed"))
    answers = await content(client, batch["output_file_id"])
    assert sorted(answer["custom_id"] for answer in answers) == sorted(f"line-{i}" for i in range(250))
    for answer in answers[:5]:
        number = answer["custom_id"].partition("-")[2]
        alone = (await client.post("/v1/embeddings", json={"input": f"text {number}"})).json()
        response = answer["response"]
        assert (response["status_code"], answer["error"]) == (200, None)
        assert response["body"]["data"] == alone["data"]
        assert response["body"]["id"] == f"embd-{response['request_id']}"
        assert response["request_id"] == answer["id"]
    assert all(options.priority == 999 for name, (_, _, options) in engine.calls[:250])
    file = (await client.get(f"/v1/files/{batch['output_file_id']}")).json()
    assert (file["purpose"], file["filename"]) == ("batch_output", f"{batch['id']}_output.jsonl")
