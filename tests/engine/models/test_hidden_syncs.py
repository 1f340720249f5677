"""Forward and pooling never wait for the device, for any kind of model; what they give is what the CPU gives.

Here on the device that is not there (see device/pretend_cuda.py), which needs triton's interpreter for kernels and so
runs in a process of its own (test_hidden_syncs_interpreted.py); on a machine with a GPU under torch's own watch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.core.loading.weights_loader import load_model
from penstock.engine.layers.dense import Dense
from penstock.engine.models.base import ModelOutput, PackedModel
from penstock.engine.packed_batch import PackedBatch
from penstock.engine.pooling import ModelPooler, PoolingMetadata, PoolingStates, TokenMaps, token_vectors
from penstock.engine.protocol.model_info import ModelInfo
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.request import TokenizedInput
from penstock.engine.protocol.tasks import PoolingTask, PoolingType
from penstock.engine.protocol.vectors import MultiVector, SparseKind, SparsePooling

from ..device.pretend_cuda import PretendCuda, pretend_cuda

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 from the start"
)
SIZES = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 80,
    "num_labels": 3,
}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = SIZES | IDS | {"num_key_value_heads": 1, "head_dim": 16}
MODERNBERT = SIZES | IDS | {"local_attention": 16, "cls_token_id": 1, "sep_token_id": 2}
MAMBA = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_labels": 3}
MAMBA2 = MAMBA | {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 32}
HYBRID = DECODER | {"mamba_d_state": 16}
JAMBA = HYBRID | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "expert_layer_offset": 0}
GRANITE = HYBRID | {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "num_local_experts": 4}
GRANITE |= {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}}
LENGTHS = (1, 2, 5, 33, 20)
CUT = {"float32": 2e-5}


class Device(contextlib.AbstractContextManager["Device"]):
    """Where a test runs, and what watches it there."""

    name = "cuda:0"
    is_pretended = True

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._mode: PretendCuda | None = None

    def __enter__(self) -> Device:
        self._mode = self._stack.enter_context(pretend_cuda())
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def watched(self) -> contextlib.AbstractContextManager[None]:
        assert self._mode is not None
        return self._mode.watched()

    def unwatched(self) -> contextlib.AbstractContextManager[None]:
        assert self._mode is not None
        return self._mode.unwatched()


class RealDevice(Device):
    """A GPU, watched by torch."""

    is_pretended = False

    def __enter__(self) -> Device:
        return self

    def watched(self) -> contextlib.AbstractContextManager[None]:
        return _sync_mode("error")

    def unwatched(self) -> contextlib.AbstractContextManager[None]:
        return _sync_mode("default")


@contextlib.contextmanager
def _sync_mode(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.fixture(params=[pytest.param("pretended", marks=interpreted), pytest.param("real", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Nothing waits on it but what is marked: the one count that sparse vectors of logits need, and the answers."""
    with RealDevice() if request.param == "real" else Device() as device, pytest.MonkeyPatch.context() as patch:
        marked = token_vectors.counts_on_host

        def counts_on_host(counts: torch.Tensor) -> list[int]:
            with device.unwatched():
                return marked(counts)

        patch.setattr(token_vectors, "counts_on_host", counts_on_host)
        yield device


@dataclass
class Served:
    """A model with its pooler, on one device."""

    info: ModelInfo
    model: PackedModel
    pooler: ModelPooler

    @classmethod
    def load(cls, info: ModelInfo, device: str = "cpu", maps: TokenMaps | None = None) -> Served:
        info = replace(info, device=device)
        model = load_model(info)
        return cls(info, model, ModelPooler(info, model, (), maps or TokenMaps()))


def inputs_of(lengths: Sequence[int] = LENGTHS) -> list[TokenizedInput]:
    numbers = np.random.default_rng(0)
    return [TokenizedInput(numbers.integers(3, SIZES["vocab_size"], n).astype(np.int32)) for n in lengths]


def answers(
    served: Served,
    params: Sequence[PoolingParams],
    device: Device | None = None,
    inputs: Sequence[TokenizedInput] | None = None,
    queries: Sequence[Any] | None = None,
) -> list[dict[str, np.ndarray]]:
    """The arrays of each input; on a device, forward and pooling are watched."""
    inputs = inputs_of() if inputs is None else inputs
    batch = PackedBatch.build(inputs, torch.device(served.info.device))
    with torch.inference_mode(), contextlib.nullcontext() if device is None else device.watched():
        metadata = PoolingMetadata.for_batch(batch, params)
        metadata.queries = queries
        output = served.model.forward(batch, need_attention=served.pooler.needs_attention(params))
        pooled = served.pooler.pool(output, metadata)
    return [dict(arrays) for arrays in pooled.to_numpy()]


def check(actual: Sequence[dict[str, np.ndarray]], expected: Sequence[dict[str, np.ndarray]]) -> None:
    for own, other in zip(actual, expected, strict=True):
        assert own.keys() == other.keys()
        assert own
        for name, values in other.items():
            np.testing.assert_allclose(own[name], values, atol=2e-5 * max(1.0, abs(values).max(initial=0)), rtol=0)


def compare(info: ModelInfo, params: Sequence[PoolingParams], device: Device, maps: TokenMaps | None = None) -> None:
    """The answers of the device, where nothing waited, are those of the CPU."""
    expected = answers(Served.load(info, maps=maps), params)
    with device:
        check(answers(Served.load(info, device.name, maps), params, device), expected)


def resolved(info: ModelInfo, task: PoolingTask, **fields: object) -> PoolingParams:
    return PoolingParams(**fields).resolved(task, info)


EMBEDDERS = [
    pytest.param("BertModel", SIZES, id="bert"),
    pytest.param("RobertaModel", SIZES | {"type_vocab_size": 1}, id="roberta"),
    pytest.param("DistilBertModel", {"vocab_size": 120, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48}),
    pytest.param("MPNetModel", SIZES, id="mpnet"),
    pytest.param("ElectraModel", SIZES | {"embedding_size": 24}, id="electra"),
    pytest.param("ModernBertModel", MODERNBERT, id="modernbert"),
    pytest.param("LlamaModel", DECODER, id="llama"),
    pytest.param("LlamaModel", DECODER | DYNAMIC | {"max_position_embeddings": 16}, id="llama-dynamic-rope"),
    pytest.param("MistralModel", DECODER | {"sliding_window": 8}, id="mistral-window"),
    pytest.param("Qwen3Model", DECODER, id="qwen3"),
    pytest.param("Gemma2Model", DECODER | {"sliding_window": 8, "query_pre_attn_scalar": 24}, id="gemma2"),
    pytest.param("Gemma3TextModel", DECODER | {"sliding_window": 8}, id="gemma3"),
    pytest.param("Phi3Model", DECODER, id="phi3"),
    pytest.param("MambaModel", MAMBA, id="mamba"),
    pytest.param("Mamba2Model", MAMBA2, id="mamba2"),
    pytest.param("JambaModel", JAMBA, id="jamba-experts"),
    pytest.param("GraniteMoeHybridModel", GRANITE, id="granite-experts"),
]


@pytest.mark.parametrize(("class_name", "config"), EMBEDDERS)
def test_embedding_never_waits(
    class_name: str, config: dict[str, Any], save_recurrent: Any, resolve: Any, device: Device
) -> None:
    folder, _ = save_recurrent(class_name, **config)
    info = resolve(folder)
    compare(info, [resolved(info, PoolingTask.EMBED)] * len(LENGTHS), device)
