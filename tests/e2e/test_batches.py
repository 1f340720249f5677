"""Files and batches of the openai client."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..waiting import wait_until

openai = pytest.importorskip("openai")

MODEL = "all-MiniLM-L6-v2"


@pytest.fixture(scope="module")
def client(launch, default_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches") / "data"
    flags = ("--dtype", "float32", "--data-dir", str(folder), "--max-file-bytes", "1MiB")
    server = launch(*flags)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def jsonl(texts: list[str]) -> io.BytesIO:
    lines = [
        {"custom_id": f"line-{i}", "method": "POST", "url": "/v1/embeddings", "body": {"model": MODEL, "input": text}}
        for i, text in enumerate(texts)
    ]
    return io.BytesIO(b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def create(client: Any, lines: io.BytesIO, **options: Any) -> Any:
    """Upload a file and create its batch."""
    file = client.files.create(file=lines, purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h", **options)


def ended(client: Any, batch: Any) -> Any:
    """Wait for the end of a batch."""
    running = ("validating", "in_progress", "finalizing", "cancelling")
    wait_until(lambda: client.batches.retrieve(batch.id).status not in running)
    return client.batches.retrieve(batch.id)


def test_files_are_listed_downloaded_and_deleted(client, tmp_path: Path) -> None:
    path = tmp_path / "from disk é.jsonl"
    path.write_bytes(jsonl(["x"]).getvalue())
    expires = {"anchor": "created_at", "seconds": 3600}
    made = [client.files.create(file=path, purpose="batch", expires_after=expires) for _ in range(3)]
    assert (made[0].filename, made[0].object, made[0].status) == (path.name, "file", "processed")
    assert made[0].expires_at == made[0].created_at + 3600
    assert {file.id for file in client.files.list(limit=2)} >= {file.id for file in made}  # page after page
    assert client.files.retrieve(made[1].id).bytes == path.stat().st_size
    assert client.files.content(made[2].id).read() == path.read_bytes()
    assert client.files.delete(made[0].id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match=made[0].id):
            call(made[0].id)
    with pytest.raises(openai.APIStatusError, match="--max-file-bytes"):
        client.files.create(file=("big.jsonl", bytes(3 * 2**20)), purpose="batch")


def test_batch_answers_each_line(client) -> None:
    texts = [f"text number {i}" for i in range(300)]
    expires = {"anchor": "created_at", "seconds": 7200}
    batch = create(client, jsonl(texts), metadata={"note": "first"}, output_expires_after=expires)
    assert (batch.status, batch.metadata) == ("validating", {"note": "first"})
    batch = ended(client, batch)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 300, 0)
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    vectors = {a["custom_id"]: a["response"]["body"]["data"][0]["embedding"] for a in answers}
    assert len(vectors) == len(answers) == 300
    expected = client.embeddings.create(model=MODEL, input=texts)
    for row in expected.data[::50]:
        np.testing.assert_allclose(vectors[f"line-{row.index}"], row.embedding, atol=1e-6)
    assert batch.usage.input_tokens == expected.usage.prompt_tokens
    output = client.files.retrieve(batch.output_file_id)
    assert output.expires_at == output.created_at + 7200
    assert batch.id in [each.id for each in client.batches.list(limit=1)]
