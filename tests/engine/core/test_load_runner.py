"""Which models run without torch, and that torch is not imported for them, nor a GPU overlooked."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from penstock.engine import AsyncEngine, EngineConfig, PoolingParams
from penstock.engine.core import host, load_runner
from penstock.engine.core.array_runner import ArrayRunner
from penstock.engine.core.loading import cpu_kernels
from penstock.engine.core.model_runner import ModelRunner
from penstock.engine.protocol.errors import ModelLoadError
from penstock.kernels.cpu import CpuKernelError, Machine

from .conftest import SaveFolder, save_folder

__all__ = ["save_folder"]


@pytest.fixture(autouse=True)
def _needs_kernels() -> None:
    try:
        Machine(1).close()
    except CpuKernelError as error:
        pytest.skip(str(error))


def loaded(folder: Path, **config: Any) -> type:
    options = {"device": "cpu", "num_threads": 1, **config}
    runner = load_runner.load_runner(EngineConfig(model=str(folder), **options))
    runner.warm_up()
    return type(runner)


def test_an_encoder_on_a_cpu_runs_without_torch(save_folder: SaveFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_folder()
    assert loaded(folder) is ArrayRunner
    assert loaded(folder, dtype="bfloat16", cpu_kernels="native") is ArrayRunner
    assert loaded(folder, cpu_kernels="torch") is ModelRunner
    assert loaded(folder, dtype="float16") is ModelRunner
    assert loaded(save_folder("Qwen2Model", num_key_value_heads=2)) is ArrayRunner
    assert loaded(save_folder("AlbertModel", embedding_size=16)) is ModelRunner
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "")
    for may_have_gpu in (True, False):  # torch finds none
        monkeypatch.setattr(load_runner, "may_have_gpu", lambda may=may_have_gpu: may)
        assert loaded(folder, device="auto") is ArrayRunner


@pytest.mark.parametrize("given", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_gpus_libraries_are_told_what_suits_us_unless_the_operator_has_told_them(
    given: str | None, save_folder: SaveFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.setenv(name, "max_split_size_mb:64")  # so that both are as before when this has ended
        if name != given:
            monkeypatch.delenv(name)
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "")  # so that it is as before
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION")
    before = dict(os.environ)
    folder = save_folder()
    loaded(folder)
    assert os.environ == before  # a CPU has no such allocator
    monkeypatch.setattr(load_runner, "may_have_gpu", lambda: True)
    loaded(folder, device="auto")
    ours = {} if given else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert os.environ == before | ours | {"TRITON_DEFAULT_FP_FUSION": "1"}
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    loaded(folder, device="auto")
    assert os.environ["TRITON_DEFAULT_FP_FUSION"] == "0"


def test_a_class_with_code_of_its_own_is_left_to_transformers(save_folder: SaveFolder) -> None:
    folder = save_folder()
    values = json.loads((folder / "config.json").read_text())
    values |= {"architectures": ["BertOwn"], "auto_map": {"AutoModel": "own.BertOwn"}}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "own.py").write_text("from transformers import BertModel\n\n\nclass BertOwn(BertModel):\n    pass\n")
    assert loaded(folder, trust_remote_code=True) is ModelRunner
    with pytest.raises(ModelLoadError, match="BertOwn"):
        loaded(folder)


def test_without_the_library_torch_runs_the_model_and_the_log_says_so_once(
    save_folder: SaveFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(num_lanes: int) -> Machine:
        raise CpuKernelError("not built")

    monkeypatch.setattr(cpu_kernels, "Machine", missing)
    with caplog.at_level(logging.WARNING, "penstock.engine"):
        assert loaded(save_folder()) is ModelRunner
    assert caplog.text.count("not built") == 1
    with pytest.raises(ModelLoadError, match="There are no native kernels: not built"):
        loaded(save_folder(), cpu_kernels="native")


@pytest.mark.parametrize("name", ["minilm", "minimind2"])
async def test_the_process_of_an_engine_holds_no_torch(name: str, model_folder: Callable[[str], Path]) -> None:
    config = EngineConfig(model=str(model_folder(name)), device="cpu", num_threads=1)
    engine = await AsyncEngine.start(config)
    try:
        (worker,) = [pid for pid in children(os.getpid()) if b"penstock.engine.core.worker" in command(pid)]
        await engine.embed(["a text"], PoolingParams())
        files = {line.split(maxsplit=5)[-1] for line in Path(f"/proc/{worker}/maps").read_text().splitlines()}
        assert any("libpenstock_cpu" in file for file in files)
        assert not [file for file in files if "torch" in file]
        assert not [file for file in files if file.endswith(".safetensors")]
    finally:
        await engine.close()


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize(
    ("version", "marks", "expected"),
    [
        ("2.13.0+cpu", ["nvidiactl"], False),
        ("2.13.0+cu130", [], False),
        ("2.13.0+cu130", ["nvidiactl"], True),
        ("2.13.0", ["kfd"], True),
        (None, ["nvidiactl"], False),
    ],
)
def test_a_gpu_that_may_be_there_is_torchs_to_judge(
    version: str | None, marks: list[str], expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        assert name == "torch"
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    monkeypatch.setattr(host, "_GPU_MARKS", (tmp_path / "nvidiactl", tmp_path / "kfd"))
    for mark in marks:
        (tmp_path / mark).touch()
    assert host.may_have_gpu() is expected
