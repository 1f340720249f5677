"""Requests of the loads."""

import pytest
from conditions import AROUND, SizedLoad
from loads import LOADS


@pytest.mark.parametrize("name", LOADS)
def test_requests_depend_on_the_seed_and_have_the_stated_words(name: str) -> None:
    load = LOADS[name]
    assert load.requests(8, seed=3) == load.requests(8, seed=3)
    assert load.requests(8, seed=3) != load.requests(8, seed=4)
    requests = load.requests(32)
    assert {len(texts) for texts in requests} == {load.texts_per_request}
    counts = [len(text.split()) for texts in requests for text in texts]
    assert load.min_words <= min(counts)
    assert max(counts) <= load.max_words


def test_sized_texts_have_the_stated_tokens() -> None:
    load = SizedLoad("sized", 30, 30, 4, 8, ("dam", "gate"))
    assert load.num_tokens == 30 + AROUND
    assert all(len(text.split()) == 30 for texts in load.requests(3) for text in texts)
