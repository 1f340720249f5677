"""Retrieval quality over HTTP: nDCG@10 of the SciFact test set, through a running server's /v1/embeddings.

    python benchmarks/scifact.py --data path/to/scifact --expect 0.6451

The data folder is in BEIR layout: corpus.jsonl, queries.jsonl, qrels/test.tsv. Documents are "title text", the search
is exact, the gain is the judgement, and the mean is over all queries that have one.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

DEPTH = 10


def main() -> None:
    """Embeds, searches, scores; exits with 1 if the figure is not the expected one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--data", type=Path, required=True, help="folder in BEIR layout")
    parser.add_argument("--batch", type=int, default=128, help="texts in one request")
    parser.add_argument("--expect", type=float, help="nDCG@10 that must come out")
    parser.add_argument("--tolerance", type=float, default=0.0005)
    args = parser.parse_args()

    corpus = {row["_id"]: f"{row['title']} {row['text']}".strip() for row in read_jsonl(args.data / "corpus.jsonl")}
    queries = {row["_id"]: row["text"] for row in read_jsonl(args.data / "queries.jsonl")}
    judgements = read_judgements(args.data / "qrels" / "test.tsv")
    corpus_ids, query_ids = list(corpus), [q for q in queries if q in judgements]
    documents = embed(args.url, [corpus[i] for i in corpus_ids], args.batch, "corpus")
    asked = embed(args.url, [queries[i] for i in query_ids], args.batch, "queries")

    scores = asked @ documents.T
    best = np.argsort(-scores, axis=1, kind="stable")[:, :DEPTH]
    figures = [
        ndcg([corpus_ids[j] for j in row], judgements[query_id]) for query_id, row in zip(query_ids, best, strict=True)
    ]
    figure = float(np.mean(figures))
    print(f"SciFact nDCG@{DEPTH}: {figure:.4f} ({len(corpus_ids)} documents, {len(query_ids)} queries)")
    if args.expect is not None and abs(figure - args.expect) > args.tolerance:
        sys.exit(f"expected {args.expect} +- {args.tolerance}")


def read_jsonl(path: Path) -> list[dict[str, str]]:
    """Returns the objects of a JSON lines file."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def read_judgements(path: Path) -> dict[str, dict[str, int]]:
    """Returns, per query, the judged documents and their relevance."""
    judgements: dict[str, dict[str, int]] = defaultdict(dict)
    with path.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines, delimiter="\t"):
            judgements[row["query-id"]][row["corpus-id"]] = int(row["score"])
    return judgements


def embed(url: str, texts: Sequence[str], batch: int, title: str) -> NDArray[np.float32]:
    """Returns [N, D] embeddings of `texts`, cut to the model's length as sentence-transformers does."""
    vectors: list[list[float]] = []
    for start in tqdm(range(0, len(texts), batch), desc=title, unit="request"):
        body = {"input": texts[start : start + batch], "truncate_prompt_tokens": -1, "encoding_format": "float"}
        request = urllib.request.Request(
            f"{url.rstrip('/')}/v1/embeddings", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            vectors.extend(row["embedding"] for row in json.load(response)["data"])
    return np.array(vectors, np.float32)


def ndcg(ranking: Sequence[str], relevance: dict[str, int]) -> float:
    """Returns the normalised discounted cumulative gain of one ranking, as trec_eval computes it."""
    gain = sum(relevance.get(document, 0) / math.log2(rank + 2) for rank, document in enumerate(ranking))
    ideal = sorted(relevance.values(), reverse=True)[:DEPTH]
    best = sum(value / math.log2(rank + 2) for rank, value in enumerate(ideal))
    return gain / best if best else 0.0


if __name__ == "__main__":
    main()
