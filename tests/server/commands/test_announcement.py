from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock.engine.protocol.model_info import ModelInfo
from penstock.server.commands.announcement import announcement, open_access_warning
from penstock.server.models.served_model import ModelEntry, ServedModel
from penstock.server.settings import ServerSettings, load


@pytest.fixture
def info(make_engine, tmp_path: Path) -> ModelInfo:
    save_file({"a": torch.zeros(1500, 1000)}, tmp_path / "model.safetensors")
    return make_engine(path=str(tmp_path)).info


def announced(info: ModelInfo, port: int = 8000, *, placements: Sequence[str] = (), **settings: Any) -> list[str]:
    entry = ModelEntry(ServedModel(("a-model",), None), lambda _: None)
    entry.loaded(SimpleNamespace(info=info, placements=placements), 0.1, 0.0)
    return announcement([entry], load(ServerSettings, settings), port).splitlines()


def test_models_and_urls_are_announced(info: ModelInfo) -> None:
    lines = announced(info)
    assert lines[1] == "  a-model: fake, 1.5M parameters, 8 dimensions, inputs of up to 64 tokens"
    on_cpu = "    on cpu (auto: there is no CUDA device) by torch"
    assert lines[2].startswith(f"{on_cpu}, in float32 (auto: float32 on a CPU); tasks: embed, ")
    assert "http://localhost:8000/docs" in lines[3]
    assert lines[4:] == ["  data routes need no API key"]
    assert announced(info, dtype="float32", device="cpu")[2].startswith(
        "    on cpu (--device) by torch, in float32 (--dtype);"
    )


@pytest.mark.parametrize(
    ("dtype", "arithmetic", "flag", "expected"),
    [
        ("bfloat16", "float32", "bfloat16", "bfloat16 (--dtype), products in float32 (measured: 0.5 times"),
        ("int8", "bfloat16", "int8", "int8 (--dtype), attention in bfloat16 (measured: 0.5 times"),
        ("bfloat16", "bfloat16", "auto", "bfloat16 (measured: 1.8 times as fast); tasks"),
    ],
)
def test_dtype_of_products_is_announced(dtype, arithmetic, flag: str, expected: str, make_engine, tmp_path) -> None:
    info = make_engine(path=str(tmp_path), dtype=dtype, arithmetic=arithmetic).info
    info.sources.update(dtype="measured: 1.8 times as fast", arithmetic="measured: 0.5 times as fast")
    assert f", in {expected}" in announced(info, dtype=flag)[2]


def test_models_without_an_engine_are_announced() -> None:
    failed, unloaded = (ModelEntry(ServedModel((name,), None), lambda _: None) for name in ("failed", "unloaded"))
    failed.failed(OSError(), 0.0)
    lines = announcement([failed, unloaded], ServerSettings(), 8000).splitlines()
    assert lines[1:3] == [
        "  failed: could not be loaded; see above",
        "  unloaded: is loaded when a request names it",
    ]


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({"host": "127.0.0.1"}, "http://127.0.0.1:81"),
        ({"host": "::1"}, "http://[::1]:81"),
        ({"host": "::"}, "http://localhost:81"),
        ({"ssl_certfile": Path("cert.pem")}, "https://localhost:81"),
    ],
)
def test_announced_url_can_be_opened(info: ModelInfo, settings: dict[str, Any], url: str) -> None:
    assert f"  {url}/ is a playground" in announced(info, 81, **settings)[3]


@pytest.mark.parametrize(
    ("settings", "is_open"),
    [
        ({}, True),
        ({"host": "::"}, True),
        ({"host": "127.0.0.1"}, False),
        ({"host": "10.0.0.7"}, False),
        ({"api_key": ("k",)}, False),
        ({"api_key_file": Path("keys")}, False),
    ],
)
def test_server_open_to_all_warns(info: ModelInfo, settings: dict[str, Any], is_open: bool) -> None:
    warning = open_access_warning(load(ServerSettings, settings))
    assert (warning is not None) == is_open
    assert warning is None or "--api-key" in warning
    has_key = not settings.keys().isdisjoint({"api_key", "api_key_file"})
    assert announced(info, **settings)[-1] == f"  data routes need {'an' if has_key else 'no'} API key"


def test_number_of_classes_is_announced(make_engine, tmp_path: Path) -> None:
    info = make_engine("sequence_classifier", ("a", "b"), path=str(tmp_path), embedding_size=0).info
    assert announced(info)[1] == "  a-model: fake, 2 classes, inputs of up to 64 tokens"
    assert (
        ", 1 class, " in announced(make_engine("cross_encoder", ("a",), path=str(tmp_path), embedding_size=0).info)[1]
    )


def test_replicas_are_announced_with_their_devices(info: ModelInfo) -> None:
    lines = announced(info, placements=["cores 0-3", "cores 4-7"])
    assert lines[3] == "    2 replicas: cores 0-3; cores 4-7"
    assert announced(info, placements=["cores 0-3"], devices="numa:0")[2].startswith("    on cpu (--devices) by torch")
    assert announced(info, placements=["cores 0-3"])[3] == "    1 replica: cores 0-3"
