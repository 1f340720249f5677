"""Retrieval in two steps: find candidates with vectors of one bit per dimension, then rerank them.

The index takes 48 bytes per passage instead of 1,536. The reranker here is the embedding model itself, which compares
float32 vectors. Serve a cross-encoder as second model (`penstock serve MODEL RERANKER`) and name it in RERANKER for
better results.
"""

import sys
from pathlib import Path

import httpx
import numpy as np

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
MODEL = RERANKER = "all-MiniLM-L6-v2"
QUERY = "How do fish get past a dam?"
PASSAGES = (Path(__file__).parent / "data" / "passages.txt").read_text().splitlines()


def bits(texts: list[str], input_type: str) -> np.ndarray:
    """Returns [N, dimensions / 8] uint8."""
    body = {"model": MODEL, "texts": texts, "input_type": input_type, "embedding_types": ["ubinary"]}
    answer = httpx.post(f"{URL}/v2/embed", json=body).raise_for_status().json()
    return np.array(answer["embeddings"]["ubinary"], np.uint8)


index = bits(PASSAGES, "search_document")
distances = np.bitwise_count(index ^ bits([QUERY], "search_query")).sum(1)
candidates = [PASSAGES[i] for i in np.argsort(distances)[:5]]

body = {"model": RERANKER, "query": QUERY, "documents": candidates, "top_n": 3}
results = httpx.post(f"{URL}/v2/rerank", json=body).raise_for_status().json()["results"]
for result in results:
    print(f"{result['relevance_score']:.3f}  {candidates[result['index']]}")

assert index.shape == (len(PASSAGES), 48)
assert "fish ladder" in candidates[results[0]["index"]]
