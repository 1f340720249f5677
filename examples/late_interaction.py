"""Late interaction as in ColBERT: sort the candidates of a search by MaxSim over the vectors of their tokens.

The embedded model was not trained for it, but its token vectors show the principle. A ColBERT model does the same, with
its markers and its projection, and `/v1/rerank` then computes MaxSim in the server.
"""

import sys
from pathlib import Path

import httpx
import numpy as np

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
QUERY = "Which instrument is played sitting?"
PASSAGES = (Path(__file__).parent / "data" / "passages.txt").read_text().splitlines()


def encode(texts: list[str], output: str) -> list[np.ndarray]:
    """Returns a vector [D] of each text, or with multi_vector the vectors [tokens, D]."""
    body = {"model": "all-MiniLM-L6-v2", "input": texts, "outputs": [output]}
    rows = httpx.post(f"{URL}/v1/encode", json=body).raise_for_status().json()["data"]
    return [np.array(row[output]) for row in rows]


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


(query,) = encode([QUERY], "dense")
candidates = [PASSAGES[i] for i in np.argsort(-(np.stack(encode(PASSAGES, "dense")) @ query))[:5]]

(query_rows,) = encode([QUERY], "multi_vector")
scores = [
    float((unit(query_rows) @ unit(rows).T).max(1).mean())  # MaxSim: the best token of the passage for each query token
    for rows in encode(candidates, "multi_vector")
]
for i in np.argsort(scores)[::-1]:
    print(f"{scores[i]:.3f}  {candidates[i]}")

assert "cello" in candidates[int(np.argmax(scores))]
