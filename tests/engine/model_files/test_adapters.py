"""LoRA adapters in the folder of a model are found and named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.engine.protocol.errors import ModelLoadError

from .folders import BERT, resolve, write

JINA_TASKS = ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching")
ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "owner/base"}


def save(folder: Path, *names: str) -> None:
    save_file({name: np.zeros(1, np.float32) for name in names}, folder / "model.safetensors")


def test_plain_model_has_no_adapters(tmp_path: Path) -> None:
    places = ("checkpoint-500", "checkpoint-500/lora", "run/checkpoint-20")
    write(tmp_path, {"config.json": BERT} | {f"{place}/adapter_config.json": ADAPTER for place in places})
    save(tmp_path, "bert.layer.0.flora_A.weight", "bert.layer.0.weight")
    info = resolve(tmp_path)
    assert info.adapters == ()
    assert not info.has_task_adapters


@pytest.mark.parametrize(
    "change",
    [
        {"lora_adaptations": list(JINA_TASKS)},
        {"model_type": "jina_embeddings_v3", "architectures": ["JinaEmbeddingsV3Model"]},
    ],
)
def test_config_or_family_names_the_adapters(change: dict[str, object], tmp_path: Path) -> None:
    info = resolve(write(tmp_path, {"config.json": BERT | change}))
    assert info.adapters == JINA_TASKS
    assert info.has_task_adapters
    if "lora_adaptations" in change:
        assert info.sources["adapters"] == "config.json: lora_adaptations"


def test_empty_list_overrides_adapters_that_were_found(tmp_path: Path) -> None:
    write(tmp_path, {"config.json": BERT, "one/adapter_config.json": ADAPTER, "two/adapter_config.json": ADAPTER})
    save(tmp_path, "layer.lora_A.weight")
    assert resolve(tmp_path).adapters == ("one", "two")
    assert resolve(tmp_path, hf_overrides={"lora_adaptations": []}).adapters == ()
    assert resolve(tmp_path, hf_overrides={"lora_adaptations": None}).adapters == ("one", "two")


def test_names_of_adapters_must_be_a_list(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="lora_adaptations is 'query'; it must be a list of names"):
        resolve(write(tmp_path, {"config.json": BERT | {"lora_adaptations": "query"}}))


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (("",), ("adapter_config.json",)),
        (("adapters/passage/", "adapters/query/"), ("adapters/passage", "adapters/query")),
    ],
)
def test_folders_of_adapters_are_found(tmp_path: Path, places: tuple[str, ...], expected: tuple[str, ...]) -> None:
    files = {f"{place}adapter_config.json": ADAPTER for place in places}
    info = resolve(write(tmp_path, {"config.json": BERT, **files}))
    assert info.adapters == expected
    assert info.has_task_adapters == (len(expected) > 1)


@pytest.mark.parametrize(
    ("name", "read_shards", "expected"),
    [
        ("layer.0.parametrizations.weight.0.lora_A", False, ("lora",)),
        ("layer.0.query.lora_B.default.weight", True, ("default",)),
        ("layer.0.query.lora_A.weight", False, ("lora",)),
        ("embeddings.lora_embedding_A.query", True, ("query",)),
    ],
)
def test_tensor_names_show_adapters(tmp_path: Path, name: str, read_shards: bool, expected: tuple[str, ...]) -> None:
    index = {"weight_map": {"a": "1.safetensors", name: "2.safetensors"}}
    write(tmp_path, {"config.json": BERT} | ({"model.safetensors.index.json": index} if read_shards else {}))
    if not read_shards:
        save(tmp_path, "a", name)
    assert resolve(tmp_path).adapters == expected


def test_adapter_without_a_model_is_rejected(tmp_path: Path) -> None:
    write(tmp_path, {"adapter_config.json": ADAPTER})
    with pytest.raises(ModelLoadError, match=r"has a PEFT adapter .* merge it into owner/base"):
        resolve(tmp_path)
    write(tmp_path, {"modules.json": [{"type": "sentence_transformers.models.Transformer", "path": ""}]})
    with pytest.raises(ModelLoadError, match=r"has a PEFT adapter .* merge it into owner/base"):
        resolve(tmp_path)
