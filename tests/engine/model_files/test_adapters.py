"""LoRA adapters in the folder of a model are found and named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.engine.model_files.adapters import PeftConfig
from penstock.engine.protocol.errors import ModelLoadError
from penstock.engine.protocol.model_info import ModelInfo
from penstock.engine.protocol.tasks import PoolingType

from ...tables import cases
from .folders import BERT, resolve, write

JINA_TASKS = ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching")
ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "owner/base"}


def names_of(info: ModelInfo) -> tuple[str, ...]:
    return tuple(adapter.name for adapter in info.adapters)


def save(folder: Path, *names: str) -> None:
    save_file({name: np.zeros(1, np.float32) for name in names}, folder / "model.safetensors")


def test_plain_model_has_no_adapters(tmp_path: Path) -> None:
    places = ("checkpoint-500", "checkpoint-500/lora", "run/checkpoint-20")
    write(tmp_path, {"config.json": BERT} | {f"{place}/adapter_config.json": ADAPTER for place in places})
    save(tmp_path, "bert.layer.0.flora_A.weight", "bert.layer.0.weight")
    info = resolve(tmp_path)
    assert info.adapters == ()
    assert info.task_adapters == ()


@cases(__file__, "change")
def test_config_or_family_names_the_adapters(change: dict[str, object], tmp_path: Path) -> None:
    info = resolve(write(tmp_path, {"config.json": BERT | change}))
    assert names_of(info) == JINA_TASKS
    assert info.served_adapters == (), "the folder has no weights of adapters"
    assert len(info.task_adapters) == len(JINA_TASKS)
    if "lora_adaptations" in change:
        assert info.sources["adapters"] == "config.json: lora_adaptations"


def test_empty_list_overrides_adapters_that_were_found(tmp_path: Path) -> None:
    write(tmp_path, {"config.json": BERT, "one/adapter_config.json": ADAPTER, "two/adapter_config.json": ADAPTER})
    save(tmp_path, "layer.lora_A.weight")
    assert names_of(resolve(tmp_path)) == ("one", "two")
    assert resolve(tmp_path, hf_overrides={"lora_adaptations": []}).adapters == ()
    assert names_of(resolve(tmp_path, hf_overrides={"lora_adaptations": None})) == ("one", "two")


def test_names_of_adapters_must_be_a_list(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="lora_adaptations is 'query'; it must be a list of names"):
        resolve(write(tmp_path, {"config.json": BERT | {"lora_adaptations": "query"}}))


@cases(__file__, "places", "expected")
def test_folders_of_adapters_are_found(tmp_path: Path, places: list[str], expected: list[str]) -> None:
    files = {f"{place}adapter_config.json": ADAPTER for place in places}
    info = resolve(write(tmp_path, {"config.json": BERT, **files}))
    assert [adapter.name for adapter in info.served_adapters] == expected
    assert [adapter.name for adapter in info.task_adapters] == expected


@cases(__file__, "name", "read_shards", "expected")
def test_tensor_names_show_adapters(tmp_path: Path, name: str, read_shards: bool, expected: list[str]) -> None:
    index = {"weight_map": {"a": "1.safetensors", name: "2.safetensors"}}
    write(tmp_path, {"config.json": BERT} | ({"model.safetensors.index.json": index} if read_shards else {}))
    if not read_shards:
        save(tmp_path, "a", name)
    info = resolve(tmp_path)
    assert list(names_of(info)) == expected
    assert info.served_adapters == ()


def test_adapter_without_a_model_is_rejected(tmp_path: Path) -> None:
    write(tmp_path, {"adapter_config.json": ADAPTER})
    with pytest.raises(ModelLoadError, match=r"has a PEFT adapter .* serve owner/base with --adapter NAME="):
        resolve(tmp_path)
    write(tmp_path, {"modules.json": [{"type": "sentence_transformers.models.Transformer", "path": ""}]})
    with pytest.raises(ModelLoadError, match=r"has a PEFT adapter .* serve owner/base with --adapter NAME="):
        resolve(tmp_path)


def test_jina_v5_is_its_base_model_with_task_adapters(tmp_path: Path) -> None:
    modules = [{"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer"}]
    config = BERT | {
        "model_type": "jina_embeddings_v5",
        "architectures": ["JinaEmbeddingsV5Model"],
        "auto_map": {"AutoModel": "modeling_jina_embeddings_v5.JinaEmbeddingsV5Model"},
    }
    tasks = ("classification", "clustering", "retrieval", "text-matching")
    files = {f"adapters/{task}/adapter_config.json": ADAPTER for task in tasks}
    nano = resolve(write(tmp_path / "nano", {"config.json": config, "modules.json": modules, **files}))
    assert (nano.model_type, nano.architecture, nano.packed) == ("eurobert", "EuroBertModel", True)
    assert (nano.sequence_pooling, nano.normalize, nano.is_causal) == ((PoolingType.LAST,), True, False)
    assert (names_of(nano), nano.default_adapter) == (tasks, "retrieval")
    small = resolve(write(tmp_path / "small", {"config.json": config | {"max_window_layers": 28}, **files}))
    assert (small.model_type, small.sequence_pooling, small.is_causal) == ("qwen3", (PoolingType.LAST,), True)


def test_adapters_of_the_operator_follow_those_of_the_model(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {"config.json": BERT, "one/adapter_config.json": ADAPTER})
    write(tmp_path / "legal", {"adapter_config.json": ADAPTER})
    info = resolve(folder, adapter=(f"legal={tmp_path / 'legal'}",))
    assert names_of(info) == ("one", "legal")
    assert info.sources["adapters"] == "adapter_config.json, --adapter"
    with pytest.raises(ModelLoadError, match=r"--adapter: .* has its own adapter 'one'"):
        resolve(folder, adapter=(f"one={tmp_path / 'legal'}",))
    with pytest.raises(ModelLoadError, match=r"--adapter: legal=.*: the folder has no adapter_config.json"):
        resolve(folder, adapter=(f"legal={tmp_path}",))


def read(folder: Path, **values: Any) -> PeftConfig:
    return PeftConfig.read(write(folder, {"adapter_config.json": {"peft_type": "LORA", **values}}))


@cases(__file__, "values", "message")
def test_unusable_option_is_rejected_with_its_value(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=rf"adapter_config\.json: .*{message}"):
        read(tmp_path, **values)


def test_scale_depends_on_rank_and_patterns(tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"q": 16}, "alpha_pattern": {r"layer\.[01]\.q": 4.0}}
    config = read(tmp_path, r=4, lora_alpha=8, **patterns)
    assert [config.rank(name) for name in ("q", "layer.0.q", "layer.0.qq", "layer.0.k")] == [16, 16, 4, 4]
    assert [config.scale(name) for name in ("q", "layer.0.q", "layer.2.q", "layer.0.k")] == [0.5, 0.25, 0.5, 2.0]
    assert read(tmp_path, r=4, lora_alpha=8, use_rslora=True).scale("k") == 4.0
    assert read(tmp_path).scale("k") == 1.0


@cases(__file__, "values", "targeted")
def test_modules_of_a_layer_are_chosen(values: dict[str, Any], targeted: str, tmp_path: Path) -> None:
    config = read(tmp_path, **values)
    assert [name for name in ("q", "a.q", "a.qq", "a.k") if config.targets(name, 1)] == targeted.split()
