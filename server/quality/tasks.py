"""Data sets with judgements, read from local folders, and their scores: retrieval, similarity, classification.

The files of a folder determine its task; see `read_task`. Scores are computed in float64.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from ..settings import UsageError

InputType = Literal["query", "document", "similarity", "classification", "clustering"]
Embed = Callable[[Sequence[str], InputType], NDArray[Any]]
"""Embeds texts of one input type. Returns [N, D]."""
Rerank = Callable[[Sequence[tuple[str, Sequence[str]]]], Sequence[NDArray[Any]]]
"""Scores the documents of each query. Returns [N] for each query; a higher score is more relevant."""
Rankings = Mapping[str, Sequence[str]]
"""Query id to document ids, the best first."""

DEPTH: Final = 100
"""Documents per ranking, for the recall at 100."""
DRAWS: Final = 10
EXAMPLES: Final = 8
"""Examples of each class in one draw, as in MTEB's Banking77."""
_SEED: Final = 42
_DECIMALS: Final = 5
_QUERIES_PER_PRODUCT: Final = 32


@dataclass(frozen=True, slots=True)
class RetrievalTask:
    """A retrieval task in BEIR layout. The text of a document is "title text".

    Attributes:
        corpus: Documents by id.
        queries: Queries by id. Queries without judgements are left out.
        judgements: Query id to document ids with their relevance.
    """

    corpus: dict[str, str]
    queries: dict[str, str]
    judgements: dict[str, dict[str, float]]

    @classmethod
    def read(cls, folder: Path) -> RetrievalTask:
        """Reads corpus.jsonl, queries.jsonl and qrels/test.tsv of a folder.

        Raises UsageError if a file is missing or has an invalid line.
        """
        judgements = _judgements(folder / "qrels" / "test.tsv")
        judged = set[str]().union(*judgements.values())
        documents = folder / "corpus.jsonl"
        corpus: dict[str, str] = {}
        for line, row in _rows(documents):
            name = _text(documents, line, row, "_id")
            corpus[name] = f"{row.get('title') or ''} {_text(documents, line, row, 'text')}".strip()
        if judged.isdisjoint(corpus):
            raise UsageError(f"{documents} has none of the documents of qrels/test.tsv; use files of one data set")
        queries = folder / "queries.jsonl"
        texts = {_text(queries, line, row, "_id"): _text(queries, line, row, "text") for line, row in _rows(queries)}
        if missing := sorted(judgements.keys() - texts.keys()):
            raise UsageError(f"{queries}: query {missing[0]!r} of qrels/test.tsv is missing; use files of one data set")
        return cls(corpus, {name: text for name, text in texts.items() if name in judgements}, judgements)

    def search(self, embed: Embed, depth: int = DEPTH) -> dict[str, list[str]]:
        """Returns the `depth` documents with the largest cosine for each query, by exact search."""
        documents = _unit(embed(list(self.corpus.values()), "document"))
        queries = _unit(embed(list(self.queries.values()), "query"))
        names = list(self.queries)
        ids = list(self.corpus)
        rankings: dict[str, list[str]] = {}
        for start in range(0, len(names), _QUERIES_PER_PRODUCT):  # limits the memory of the products
            part = slice(start, start + _QUERIES_PER_PRODUCT)
            for name, cosines in zip(names[part], queries[part] @ documents.T, strict=True):
                rankings[name] = top_ids(cosines, ids, depth)
        return rankings

    def rerank(self, rankings: Rankings, rerank: Rerank, top_k: int) -> dict[str, list[str]]:
        """Sorts the first `top_k` documents of each ranking by `rerank`. The others follow in their order."""
        first = {name: ranking[:top_k] for name, ranking in rankings.items()}
        relevance = rerank([(self.queries[name], [self.corpus[i] for i in ids]) for name, ids in first.items()])
        return {
            name: [*top_ids(values.astype(np.float64), ids, top_k), *rankings[name][top_k:]]
            for (name, ids), values in zip(first.items(), relevance, strict=True)
        }

    def scores(self, rankings: Rankings) -> dict[str, float]:
        """Returns nDCG@10, MAP@10, recall@10, recall@100 and MRR@10, each the mean over the queries."""
        found = [_ranking_scores(rankings[name], self.judgements[name]) for name in self.queries]
        return {metric: math.fsum(each[metric] for each in found) / len(found) for metric in found[0]}


