"""Texts of real lengths, real texts, and sweeps."""

import json
from pathlib import Path

import pytest
from loads import LOADS
from peers.model import Model, embedded_model
from peers.traffic import concurrency_loads, corpus_loads, cut, describe, length_loads


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


def test_texts_have_as_many_tokens_as_the_lengths_say_within_the_limit(data: Path, model: Model) -> None:
    loads, missing = corpus_loads(data, model)
    assert not missing
    assert set(model.num_tokens(texts_of(loads["sharegpt"]))) == {3, 40, 256}


def test_documents_are_cut_to_the_limit_and_no_further(data: Path, model: Model) -> None:
    loads, _ = corpus_loads(data, model)
    texts = set(texts_of(loads["scifact"]))
    assert texts == {"A title. Its text.", ("long " * 254).strip()}
    assert max(model.num_tokens(list(texts))) == model.max_tokens


def test_a_cut_text_is_a_beginning_of_it(model: Model) -> None:
    text = "Überlänge, naïvely: " * 100
    assert text.startswith(cut(text, model))
    assert model.num_tokens([cut(text, model)]) == [256]
    assert cut("short", model) == "short"


def test_data_that_is_not_there_is_said(tmp_path: Path, model: Model) -> None:
    loads, missing = corpus_loads(tmp_path, model)
    assert not loads
    assert set(missing) == {"sharegpt", "scifact"}
    assert all("--data" in reason for reason in missing.values())


def test_sweeps_change_one_thing(model: Model) -> None:
    assert [load.concurrency for load in concurrency_loads().values()] == [1, 2, 4, 8, 16, 32, 64]
    lengths = length_loads().values()
    assert [load.min_words for load in lengths] == [load.max_words for load in lengths] == [8, 16, 32, 64, 128, 200]
    longest = texts_of(length_loads()["200"])
    assert max(model.num_tokens(longest)) <= model.max_tokens


def test_a_load_is_told_in_words(data: Path, model: Model) -> None:
    assert describe(LOADS["mixed"]) == "5 to 150 words, 32 a request, 4 at once"
    assert describe(LOADS["long"]) == "200 words, 8 a request, 4 at once"
    loads, _ = corpus_loads(data, model)
    assert describe(loads["scifact"]) == "SciFact's abstracts, 4 to 254 words, 32 a request, 4 at once"
