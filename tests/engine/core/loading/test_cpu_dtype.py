"""The dtype of models that transformers runs on a CPU, with `--dtype auto`."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch

from penstock.engine import EngineConfig
from penstock.engine.core.load_runner import load_runner
from penstock.engine.core.loading import cpu_dtype
from penstock.engine.core.loading.weights_loader import load_model
from penstock.engine.executors.torch.packed_batch import PackedBatch
from penstock.engine.protocol.messages import TokenizedInput
from penstock.kernels.cpu import Format


@pytest.fixture
def load(random_model, monkeypatch, caplog):
    """Loads a model with the limits of the trial; returns its runner and the log."""

    def run(class_name="AlbertModel", *, min_speedup=0.0, max_error=1.0, formats=(Format.DOT,), **config):
        monkeypatch.setattr(cpu_dtype, "shared_library", lambda: SimpleNamespace(formats=formats))
        monkeypatch.setattr(cpu_dtype, "MIN_SPEEDUP", min_speedup)
        monkeypatch.setattr(cpu_dtype, "_MAX_ERROR", max_error)
        folder = random_model(class_name, **config)
        with caplog.at_level(logging.INFO, "penstock.engine"):
            return load_runner(EngineConfig(model=str(folder), device="cpu", num_threads=1)), caplog.text

    return run


def test_faster_bfloat16_runs_as_if_it_were_set(load) -> None:
    runner, log = load(embedding_size=16)
    assert runner.info.dtype == "bfloat16"
    assert runner.info.sources["dtype"].startswith("measured: bfloat16 is ")
    assert log.count("runs in bfloat16 (measured: ") == 1
    batch = PackedBatch.build([TokenizedInput(torch.arange(5, 25).int().numpy())], torch.device("cpu"))
    with torch.inference_mode():
        expected = load_model(runner.info).forward(batch).hidden_states
        actual = runner._model.forward(batch).hidden_states
    assert actual.dtype is torch.bfloat16
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("limits", [{"min_speedup": math.inf}, {"max_error": 1e-6}], ids=["slow", "inexact"])
def test_float32_stays_if_bfloat16_is_slow_or_inexact(load, limits) -> None:
    runner, log = load(embedding_size=16, **limits)
    assert runner.info.dtype == "float32"
    assert log.count("runs in float32 (measured: ") == 1
    assert {weight.dtype for weight in runner._model._network.module.parameters()} == {torch.float32}


def test_float32_stays_without_operations_in_bfloat16(load) -> None:
    runner, log = load("FNetModel")
    assert runner.info.dtype == "float32"
    assert "runs in float32 (bfloat16 does not run: Unsupported dtype BFloat16)." in log


def test_processor_without_bfloat16_tries_only_float32(load) -> None:
    runner, log = load(embedding_size=16, formats=(Format.F32, Format.BF16))
    assert runner.info.dtype == "float32"
    assert log.count("through transformers") == 1
    assert "measured" not in log