@dataclass(frozen=True, slots=True)
class SimilarityTask:
    """Pairs of sentences with similarities that people judged.

    Attributes:
        pairs: Pairs of sentences.
        similarities: Judged similarity of each pair. Any scale.
    """

    pairs: list[tuple[str, str]]
    similarities: list[float]

    @classmethod
    def read(cls, path: Path) -> SimilarityTask:
        """Reads rows with sentence1, sentence2 and score. Raises UsageError for an invalid file."""
        pairs: list[tuple[str, str]] = []
        similarities: list[float] = []
        for line, row in _rows(path):
            pairs.append((_text(path, line, row, "sentence1"), _text(path, line, row, "sentence2")))
            similarities.append(_number(path, line, row, "score"))
        if len(set(similarities)) < 2:
            raise UsageError(f"{path}: all rows have the same score; a rank correlation needs different scores")
        return cls(pairs, similarities)

    def scores(self, embed: Embed) -> dict[str, float]:
        """Returns Spearman's rank correlation of the cosines with the judged similarities; NaN if all are equal."""
        left, right = (_unit(embed(texts, "similarity")) for texts in zip(*self.pairs, strict=True))
        return {"spearman": spearman((left * right).sum(1), np.array(self.similarities))}


@dataclass(frozen=True, slots=True)
class ClassificationTask:
    """Classification of texts by the nearest mean of examples.

    MTEB draws EXAMPLES examples of each class DRAWS times and fits a logistic regression. Here a text gets the class
    whose mean of examples has the largest cosine, which needs no solver.

    Attributes:
        examples: Texts that are drawn at least once.
        classes: [E] int64, class of each example.
        draws: DRAWS arrays of indices of `examples`.
        tests: Texts to classify.
        answers: [N] int64, class of each of `tests`.
    """

    examples: list[str]
    classes: NDArray[np.int64]
    draws: list[NDArray[np.int64]]
    tests: list[str]
    answers: NDArray[np.int64]

    @classmethod
    def read(cls, folder: Path) -> ClassificationTask:
        """Reads train.csv and test.csv, each with the columns text and category. Raises UsageError if one is wrong."""
        train, test = (
            [(_text(path, line, row, "text"), _text(path, line, row, "category")) for line, row in _rows(path)]
            for path in (folder / "train.csv", folder / "test.csv")
        )
        numbers = {name: number for number, name in enumerate(sorted({name for _, name in train}))}
        if unknown := sorted({name for _, name in test} - numbers.keys()):
            raise UsageError(f"{folder / 'test.csv'}: category {unknown[0]!r} has no examples in train.csv")
        all_draws = list(draw_examples([name for _, name in train]))
        used = np.unique(np.concatenate(all_draws))
        return cls(
            [train[index][0] for index in used],
            np.array([numbers[train[index][1]] for index in used]),
            [np.searchsorted(used, indices) for indices in all_draws],
            [text for text, _ in test],
            np.array([numbers[name] for _, name in test]),
        )

    def scores(self, embed: Embed) -> dict[str, float]:
        """Returns the accuracy, the mean over the draws."""
        examples, tests = (embed(texts, "classification").astype(np.float64) for texts in (self.examples, self.tests))
        accuracies = [self._accuracy(examples, tests, indices) for indices in self.draws]
        return {"accuracy": math.fsum(accuracies) / len(accuracies)}

    def _accuracy(self, examples: NDArray[Any], tests: NDArray[Any], indices: NDArray[np.int64]) -> float:
        classes = self.classes[indices]
        means = _unit(np.stack([examples[indices[classes == number]].mean(0) for number in range(classes.max() + 1)]))
        return float(((tests @ means.T).argmax(1) == self.answers).mean())


Task = RetrievalTask | SimilarityTask | ClassificationTask


def read_task(folder: Path) -> Task:
    """Reads the task of a folder.

    Raises:
        UsageError: The folder is missing, contains no task, or a file has an invalid line.
    """
    if (folder / "corpus.jsonl").is_file():
        return RetrievalTask.read(folder)
    if (folder / "train.csv").is_file():
        return ClassificationTask.read(folder)
    for name in ("test.tsv", "test.jsonl"):
        if (folder / name).is_file():
            return SimilarityTask.read(folder / name)
    raise UsageError(
        f"{folder} is no data set: it needs corpus.jsonl, queries.jsonl and qrels/test.tsv (retrieval), test.tsv or "
        "test.jsonl (similarity), or train.csv and test.csv (classification)"
    )


def rounded(score: float) -> float | None:
    """Returns a score for JSON: five decimals, or None if it is not defined (NaN)."""
    return None if math.isnan(score) else round(score, _DECIMALS)


