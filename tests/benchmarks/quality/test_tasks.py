"""Quality metrics on tasks that can be checked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scifact import best, ndcg


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
