"""Language-model rerankers are recognised by their files, name or overrides."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from penstock.engine.model_files.reranker import PRESETS, QWEN3_RERANKER
from penstock.engine.model_files.resolve import resolved_table
from penstock.engine.protocol.errors import ModelLoadError
from penstock.engine.protocol.model_info import Activation, ModelInfo, ModelKind
from penstock.engine.protocol.tasks import PoolingTask, PoolingType

from ...tables import cases, table
from .folders import TRANSFORMER, resolve as resolve_files, write as write_files

VOCABULARY = ["no", "yes", "0", "1", "Yes", "<unk>"]
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64, "vocab_size": 10}
QWEN3 = SIZES | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
QWEN2 = SIZES | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
GEMMA = SIZES | {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}
LOGIT_SCORE = table(__file__, "logit_score")


def write(folder: Path, config: dict[str, Any], files: dict[str, Any] | None = None) -> Path:
    """Writes the files of a language model with a tokenizer of VOCABULARY."""
    write_files(folder, {"config.json": config} | (files or {}))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def resolve(folder: Path, **overrides: Any) -> ModelInfo:
    return resolve_files(folder, hf_overrides=overrides)


@pytest.mark.parametrize(
    ("name", "config", "tokens", "labels", "preset"),
    [
        ("Qwen3-Reranker-0.6B", QWEN3, (0, 1), ("yes",), "qwen3-reranker"),
        ("models--Qwen--Qwen3-Reranker-8B/snapshots/0a1b", QWEN3, (0, 1), ("yes",), "qwen3-reranker"),
        ("copy", QWEN3 | {"_name_or_path": "Qwen/Qwen3-Reranker-4B"}, (0, 1), ("yes",), "qwen3-reranker"),
        ("mxbai-rerank-large-v2", QWEN2, (2, 3), ("1",), "mxbai-rerank-v2"),
        ("bge-reranker-v2-gemma", GEMMA, (4,), ("Yes",), "bge-reranker-v2-gemma"),
    ],
)
def test_published_checkpoint_is_known_by_its_name(
    name: str, config: dict[str, Any], tokens: tuple[int, ...], labels: tuple[str, ...], preset: str, tmp_path: Path
) -> None:
    info = resolve(write(tmp_path / name, config))
    known = next(each for each in PRESETS if each.name == preset)
    assert info.kind is ModelKind.CROSS_ENCODER
    assert info.tasks == (PoolingTask.SCORE,)
    assert (info.sequence_pooling, info.activation) == ((PoolingType.LAST,), Activation.SIGMOID)
    assert (info.classifier_tokens, info.classifier_method, info.labels) == (tokens, known.method, labels)
    assert (info.score_template, info.pair_chat) == (known.template, None)
    assert preset in info.sources["kind"]
    assert preset in info.sources["score_template"]
    rows = {row[0]: row[1] for row in resolved_table(info)}
    assert "{document}" in rows["score_template"]


@cases(__file__, "name", "config", "files")
def test_other_models_are_not_rerankers(
    name: str, config: dict[str, Any], files: dict[str, Any], tmp_path: Path
) -> None:
    info = resolve(write(tmp_path / name, config, files))
    assert (info.kind, info.classifier_tokens, info.score_template) == (ModelKind.EMBEDDING, (), None)
    assert not {"classifier_tokens", "score_template", "pair_chat"} & {row[0] for row in resolved_table(info)}


def test_converted_checkpoint_gets_the_prompt_of_its_name(tmp_path: Path) -> None:
    config = QWEN3 | {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    info = resolve(write(tmp_path / "Qwen3-Reranker-0.6B-seq-cls", config))
    assert (info.kind, info.labels, info.classifier_tokens) == (ModelKind.CROSS_ENCODER, ("LABEL_0",), ())
    assert info.score_template == QWEN3_RERANKER.template


@cases(__file__, "overrides", "expected", "has_template")
def test_overrides_make_a_reranker_of_a_language_model(
    overrides: dict[str, Any], expected: dict[str, Any], has_template: bool, tmp_path: Path
) -> None:
    info = resolve(write(tmp_path / "copy", QWEN3), **overrides)
    found = {name: getattr(info, name) for name in expected}
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()} == expected
    assert info.score_template == (QWEN3_RERANKER.template if has_template else None)
    if "classifier_from_token" in overrides:
        assert info.sources["classifier_tokens"] == "--hf-overrides: classifier_from_token"


@cases(__file__, "overrides", "message")
def test_wrong_overrides_are_rejected(overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", QWEN3)
    with pytest.raises(ModelLoadError) as caught:
        resolve(folder, **overrides)
    assert message in str(caught.value)


def test_answer_words_need_a_tokenizer(tmp_path: Path) -> None:
    folder = write(tmp_path / "Qwen3-Reranker", QWEN3)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json does not exist; give their ids"):
        resolve(folder)
    assert resolve(folder, classifier_from_token=[0, 1]).classifier_tokens == (0, 1)


def test_answer_beyond_the_vocabulary_is_rejected(tmp_path: Path) -> None:
    files = {"modules.json": [TRANSFORMER, LOGIT_SCORE], "1_LogitScore/config.json": {"true_token_id": 99}}
    with pytest.raises(ModelLoadError, match="names the token id 99"):
        resolve(write(tmp_path / "model", QWEN3, files))
