"""Whatever stands in a model's files: it is served, or refused in one line that names what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.core.load_runner import load_runner
from penstock.engine.protocol.config import CacheConfig, EngineConfig
from penstock.engine.protocol.errors import ModelLoadError

from ..conftest import Load, SaveFolder, load_on_torch


def start(load: Load, folder: Path) -> None:
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        num_threads=1,
        cache=CacheConfig(kv_cache_memory=1 << 20),
    )
    load(config).warm_up()


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(load: Load, folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        start(load, folder)
    assert "\n" not in caught.value.message
    return caught.value.message


DISTILBERT = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24}
QWEN = {"num_key_value_heads": 2}
MAMBA = {"state_size": 4}


@pytest.mark.parametrize(
    ("class_name", "sizes", "key", "value"),
    [
        *[("BertModel", {}, "num_attention_heads", value) for value in (0, -1, 10**12, 2.0, "2", [2], True)],
        *[("BertModel", {}, "num_hidden_layers", value) for value in (0, -1, 10**8, 1e30)],
        *[("BertModel", {}, "vocab_size", value) for value in (0, -5, "100")],
        ("BertModel", {}, "type_vocab_size", 10**12),
        ("BertModel", {}, "layer_norm_eps", "small"),
        ("BertModel", {}, "hidden_act", 5),
        ("BertModel", {}, "architectures", 7),
        ("BertModel", {}, "architectures", [None]),
        ("DistilBertModel", DISTILBERT, "n_heads", 0),
        ("DistilBertModel", DISTILBERT, "n_layers", 0),
        ("DistilBertModel", DISTILBERT, "hidden_dim", float("nan")),
        ("RobertaModel", {}, "pad_token_id", "1"),
        ("RobertaModel", {}, "pad_token_id", 10**12),
        ("Qwen2Model", QWEN, "num_key_value_heads", 0),
        ("Qwen2Model", QWEN, "rope_parameters", "none"),
        ("Qwen2Model", QWEN, "layer_types", "full_attention"),
        ("MambaModel", MAMBA, "state_size", 0),
        ("MambaModel", MAMBA, "conv_kernel", -1),
        ("MambaModel", MAMBA, "time_step_rank", 0),
        ("AlbertModel", {"embedding_size": 16}, "num_hidden_groups", 10**9),
    ],
)
def test_a_size_that_no_model_has_is_named(
    class_name: str, sizes: dict[str, int], key: str, value: Any, load: Load, save_folder: SaveFolder
) -> None:
    folder = save_folder(class_name, **sizes)
    change(folder, **{key: value})
    message = refused(load, folder)
    assert key in message
    assert repr(value) in message


@pytest.mark.parametrize(
    ("class_name", "values"),
    [
        ("BertModel", {"num_attention_heads": 3}),
        ("AlbertModel", {"num_attention_heads": 0}),
        ("AlbertModel", {"hidden_act": "unheard-of"}),
        ("BertModel", {"model_type": "unheard-of"}),
    ],
)
def test_what_only_the_library_finds_is_one_line(
    class_name: str, values: Any, load: Load, save_folder: SaveFolder
) -> None:
    folder = save_folder(class_name)
    change(folder, **values)
    assert str(folder) in refused(load, folder)


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100_000, b"\xff\xfe", b'{"version": 5, "model": {}}', b"3"])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_other_files_that_are_damaged_are_named(file: str, content: bytes, load: Load, save_folder: SaveFolder) -> None:
    folder = save_folder()
    if file == "tokenizer_config.json" and content in (b"{}", b'{"version": 5, "model": {}}'):
        pytest.skip("harmless")
    (folder / file).write_bytes(content)
    message = refused(load, folder)
    assert str(folder) in message


@pytest.mark.parametrize(
    "header", [b"\xff" * 8, (10**6).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]"]
)
@pytest.mark.parametrize("class_name", ["BertModel", "AlbertModel"])
def test_a_safetensors_header_that_is_damaged_is_named(
    class_name: str, header: bytes, load: Load, save_folder: SaveFolder
) -> None:
    folder = save_folder(class_name)
    (folder / "model.safetensors").write_bytes(header)
    assert str(folder) in refused(load, folder)


@pytest.mark.parametrize(
    ("load", "function", "error"),
    [
        (
            load_on_torch,
            "model_runner.load_dense",
            torch.OutOfMemoryError("CUDA out of memory.\nTried to get 3 GiB."),
        ),
        (load_on_torch, "model_runner.load_dense", MemoryError("none")),
        (load_runner, "array_runner.load_array_dense", MemoryError("none")),
    ],
)
def test_too_little_memory_is_no_damage(
    load: Load,
    function: str,
    error: Exception,
    save_folder: SaveFolder,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if function.startswith("array_runner"):
        request.getfixturevalue("widest")  # without native kernels no model runs there

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(f"penstock.engine.core.{function}", refuse)
    message = refused(load, save_folder())
    assert message.startswith("There is too little memory on cpu for ")
    assert "--dtype" in message
