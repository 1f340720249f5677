"""The choice of the runner. torch is imported only for models that need it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.engine import EngineConfig
from penstock.engine.core import load_runner
from penstock.engine.core.array_runner import ArrayRunner
from penstock.engine.core.model_runner import ModelRunner
from penstock.engine.host import pin
from penstock.engine.protocol.errors import MachineError, ModelLoadError

from ..model_infos import make_info
from .conftest import SaveFolder

pytestmark = pytest.mark.usefixtures("three_lane_library")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
FUSION = "TRITON_DEFAULT_FP_FUSION"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that are set while a model loads are removed after the test."""
    for name in (*ALLOCATOR, FUSION):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def load(folder: Path, **config: Any) -> type:
    options = {"device": "cpu", "num_threads": 1, **config}
    runner = load_runner.load_runner(EngineConfig(model=str(folder), **options))
    runner.warm_up()
    return type(runner)


def test_c_library_runs_the_models_that_it_supports(save_folder: SaveFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_folder()
    assert load(folder) is ArrayRunner
    assert load(folder, dtype="bfloat16", cpu_kernels="native") is ArrayRunner
    assert load(folder, cpu_kernels="torch") is ModelRunner
    assert load(folder, dtype="float16") is ModelRunner
    assert load(save_folder("Qwen2Model", num_key_value_heads=2)) is ArrayRunner
    assert load(save_folder("AlbertModel", embedding_size=16)) is ModelRunner
    for may_have_gpu in (True, False):  # torch finds none
        monkeypatch.setattr(load_runner, "may_have_gpu", lambda may=may_have_gpu: may)
        assert load(folder, device="auto") is ArrayRunner


def test_engine_with_cores_runs_on_them(save_folder: SaveFolder) -> None:
    processors = os.sched_getaffinity(0)
    try:
        load(save_folder(), cores=(max(processors),))
        assert os.sched_getaffinity(0) == {max(processors)}
    finally:
        pin(processors)


@pytest.mark.parametrize(("driver", "device"), [(True, "auto"), (True, "cpu"), (False, "auto")])
def test_gpu_without_torch_is_a_warning(
    driver: bool, device: str, save_folder: SaveFolder, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(load_runner, "has_gpu_driver", lambda: driver)
    monkeypatch.setattr(load_runner, "may_have_gpu", lambda: False)
    monkeypatch.setattr(load_runner, "find_spec", lambda _: None)
    assert load(save_folder(), device=device) is ArrayRunner
    assert ("pip install 'penstock[torch]'" in caplog.text) == (driver and device == "auto")


@pytest.mark.parametrize("given", [None, *ALLOCATOR])
def test_gpu_settings_of_the_operator_are_kept(
    given: str | None, save_folder: SaveFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is not None:
        monkeypatch.setenv(given, "max_split_size_mb:64")
    before = dict(os.environ)
    folder = save_folder()
    load(folder)
    assert os.environ == before  # a CPU needs no settings
    monkeypatch.setattr(load_runner, "may_have_gpu", lambda: True)
    load(folder, device="auto")
    added = {} if given else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert os.environ == before | added | {FUSION: "1"}
    monkeypatch.setenv(FUSION, "0")
    load(folder, device="auto")
    assert os.environ[FUSION] == "0"


def test_class_with_remote_code_runs_on_torch(save_folder: SaveFolder) -> None:
    folder = save_folder()
    values = json.loads((folder / "config.json").read_text())
    values |= {"architectures": ["BertOwn"], "auto_map": {"AutoModel": "own.BertOwn"}}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "own.py").write_text("from transformers import BertModel\n\n\nclass BertOwn(BertModel):\n    pass\n")
    assert load(folder, trust_remote_code=True) is ModelRunner
    with pytest.raises(ModelLoadError, match="BertOwn"):
        load(folder)


@pytest.mark.parametrize(("device", "message"), [("cuda", "but --device is cuda"), ("auto", "needs the C library")])
def test_images_need_a_cpu_and_the_c_library(device: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_runner, "choose_kernels", lambda info, config: (info, object()))
    config = EngineConfig(model="/clip", device=device)
    with pytest.raises(MachineError, match=f"CLIP reads images, which .*{message}"):
        load_runner._load_two_towers(make_info(name="CLIP"), make_info(packed=False), config)
