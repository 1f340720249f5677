"""Hybrid search: dense vectors find the meaning, sparse vectors find exact words such as part numbers.

The sparse model weighs each token of a text by its inverse document frequency. It is no trained model: this script
builds it from the passages. With a SPLADE model or bge-m3 the requests are the same.

    python examples/hybrid_search.py build idf-model all-MiniLM-L6-v2   # local folders
    penstock serve all-MiniLM-L6-v2 idf-model
    python examples/hybrid_search.py
"""

import json
import sys
from pathlib import Path

import httpx
import numpy as np

PASSAGES = (Path(__file__).parent / "data" / "passages.txt").read_text().splitlines()
QUERY = "KX-4471 at two bar"


def build(folder: Path, tokenizer_folder: Path) -> None:
    """Writes a SparseStaticEmbedding of sentence-transformers: one weight for each token."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    texts = [set(tokenizer.encode(text, add_special_tokens=False).ids) for text in PASSAGES]
    counts = np.bincount([token for text in texts for token in text], minlength=tokenizer.get_vocab_size())
    weights = np.log(1 + (len(texts) - counts + 0.5) / (counts + 0.5)).astype(np.float32)  # as in BM25
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"weight": weights}, folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = "sentence_transformers.sparse_encoder.modules.SparseStaticEmbedding"
    (folder / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": kind}]))
    (folder / "config.json").write_text('{"frozen": true}')
    (folder / "config_sentence_transformers.json").write_text('{"model_type": "SparseEncoder"}')


def scores(url: str, model: str) -> np.ndarray:
    """Returns the score of each passage for the query."""
    body = {"model": model, "text_1": QUERY, "text_2": PASSAGES}
    rows = httpx.post(f"{url}/v1/score", json=body).raise_for_status().json()["data"]
    return np.array([row["score"] for row in rows])


if sys.argv[1:2] == ["build"]:
    build(Path(sys.argv[2]), Path(sys.argv[3]))
else:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
    dense, sparse = scores(url, "all-MiniLM-L6-v2"), scores(url, "idf-model")
    fused = 0.5 * dense + 0.5 * sparse / sparse.max()
    for i in np.argsort(-fused)[:3]:
        print(f"{fused[i]:.3f} (dense {dense[i]:.3f}, sparse {sparse[i]:5.2f})  {PASSAGES[i]}")
    assert "KX-4417" in PASSAGES[dense.argmax()]  # close in meaning, but another pump
    assert "KX-4471" in PASSAGES[fused.argmax()]