def top_ids(scores: NDArray[np.float64], ids: Sequence[str], depth: int) -> list[str]:
    """Returns the ids of the `depth` largest scores, best first. Equal scores: the larger id, as in trec_eval."""
    least = np.partition(scores, -depth)[-depth] if len(ids) > depth else scores.min()
    found = [(scores[index], ids[index]) for index in np.flatnonzero(scores >= least).tolist()]
    return [name for _, name in sorted(found, reverse=True)[:depth]]


def spearman(left: NDArray[Any], right: NDArray[Any]) -> float:
    """Returns Spearman's rank correlation of [N] and [N]: Pearson's of the ranks. Equal values share a mean rank."""

    def ranks(values: NDArray[Any]) -> NDArray[np.float64]:
        _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
        centred: NDArray[np.float64] = (counts.cumsum() - (counts - 1) / 2)[places] - (len(values) + 1) / 2
        return centred

    x, y = ranks(left), ranks(right)
    norm = math.sqrt(float((x @ x) * (y @ y)))
    return float(x @ y) / norm if norm else math.nan


def draw_examples(classes: Sequence[str]) -> Iterator[NDArray[np.int64]]:
    """Yields DRAWS times the indices of EXAMPLES texts of each class."""
    random = np.random.default_rng(_SEED)
    indices = np.arange(len(classes))
    for _ in range(DRAWS):
        random.shuffle(indices)
        seen = Counter[str]()
        kept: list[int] = []
        for index in indices.tolist():
            seen[classes[index]] += 1
            if seen[classes[index]] <= EXAMPLES:
                kept.append(index)
        yield np.array(kept)


def _ranking_scores(ranking: Sequence[str], relevance: Mapping[str, float]) -> dict[str, float]:
    """Scores of one query, as trec_eval computes ndcg_cut, map_cut, recall and recip_rank."""
    gains = [max(relevance.get(document, 0), 0) for document in ranking]
    ideal = sorted((value for value in relevance.values() if value > 0), reverse=True)
    hits = [rank for rank, gain in enumerate(gains, 1) if gain]
    at_10 = [rank for rank in hits if rank <= 10]
    num_relevant = max(len(ideal), 1)
    return {
        "ndcg_at_10": _dcg(gains[:10]) / (_dcg(ideal[:10]) or 1),
        "map_at_10": math.fsum(number / rank for number, rank in enumerate(at_10, 1)) / num_relevant,
        "recall_at_10": len(at_10) / num_relevant,
        "recall_at_100": sum(rank <= 100 for rank in hits) / num_relevant,
        "mrr_at_10": 1 / at_10[0] if at_10 else 0.0,
    }


def _dcg(gains: Sequence[float]) -> float:
    return math.fsum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, 1))


def _unit(rows: NDArray[Any]) -> NDArray[np.float64]:
    """Returns [N, D] with norm 1; rows of zeros stay."""
    rows = rows.astype(np.float64)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: NDArray[np.float64] = rows / np.where(norms, norms, 1)
    return unit


def _rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Returns the rows of a .jsonl, .tsv or .csv file, with line numbers. Raises UsageError if it has none."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = list(_json_rows(path, lines) if path.suffix == ".jsonl" else _table_rows(path, lines))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not rows:
        raise UsageError(f"{path} holds no rows")
    return rows


def _json_rows(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: no JSON ({error})") from error
        if not isinstance(row, dict):
            raise UsageError(f"{path}, line {number}: must be a JSON object")
        yield number, row


def _table_rows(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    # Cells of .tsv files contain single quotation marks, which are part of the text.
    is_tsv = path.suffix == ".tsv"
    dialect: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if is_tsv else {}
    table = csv.DictReader(lines, **dialect)
    for row in table:
        yield table.line_num, row


def _judgements(path: Path) -> dict[str, dict[str, float]]:
    """Returns the relevance of documents by query id. Raises UsageError if a line is invalid."""
    judgements = defaultdict[str, dict[str, float]](dict)
    for line, row in _rows(path):
        query, document = _text(path, line, row, "query-id"), _text(path, line, row, "corpus-id")
        judgements[query][document] = _number(path, line, row, "score")
    return dict(judgements)


def _text(path: Path, line: int, row: Mapping[str, Any], field: str) -> str:
    """Returns a field of a row; a number, such as an id, as text."""
    value = row.get(field)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise UsageError(f"{path}, line {line}: field {field!r} must be a text, not {value!r}")
    return value


def _number(path: Path, line: int, row: Mapping[str, Any], field: str) -> float:
    try:
        number = float(_text(path, line, row, field))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{path}, line {line}: field {field!r} must be a number, not {row[field]!r}")
    return number
