"""What the loads send."""

import json

import pytest
from loads import LOADS


@pytest.mark.parametrize("name", list(LOADS))
def test_requests_are_the_same_for_the_same_seed(name: str) -> None:
    load = LOADS[name]
    assert load.requests(8, seed=3) == load.requests(8, seed=3)
    assert load.requests(8, seed=3) != load.requests(8, seed=4)


@pytest.mark.parametrize("name", list(LOADS))
def test_texts_have_the_words_that_the_load_says(name: str) -> None:
    load = LOADS[name]
    requests = load.requests(32)
    assert {len(texts) for texts in requests} == {load.texts_per_request}
    counts = [len(text.split()) for texts in requests for text in texts]
    assert load.min_words <= min(counts)
    assert max(counts) <= load.max_words


def test_bodies_hold_the_requests() -> None:
    load = LOADS["mixed"]
    bodies = [json.loads(body) for body in load.bodies("m", "float", 4, seed=1)]
    assert [body["input"] for body in bodies] == load.requests(4, seed=1)
    assert {(body["model"], body["encoding_format"]) for body in bodies} == {("m", "float")}
