"""OpenAI's batch API: upload a file of requests, wait for the batch, download the results.

The server needs `--data-dir FOLDER`. It runs the lines while no client is waiting.
"""

import json
import sys
import time

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
TEXTS = [f"Text number {number}." for number in range(100)]

client = OpenAI(base_url=f"{URL}/v1", api_key="none")
lines = [
    {
        "custom_id": str(number),
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {"model": "all-MiniLM-L6-v2", "input": text},
    }
    for number, text in enumerate(TEXTS)
]
file = client.files.create(file=("requests.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
print(batch.status, batch.request_counts)

results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
vectors = {int(row["custom_id"]): row["response"]["body"]["data"][0]["embedding"] for row in results}
print(f"{len(vectors)} vectors of {len(vectors[0])} dimensions")

assert batch.status == "completed"
assert vectors.keys() == set(range(len(TEXTS)))
