"""Late chunking: the vector of each sentence depends on the whole text, so "its" is close to the name before it."""

import sys

import httpx
import numpy as np

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
SENTENCES = [
    "Berlin is the capital of Germany.",
    "Its more than 3.8 million inhabitants make it the largest city of the European Union.",
    "The city is also one of the states of the country.",
]
QUERY = "Berlin"


def embed(texts: list[str], **options: bool) -> np.ndarray:
    """Returns [N, D]."""
    body = {"model": "all-MiniLM-L6-v2", "input": texts, **options}
    rows = httpx.post(f"{URL}/v1/embeddings", json=body).raise_for_status().json()["data"]
    return np.array([row["embedding"] for row in rows])


query = embed([QUERY])[0]
alone, late = embed(SENTENCES) @ query, embed(SENTENCES, late_chunking=True) @ query
print(f"cosine with {QUERY!r}: alone, late")
for sentence, *cosines in zip(SENTENCES, alone, late, strict=True):
    print(f"{cosines[0]:.3f}  {cosines[1]:.3f}  {sentence}")

assert (late[1:] > alone[1:] + 0.1).all()  # these sentences do not name Berlin
