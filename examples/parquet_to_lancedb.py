"""Bulk embedding: `penstock embed` writes Parquet without a server, LanceDB stores and searches it.

The query is embedded by the server with the same model. Needs `penstock` on PATH with the extra `parquet`.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import lancedb
import pyarrow as pa
import pyarrow.parquet

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
QUERY = "How is bread made?"
PASSAGES = (Path(__file__).parent / "data" / "passages.txt").read_text().splitlines()

with tempfile.TemporaryDirectory() as folder:
    texts, vectors = f"{folder}/texts.parquet", f"{folder}/vectors.parquet"
    pa.parquet.write_table(pa.table({"id": range(len(PASSAGES)), "text": PASSAGES}), texts)
    subprocess.run(["penstock", "embed", texts, "--output", vectors, "--log-level", "error"], check=True)

    rows = pa.parquet.read_table(vectors)
    width = len(rows["embedding"][0])
    fixed = rows["embedding"].combine_chunks().cast(pa.list_(pa.float32(), width))  # LanceDB needs a fixed width
    rows = rows.set_column(rows.column_names.index("embedding"), "vector", fixed)
    table = lancedb.connect(f"{folder}/lancedb").create_table("passages", rows)

    body = {"model": "all-MiniLM-L6-v2", "input": QUERY}
    answer = httpx.post(f"{URL}/v1/embeddings", json=body).raise_for_status().json()
    found = table.search(answer["data"][0]["embedding"]).distance_type("cosine").limit(3).to_list()

for row in found:
    print(f"{row['_distance']:.3f}  {row['text']}")
assert table.name == "passages"
assert "Sourdough" in found[0]["text"]
