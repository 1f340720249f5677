"""LoRA adapters that come with a model: where they are found, and that a request for one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import ModelLoadError
from penstock.engine.protocol.model_info import ModelInfo

BERT: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 32,
    "vocab_size": 100,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
JINA_TASKS = ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching")
ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "owner/base"}


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return folder


def resolve(folder: Path, **config: Any) -> ModelInfo:
    return resolve_model(EngineConfig(model=str(folder), **config))


def save(folder: Path, *names: str) -> None:
    save_file({name: np.zeros(1, np.float32) for name in names}, folder / "model.safetensors")


def test_plain_model_has_no_adapters(tmp_path: Path) -> None:
    write(tmp_path, {"config.json": BERT, "checkpoint-500/adapter_config.json": ADAPTER})
    save(tmp_path, "bert.layer.0.flora_A.weight", "bert.layer.0.weight")
    info = resolve(tmp_path)
    assert info.adapters == ()
    assert not info.has_task_adapters


def test_config_names_the_adapters(tmp_path: Path) -> None:
    info = resolve(write(tmp_path, {"config.json": BERT | {"lora_adaptations": list(JINA_TASKS)}}))
    assert info.adapters == JINA_TASKS
    assert info.sources["adapters"] == "config.json: lora_adaptations"
    assert info.has_task_adapters


def test_empty_list_says_that_there_are_no_adapters(tmp_path: Path) -> None:
    """An operator can overrule what is found in folders that have nothing to do with the model."""
    write(tmp_path, {"config.json": BERT, "one/adapter_config.json": ADAPTER, "two/adapter_config.json": ADAPTER})
    save(tmp_path, "layer.lora_A.weight")
    assert resolve(tmp_path).adapters == ("one", "two")
    assert resolve(tmp_path, hf_overrides={"lora_adaptations": []}).adapters == ()
    assert resolve(tmp_path, hf_overrides={"lora_adaptations": None}).adapters == ("one", "two")


def test_adapters_in_checkpoints_are_left_out(tmp_path: Path) -> None:
    places = ("checkpoint-500", "checkpoint-500/lora", "run/checkpoint-20")
    write(tmp_path, {"config.json": BERT} | {f"{place}/adapter_config.json": ADAPTER for place in places})
    assert resolve(tmp_path).adapters == ()


def test_names_of_adapters_must_be_a_list(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="lora_adaptations is 'query'; it must be a list of names"):
        resolve(write(tmp_path, {"config.json": BERT | {"lora_adaptations": "query"}}))


def test_family_with_adapters_is_known(tmp_path: Path) -> None:
    config = BERT | {"model_type": "jina_embeddings_v3", "architectures": ["JinaEmbeddingsV3Model"]}
    info = resolve(write(tmp_path, {"config.json": config}))
    assert info.adapters == JINA_TASKS
    assert info.has_task_adapters


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (("",), ("adapter_config.json",)),
        (("lora/",), ("lora",)),
        (("passage/", "query/"), ("passage", "query")),
        (("adapters/passage/", "adapters/query/"), ("adapters/passage", "adapters/query")),
    ],
)
def test_folders_of_adapters_are_found(tmp_path: Path, places: tuple[str, ...], expected: tuple[str, ...]) -> None:
    files = {f"{place}adapter_config.json": ADAPTER for place in places}
    info = resolve(write(tmp_path, {"config.json": BERT, **files}))
    assert info.adapters == expected
    assert info.has_task_adapters == (len(expected) > 1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layer.0.parametrizations.weight.0.lora_A", ("lora",)),
        ("layer.0.query.lora_B.default.weight", ("default",)),
        ("layer.0.query.lora_A.weight", ("lora",)),
        ("embeddings.lora_embedding_A.query", ("query",)),
    ],
)
@pytest.mark.parametrize("in_shards", [False, True])
def test_names_of_tensors_tell_of_adapters(
    tmp_path: Path, name: str, expected: tuple[str, ...], in_shards: bool
) -> None:
    write(tmp_path, {"config.json": BERT})
    if in_shards:
        write(tmp_path, {"model.safetensors.index.json": {"weight_map": {"a": "1.safetensors", name: "2.safetensors"}}})
    else:
        save(tmp_path, "a", name)
    assert resolve(tmp_path).adapters == expected


def test_adapter_without_a_model_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"adapter_config.json": ADAPTER})
    with pytest.raises(ModelLoadError, match=r"holds a PEFT adapter .* merge it into owner/base"):
        resolve(tmp_path)
    write(tmp_path, {"modules.json": [{"type": "sentence_transformers.models.Transformer", "path": ""}]})
    with pytest.raises(ModelLoadError, match=r"holds a PEFT adapter .* merge it into owner/base"):
        resolve(tmp_path)
