"""Quality metrics on tasks that can be checked by hand."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import banking77
import numpy as np
import pytest
from banking77 import Banking77
from numpy.typing import NDArray
from scifact import SciFact, best, ndcg


def test_ndcg_discounts_by_rank() -> None:
    assert ndcg(["a", "b"], {"a": 1}) == 1.0
    assert ndcg(["b", "a"], {"a": 1}) == pytest.approx(1 / math.log2(3))
    assert ndcg(["a", "b", "c"], {"a": 1, "c": 2}) == pytest.approx((1 + 2 / 2) / (2 + 1 / math.log2(3)))
    assert ndcg(["b"], {"a": 1}) == 0.0


def test_larger_id_of_equal_scores_is_first() -> None:
    ids = [f"{number:02}" for number in range(20)]
    assert best(np.zeros(20), ids) == ids[:9:-1]
    assert best(np.array([0.5, 0.75, 0.5]), ["a", "b", "c"]) == ["b", "c", "a"]
    scores = np.linspace(0, 1, 20)
    scores[4] = 2.0
    assert best(scores, ids) == ["04", *ids[:10:-1]]


@pytest.fixture
def scifact(tmp_path: Path) -> Path:
    """Twenty documents, two with a judgement, and three queries, one without a judgement."""
    rows = [{"_id": str(number), "title": f"t{number}", "text": f"x{number}"} for number in range(20)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    queries = [{"_id": f"q{number}", "text": f"t{5 * number} x{5 * number}"} for number in range(3)]
    (tmp_path / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\t5\t1\nq2\t11\t1\n")
    return tmp_path


def one_hot(texts: list[str]) -> NDArray[np.float64]:
    """Orthogonal vectors of different lengths."""
    numbers = [int(text.rpartition("x")[2]) for text in texts]
    return np.array([np.eye(20)[number] * (1 + number) for number in numbers])


def test_ndcg_is_the_mean_of_judged_queries(scifact: Path) -> None:
    task = SciFact.read(scifact)
    assert (len(task.corpus), list(task.queries)) == (20, ["q1", "q2"])
    # q1 finds document 5 first; for q2 document 10 comes first, then by their ids 9, 8, 7, ... and not 11.
    assert task.ndcg(one_hot) == 0.5


@pytest.fixture
def banking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Banking77:
    """Three classes with orthogonal texts. One of four test texts has a wrong class."""
    monkeypatch.setattr(banking77, "EXAMPLES", 2)
    rows = [f"{number % 3},c{number % 3}" for number in range(30)]
    (tmp_path / "train.csv").write_text("\n".join(["text,category", *rows]))
    (tmp_path / "test.csv").write_text("text,category\n0,c0\n1,c1\n2,c2\n0,c1")
    return Banking77.read(tmp_path)


def test_text_gets_the_class_of_its_nearest_examples(banking: Banking77) -> None:
    assert banking.accuracy(lambda texts: np.eye(3)[[int(text) for text in texts]]) == 0.75
    assert len(banking.draws) == banking77.DRAWS
    assert all(Counter(banking.classes[places]) == {0: 2, 1: 2, 2: 2} for places in banking.draws)
