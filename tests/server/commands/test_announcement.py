import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.engine.protocol.model_info import ModelInfo
from penstock.server.commands.serve import announcement, open_access_warning
from penstock.server.models.model_entry import ModelEntry
from penstock.server.models.served_model import ServedModel
from penstock.server.settings import ServerSettings, load_settings

from ...tables import cases


@pytest.fixture
def info(make_engine, tmp_path: Path) -> ModelInfo:
    save_file({"a": np.zeros((1500, 1000), np.int8)}, tmp_path / "model.safetensors")
    return make_engine(path=str(tmp_path)).info


def announced(info: ModelInfo, *ports: int, placements: Sequence[str] = (), **settings: Any) -> list[str]:
    loaded = load_settings(ServerSettings, settings)
    entry = ModelEntry(ServedModel(("a-model",), config=loaded.engine), lambda _: None)
    entry.set_loaded(SimpleNamespace(info=info, replicas=[SimpleNamespace(placement=p) for p in placements]), 0.1, 0.0)
    return announcement([entry], loaded, ports or (8000,)).splitlines()


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


def test_models_without_engine_are_announced_with_the_reason() -> None:
    entries = [ModelEntry(ServedModel((name,), None), lambda _: None) for name in ("later", "broken")]
    entries[1].error = RuntimeError("no")
    lines = announcement(entries, load_settings(ServerSettings, {}), (8000,)).splitlines()
    assert lines[1:3] == ["  later: is loaded when a request names it", "  broken: could not be loaded; see above"]


@cases(__file__, "fields", "sources", "settings", "text")
def test_device_and_dtype_are_announced_with_the_reason(
    info: ModelInfo, fields: dict[str, Any], sources: dict[str, str], settings: dict[str, Any], text: str
) -> None:
    changed = dataclasses.replace(info, **fields, sources={**info.sources, **sources})
    assert text in announced(changed, **settings)[2]


def test_replicas_and_labels_are_announced(info: ModelInfo) -> None:
    one = dataclasses.replace(info, labels=("a",), embedding_size=None)
    lines = announced(one, placements=["cores 0-3"])
    assert "1.5M parameters, 1 class, inputs of" in lines[1]
    assert lines[3] == "    1 replica: cores 0-3"
    several = dataclasses.replace(info, labels=("a", "b"), dimensions=4)
    lines = announced(several, placements=["cores 0-3", "cores 4-7"])
    assert "4 dimensions, 2 classes, inputs of" in lines[1]
    assert lines[3] == "    2 replicas: cores 0-3; cores 4-7"


@cases(__file__, "settings", "url")
def test_announced_url_can_be_opened(info: ModelInfo, settings: dict[str, Any], url: str) -> None:
    assert f"  {url}/ is a playground" in announced(info, 81, **settings)[3]


def test_metrics_port_is_announced(info: ModelInfo) -> None:
    lines = announced(info, 81, 9090, host="10.0.0.7", ssl_certfile=Path("cert.pem"), metrics_port=9090)
    assert lines[4] == "  metrics: http://10.0.0.7:9090/metrics"
    assert announced(info, 81, 82, metrics_port=0, metrics_host="::1")[4] == "  metrics: http://[::1]:82/metrics"


@cases(__file__, "settings", "is_open")
def test_server_open_to_all_warns(info: ModelInfo, settings: dict[str, Any], is_open: bool) -> None:
    warning = open_access_warning(load_settings(ServerSettings, settings))
    assert (warning is not None) == is_open
    assert warning is None or "--api-key" in warning
    has_key = not settings.keys().isdisjoint({"api_key", "api_key_file"})
    assert announced(info, **settings)[-1] == f"  data routes need {'an' if has_key else 'no'} API key"
