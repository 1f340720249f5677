"""The model of all sides, texts of real lengths, real texts, and sweeps."""

import json
from pathlib import Path

import pytest
from peers.model import Model, embedded_model
from peers.traffic import corpus_loads, describe


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(embedded_model())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    lengths = tmp_path / "sharegpt-lengths" / "bert_tokens_per_human_turn.txt"
    lengths.parent.mkdir()
    lengths.write_text("2\n3\n40\n9000\n")
    corpus = tmp_path / "scifact" / "corpus.jsonl"
    corpus.parent.mkdir()
    rows = [{"title": "A title.", "text": "Its text."}, {"title": "", "text": "long " * 900}]
    corpus.write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def texts_of(load) -> list[str]:
    return [text for request in load.requests(64) for text in request]


def test_operations_are_those_of_the_matrix_products(model: Model) -> None:
    # One layer: four projections of 384 x 384, two of 384 x 1536, and two products of attention.
    tokens = 10
    layer = 2 * tokens * (4 * 384 * 384 + 2 * 384 * 1536) + 2 * (2 * tokens * tokens * 384)
    assert model.operations(tokens) == 6 * layer


def test_token_counts_include_special_tokens(model: Model) -> None:
    assert model.num_tokens(["hello world", "", "hello " * 400]) == [4, 2, 402]
    assert model.max_tokens == 256


def test_corpus_texts_have_real_lengths_up_to_the_limit(data: Path, model: Model) -> None:
    loads, missing = corpus_loads(data, model)
    assert not missing
    assert set(model.num_tokens(texts_of(loads["sharegpt"]))) == {3, 40, 256}
    assert set(texts_of(loads["scifact"])) == {"A title. Its text.", ("long " * 254).strip()}
    assert describe(loads["scifact"]) == "SciFact's abstracts, 4 to 254 words, 32 a request, 4 at once"
