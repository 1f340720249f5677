"""The log lines of a server that is ready."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock.engine.protocol.model_info import ModelInfo
from penstock.server.commands.announcement import announcement, exposure
from penstock.server.models.served_model import ModelEntry, ServedModel
from penstock.server.settings import ServerSettings, load


@pytest.fixture
def info(make_engine, tmp_path: Path) -> ModelInfo:
    save_file({"a": torch.zeros(1500, 1000)}, tmp_path / "model.safetensors")
    return make_engine(path=str(tmp_path)).info


def said(info: ModelInfo, port: int = 8000, *, places: Sequence[str] = (), **settings: Any) -> list[str]:
    entry = ModelEntry(ServedModel(("a-model",), None), lambda _: None)
    entry.loaded(SimpleNamespace(info=info, places=places), 0.1, 0.0)
    return announcement([entry], load(ServerSettings, settings), port).splitlines()


def test_models_and_urls_are_announced(info: ModelInfo) -> None:
    lines = said(info)
    assert lines[1] == "  a-model: fake, 1.5M parameters, 8 dimensions, inputs of up to 64 tokens"
    on_cpu = "    on cpu (auto: there is no CUDA device) by torch"
    assert lines[2].startswith(f"{on_cpu}, in float32 (auto: float32 on a CPU); tasks: embed, ")
    assert "http://localhost:8000/docs" in lines[3]
    assert lines[4:] == ["  data routes need no API key"]
    assert said(info, dtype="float32", device="cpu")[2].startswith(
        "    on cpu (--device) by torch, in float32 (--dtype);"
    )


def test_replicas_are_announced_with_their_devices(info: ModelInfo) -> None:
    lines = said(info, places=["cores 0-3", "cores 4-7"])
    assert lines[3] == "    2 replicas: cores 0-3; cores 4-7"
    assert said(info, places=["cores 0-3"], devices="numa:0")[2].startswith("    on cpu (--devices) by torch")
    assert said(info, places=["cores 0-3"])[3] == "    1 replica: cores 0-3"


def test_measurement_is_the_reason_for_the_dtype(make_engine, tmp_path: Path) -> None:
    info = make_engine(path=str(tmp_path), kernels="native, avx512", num_lanes=2, dtype="bfloat16").info
    info.sources["dtype"] = "measured: 1.8 times as fast as float32 here"
    assert ") by native, avx512, 2 lanes, in bfloat16 (measured: 1.8 times as fast as float32 here); " in said(info)[2]


@pytest.mark.parametrize(
    ("dtype", "arithmetic", "asked", "told"),
    [
        ("bfloat16", "float32", "bfloat16", "bfloat16 (--dtype), products in float32 (measured: bfloat16 is 0.5 times"),
        (
            "bfloat16",
            "bfloat16",
            "bfloat16",
            "bfloat16 (--dtype), products in bfloat16 (measured: bfloat16 is 0.5 times",
        ),
        ("int8", "bfloat16", "int8", "int8 (--dtype), attention in bfloat16 (measured: bfloat16 is 0.5 times"),
        ("bfloat16", "bfloat16", "auto", "bfloat16 (measured: 1.8 times as fast as float32 here); tasks"),
        (
            "bfloat16",
            "float32",
            "auto",
            "bfloat16 (measured: 1.8 times as fast as float32 here), products in float32 (",
        ),
    ],
)
def test_arithmetic_of_bfloat16_is_announced(
    dtype: str, arithmetic: str, asked: str, told: str, make_engine, tmp_path: Path
) -> None:
    info = make_engine(path=str(tmp_path), dtype=dtype, arithmetic=arithmetic).info
    info.sources["dtype"] = "measured: 1.8 times as fast as float32 here"
    info.sources["arithmetic"] = "measured: bfloat16 is 0.5 times as fast as float32 here"
    assert f", in {told}" in said(info, dtype=asked)[2]


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", "http://127.0.0.1:81"), ("::1", "http://[::1]:81"), ("::", "http://localhost:81")]
)
def test_announced_address_can_be_opened(info: ModelInfo, host: str, shown: str) -> None:
    assert f"  {shown}/ is a playground" in said(info, 81, host=host)[3]


def test_https_is_named(info: ModelInfo, tmp_path: Path) -> None:
    assert "https://localhost:443/" in said(info, 443, ssl_certfile=tmp_path / "cert.pem")[3]


def test_classes_are_counted(make_engine, tmp_path: Path) -> None:
    info = make_engine("sequence_classifier", ("a", "b"), path=str(tmp_path), embedding_size=0).info
    assert said(info)[1] == "  a-model: fake, 2 classes, inputs of up to 64 tokens"
    assert ", 1 class, " in said(make_engine("cross_encoder", ("a",), path=str(tmp_path), embedding_size=0).info)[1]


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
def test_an_open_server_warns(info: ModelInfo, settings: dict[str, Any], is_open: bool) -> None:
    warning = exposure(load(ServerSettings, settings))
    assert (warning is not None) == is_open
    assert warning is None or "--api-key" in warning
    has_key = not settings.keys().isdisjoint({"api_key", "api_key_file"})
    assert said(info, **settings)[-1] == f"  data routes need {'an' if has_key else 'no'} API key"
