"""What a full server spends on requests that find nothing."""

from __future__ import annotations

from penstock.engine.client.admission import LookupRateLimit


def test_looks_in_vain_are_bounded_by_the_second() -> None:
    now_s = 0.0
    budget = LookupRateLimit(lambda: now_s)
    num_looks = 0
    for _ in range(100_000):  # 10 s of 10,000 requests a second
        now_s += 0.0001
        if not budget.is_spent:
            budget.spend(0)
            num_looks += 1
    print(f"{num_looks} of 100,000 requests in 10 s were looked up")
    assert 1_500 <= num_looks <= 1_800


def test_long_texts_cost_more() -> None:
    now_s = 0.0
    budget = LookupRateLimit(lambda: now_s)
    budget.spend(1_000_000)
    assert budget.is_spent
    now_s = 25.0
    assert budget.is_spent
    now_s = 30.0
    assert not budget.is_spent
