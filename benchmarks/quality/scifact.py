"""Retrieval quality over HTTP: nDCG@10 of the SciFact test set, through a running server's /v1/embeddings.

    python benchmarks/quality/scifact.py --data path/to/scifact --expect 0.6451

The data folder is in BEIR layout: corpus.jsonl, queries.jsonl, qrels/test.tsv. Documents are "title text", the search
is exact, the gain is the judgement, and the mean is over all queries that have one. Of equal scores the larger document
id comes first, as in trec_eval.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

DEPTH = 10

Embed = Callable[[list[str]], NDArray[Any]]
"""Texts to vectors, one a row."""


def main() -> None:
    """Embeds, searches, scores; exits with 1 if the figure is not the expected one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--data", type=Path, required=True, help="folder in BEIR layout")
    parser.add_argument("--batch", type=int, default=128, help="texts in one request")
    parser.add_argument("--expect", type=float, help="nDCG@10 that must come out")
    parser.add_argument("--tolerance", type=float, default=0.0005)
    args = parser.parse_args()

    task = SciFact.read(args.data)
    figure = task.ndcg(lambda texts: embed(args.url, texts, args.batch))
    print(f"SciFact nDCG@{DEPTH}: {figure:.4f} ({len(task.corpus)} documents, {len(task.queries)} queries)")
    if args.expect is not None and abs(figure - args.expect) > args.tolerance:
        sys.exit(f"expected {args.expect} +- {args.tolerance}")


@dataclass(frozen=True, slots=True)
class SciFact:
    """A retrieval task.

    Attributes:
        corpus: Documents by id.
        queries: Queries by id, those alone that have a judgement.
        judgements: Per query, the judged documents and their relevance.
    """

    corpus: dict[str, str]
    queries: dict[str, str]
    judgements: dict[str, dict[str, int]]

    @classmethod
    def read(cls, folder: Path, *, keep_each: int = 1) -> SciFact:
        """Reads the task; of documents without a judgement one in `keep_each`, for a quick figure, which is higher."""
        judgements = _read_judgements(folder / "qrels" / "test.tsv")
        judged = set().union(*judgements.values())
        rows = _read_jsonl(folder / "corpus.jsonl")
        kept = [row for number, row in enumerate(rows) if row["_id"] in judged or number % keep_each == 0]
        corpus = {row["_id"]: f"{row['title']} {row['text']}".strip() for row in kept}
        queries = {row["_id"]: row["text"] for row in _read_jsonl(folder / "queries.jsonl") if row["_id"] in judgements}
        return cls(corpus, queries, judgements)

    def ndcg(self, embed: Embed) -> float:
        """Returns the mean nDCG@10 of the vectors that `embed` gives, compared by cosine in float64."""
        documents, queries = (_unit(embed(list(texts.values()))) for texts in (self.corpus, self.queries))
        ids = list(self.corpus)
        figures = [
            ndcg(best(scores, ids), self.judgements[query])
            for query, scores in zip(self.queries, queries @ documents.T, strict=True)
        ]
        return math.fsum(figures) / len(figures)


def best(scores: NDArray[np.float64], ids: Sequence[str]) -> list[str]:
    """Returns the ids of the DEPTH largest scores, the largest first; of equal ones the larger id."""
    least = np.partition(scores, -DEPTH)[-DEPTH] if len(ids) > DEPTH else scores.min()
    found = [(scores[place], ids[place]) for place in np.flatnonzero(scores >= least)]
    return [name for _, name in sorted(found, reverse=True)[:DEPTH]]


def ndcg(ranking: Sequence[str], relevance: dict[str, int]) -> float:
    """Returns the normalised discounted cumulative gain of one ranking, as trec_eval computes it."""
    gain = sum(relevance.get(document, 0) / math.log2(rank + 2) for rank, document in enumerate(ranking))
    ideal = sorted(relevance.values(), reverse=True)[:DEPTH]
    most = sum(value / math.log2(rank + 2) for rank, value in enumerate(ideal))
    return gain / most if most else 0.0


def embed(url: str, texts: Sequence[str], batch: int) -> NDArray[np.float32]:
    """Returns [N, D] embeddings of `texts`, cut to the model's length as sentence-transformers does."""
    vectors: list[list[float]] = []
    for start in tqdm(range(0, len(texts), batch), unit="request"):
        body = {"input": texts[start : start + batch], "truncate_prompt_tokens": -1, "encoding_format": "float"}
        request = urllib.request.Request(
            f"{url.rstrip('/')}/v1/embeddings", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            vectors.extend(row["embedding"] for row in json.load(response)["data"])
    return np.array(vectors, np.float32)


def _unit(rows: NDArray[Any]) -> NDArray[np.float64]:
    rows = rows.astype(np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def _read_jsonl(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _read_judgements(path: Path) -> dict[str, dict[str, int]]:
    judgements: dict[str, dict[str, int]] = defaultdict(dict)
    with path.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines, delimiter="\t"):
            judgements[row["query-id"]][row["corpus-id"]] = int(row["score"])
    return dict(judgements)


if __name__ == "__main__":
    main()
