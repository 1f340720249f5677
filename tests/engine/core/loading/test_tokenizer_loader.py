"""Tokenizers that do not fit their model, or that cannot run, are refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from penstock.engine.core.loading.tokenizer_loader import load_tokenizer
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import UnsupportedModelError
from penstock.engine.protocol.model_info import ModelKind, TokenizerSpec

WORDS = ["One", "short", "text", "to", "begin", "with", "."]


def word_level(first_id: int, *, unknown: str | None = None) -> Tokenizer:
    """One token for each word of the sample text, and <s> (id 1) before each text."""
    vocabulary = {"<unk>": 0, "<s>": 1} if unknown is None else {}
    vocabulary |= {word: first_id + i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown or "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if unknown is None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    return tokenizer


def load(folder: Path, tokenizer: Tokenizer, vocab_size: int, **settings: object) -> TokenizerSpec:
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    config = {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 8, "num_attention_heads": 2}
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
    return load_tokenizer(resolve_model(EngineConfig(model=str(folder))))


def refused(folder: Path, tokenizer: Tokenizer, vocab_size: int) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        load(folder, tokenizer, vocab_size)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_the_first_text_holds_no_token_that_the_model_lacks(tmp_path: Path) -> None:
    assert load(tmp_path, word_level(3), 10).sample_ids == (1, *range(3, 10))
    assert load(tmp_path, word_level(3), 6).sample_ids == (1, 3, 4, 5)
    assert load(tmp_path, word_level(100), 6).sample_ids == (1,)


def test_the_config_is_what_the_tokenizer_was_made_of_without_the_places_of_its_files(tmp_path: Path) -> None:
    settings = {"unk_token": "<unk>", "bos_token": {"content": "<s>", "__type": "AddedToken"}, "model_max_length": 9}
    tokenizer = load(tmp_path, word_level(3), 10, **settings).config
    assert tokenizer["tokenizer_class"] in ("PreTrainedTokenizerFast", "TokenizersBackend")
    assert (tokenizer["unk_token"], tokenizer["bos_token"], tokenizer["model_max_length"]) == ("<unk>", "<s>", 9)
    assert str(tmp_path) not in json.dumps(tokenizer)
    assert "chat_template" not in tokenizer
    endless = load(tmp_path, word_level(3), 10, chat_template="{{ messages }}", model_max_length=int(1e30)).config
    assert endless["chat_template"] == "{{ messages }}"
    assert "model_max_length" not in endless


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, word_level(100, unknown="One"), 50)
    assert "makes the ids 100 to 106 of 'One short" in message
    assert "embeddings for 0 to 49 only" in message


def test_a_tokenizer_that_cannot_run_names_its_file(tmp_path: Path) -> None:
    broken = word_level(3, unknown="<none>")
    message = refused(tmp_path, broken, 50)
    assert str(tmp_path / "tokenizer.json") in message
    assert "Missing [UNK] token from the vocabulary" in message


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    load(tmp_path, word_level(3), 10)
    info = resolve_model(EngineConfig(model=str(tmp_path)))
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "none of those"}}')
    with pytest.raises(UnsupportedModelError, match=str(tmp_path)) as caught:
        load_tokenizer(info)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(("answers", "is_warned"), [((), False), ((5, 6), True)])
def test_reranker_that_answers_without_a_prompt_is_warned_of(
    answers: tuple[int, ...], is_warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(tmp_path, word_level(3), 10)
    info = resolve_model(EngineConfig(model=str(tmp_path)))
    load_tokenizer(replace(info, kind=ModelKind.CROSS_ENCODER, classifier_tokens=answers))
    assert ("has no prompt for pairs" in caplog.text) is is_warned
