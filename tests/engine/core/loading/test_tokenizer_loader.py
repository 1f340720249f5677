"""Tokenizers that do not fit their model or cannot run are rejected in one line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from penstock.engine.core.loading.tokenizer_loader import load_tokenizer
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import UnsupportedModelError
from penstock.engine.protocol.model_info import ModelKind, MultiVectorTokens, TokenizerSpec
from penstock.engine.protocol.multi_vector import MultiVector, QueryExpansion

from ....tables import cases

WORDS = ["One", "short", "text", "to", "begin", "with", "."]


def word_level(first_id: int, *, unknown: str | None = None) -> Tokenizer:
    """One token for each word of the sample text, <s> (id 1) before each text, and the marker [Q] (id 2)."""
    vocabulary = {"<unk>": 0, "<s>": 1, "[Q]": 2} if unknown is None else {}
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


def test_sample_text_has_only_tokens_of_the_model(tmp_path: Path) -> None:
    assert load(tmp_path, word_level(3), 10).sample_ids == (1, *range(3, 10))
    assert load(tmp_path, word_level(3), 6).sample_ids == (1, 3, 4, 5)
    assert load(tmp_path, word_level(100), 6).sample_ids == (1,)


def test_config_has_the_settings_without_paths(tmp_path: Path) -> None:
    settings = {"unk_token": "<unk>", "bos_token": {"content": "<s>", "__type": "AddedToken"}, "model_max_length": 9}
    config = load(tmp_path, word_level(3), 10, **settings).config
    assert config["tokenizer_class"] in ("PreTrainedTokenizerFast", "TokenizersBackend")
    assert (config["unk_token"], config["bos_token"], config["model_max_length"]) == ("<unk>", "<s>", 9)
    assert str(tmp_path) not in json.dumps(config)
    assert "chat_template" not in config
    config = load(tmp_path, word_level(3), 10, chat_template="{{ messages }}", model_max_length=int(1e30)).config
    assert config["chat_template"] == "{{ messages }}"
    assert "model_max_length" not in config


def test_tokenizer_without_words_is_rejected(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(UnsupportedModelError, match="knows no word of 'One short text"):
        load(tmp_path, tokenizer, 50, unk_token="<unk>")


@cases(__file__, "first_id", "unknown", "parts")
def test_unusable_tokenizer_is_rejected(first_id: int, unknown: str, parts: list[str], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        load(tmp_path, word_level(first_id, unknown=unknown), 50)
    assert "\n" not in caught.value.message
    for part in parts:
        assert part.format(folder=tmp_path) in caught.value.message


def test_unusual_tokenizer_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = load(tmp_path, word_level(3), 10, add_eos_token=False)
    assert not caplog.records
    load(tmp_path, word_level(3), 10, add_eos_token=True)
    assert caplog.messages.pop().endswith("tokenizer.json takes precedence, as in transformers 5.")
    with_end = word_level(3)
    with_end.post_processor = processors.TemplateProcessing(single="$A <s>", special_tokens=[("<s>", 1)])
    load(tmp_path, with_end, 10, add_eos_token=True, eos_token="<s>")
    assert len(caplog.records) == 1
    assert load(tmp_path, word_level(3), 9) != spec
    assert "has 10 tokens, but the model has 9 embeddings" in caplog.messages[-1]
    info = resolve_model(EngineConfig(model=str(tmp_path)))
    load_tokenizer(replace(info, vocab_size=10, classifier_tokens=(3, 4)))
    assert len(caplog.records) == 2
    load_tokenizer(replace(info, vocab_size=10, classifier_tokens=(3, 4), kind=ModelKind.CROSS_ENCODER))
    assert "is a generative reranker without a prompt for pairs" in caplog.messages[-1]


@pytest.mark.parametrize("has_types", [True, False])
def test_mixed_token_types_are_rejected(has_types: bool, tmp_path: Path) -> None:
    tokenizer = word_level(3)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A:1 $B:0", special_tokens=[])
    names = ["input_ids", "token_type_ids"] if has_types else ["input_ids"]
    if not has_types:
        assert not load(tmp_path, tokenizer, 10, model_input_names=names).uses_token_types
        return
    with pytest.raises(UnsupportedModelError, match="mixes token types within a text"):
        load(tmp_path, tokenizer, 10, model_input_names=names)


@cases(__file__, "settings", "vocab_size", "end_id")
def test_end_token_is_the_first_with_an_embedding(
    settings, vocab_size: int, end_id: int | None, tmp_path: Path
) -> None:
    assert load(tmp_path, word_level(3), vocab_size, **settings).end_id == end_id


def test_known_marker_becomes_a_single_token(tmp_path: Path) -> None:
    load(tmp_path, word_level(3), 10)
    info = resolve_model(EngineConfig(model=str(tmp_path)))
    for markers, expected in (((), [1, 0, 0, 0, 5]), (("[Q] of a query", "[none]"), [1, 2, 5])):
        spec = load_tokenizer(replace(info, multi_vector=MultiVector(markers=markers)))
        assert Tokenizer.from_str(spec.json).encode("[Q] text").ids == expected


def test_multi_vector_tokens_are_found_in_the_vocabulary(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(tmp_path, word_level(3), 10)
    info = replace(resolve_model(EngineConfig(model=str(tmp_path))), sources={"multi_vector": "config.json"})

    def find(token: str | None, *skip_words: str) -> MultiVectorTokens:
        expansion = None if token is None else QueryExpansion(length=8, token=token)
        multi_vector = MultiVector(expansion=expansion, skip_words=skip_words)
        return load_tokenizer(replace(info, multi_vector=multi_vector)).multi_vector_tokens

    assert find("text", ".") == MultiVectorTokens(expansion_id=5, skip_ids=(9,))
    assert not caplog.records
    assert find(None, ";", ".") == MultiVectorTokens(skip_ids=(9,))
    assert "not in the vocabulary, so not removed from documents: ;" in caplog.text
    assert [find(token).expansion_id for token in ("<unk>", ".")] == [0, 9]
    with pytest.raises(UnsupportedModelError, match=r"with the token '\[none\]' \(config.json\)"):
        find("[none]")
    load(tmp_path, word_level(3), 10, padding_side="left")
    with pytest.raises(UnsupportedModelError, match="pads queries on the left"):
        find("text")
    load(tmp_path, word_level(3), 10)
    info = replace(info, vocab_size=9)
    with pytest.raises(UnsupportedModelError, match=r"with the token '\.'"):
        find(".")
