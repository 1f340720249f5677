"""Replays of recorded forwards equal the forwards, whatever batch came before, and the rest of a bucket reaches nobody.

Here a recording is the function itself, called again on the tensors that it was recorded with, as a CUDA graph does
with its kernels. Attention takes lengths from the borders alone, as on a GPU, and leaves NaN in rows of no sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.engine.core import model_runner
from penstock.engine.core.cuda_graphs import Bucket, Buckets, CudaRecorder, ForwardGraphs, small_batches
from penstock.engine.core.loading.tokenizer_loader import load_tokenizer
from penstock.engine.core.loading.weights_loader import load_model
from penstock.engine.core.model_runner import ModelRunner
from penstock.engine.core.warm_up import SampleBatches
from penstock.engine.executors.torch.base import PackedModel
from penstock.engine.executors.torch.layers import attention as attention_layer
from penstock.engine.executors.torch.packed_batch import BatchCache, HiddenTokens, PackedBatch
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.protocol.config import EngineConfig, SchedulerConfig
from penstock.engine.protocol.model_info import ModelInfo
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.request import TokenizedInput
from penstock.engine.protocol.tasks import PoolingTask
from penstock.engine.scheduling import PrefillChunk, QueuedSequence, Request

from ...kernels.attention_reference import attention_reference
from .conftest import SaveFolder

CPU = torch.device("cpu")
FAMILIES = {
    "BertModel": {},
    "RobertaModel": {"type_vocab_size": 1},  # positions that depend on which ids are padding
    "DistilBertModel": {"dim": 16, "n_heads": 2, "n_layers": 2, "hidden_dim": 24},
    "MPNetModel": {},  # a bias by distance
    "ModernBertModel": {"local_attention": 16, "global_attn_every_n_layers": 2},
}


class Again:
    """A Recorder whose replay calls the function again."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        out = run().clone()

        def replay() -> None:
            self.num_replays += 1
            out.fill_(float("nan"))
            out.copy_(run())

        return replay, out

    def wait(self) -> None:
        """All is done."""


def by_borders(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, seq_lens: Any, **options: Any) -> Tensor:
    """Attention as CUDA's kernels see a batch: they know the borders, and an upper bound of the lengths."""
    borders = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(borders)]
    assert max(lengths) <= options.pop("max_seqlen")
    end, longest = borders[-1], max(lengths)
    out = torch.full_like(q, float("nan"))
    parts = (x[:end].contiguous() for x in (q, k, v))
    out[:end] = attention_reference(*parts, cu_seqlens, lengths, max_seqlen=longest, **options)
    return out


@pytest.fixture
def _on_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_layer, "attention", by_borders)


def saved(save_folder: SaveFolder, class_name: str) -> tuple[EngineConfig, ModelInfo]:
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 300, **FAMILIES[class_name]}
    config = EngineConfig(model=str(save_folder(class_name, **sizes)), device="cpu", cpu_kernels="torch")
    return config, replace(resolve_model(config), device="cpu", dtype="float32")


def make_batch(lengths: Sequence[int], *, has_types: bool = False, seed: int = 0) -> PackedBatch:
    numbers = np.random.default_rng(seed)
    inputs = [
        TokenizedInput(numbers.integers(0, 10, n, np.int32), type_boundary=n // 2 if has_types else 0) for n in lengths
    ]
    return PackedBatch.build(inputs, CPU)


def batches() -> list[PackedBatch]:
    """Of many sizes, large and small in turn, so that each finds the rest of a larger one."""
    numbers = np.random.default_rng(1)
    found = []
    for size in (1, 30, 2, 31, 3, 9, 8, 1, 25):
        for longest in (3, 40, 250):
            lengths = sorted(numbers.integers(1, longest + 1, size).tolist())
            if sum(lengths) <= 512:
                found.append(make_batch(lengths, has_types=size % 2 == 0, seed=size))
    return found


@pytest.mark.usefixtures("_on_borders")
@pytest.mark.parametrize("class_name", FAMILIES)
def test_replays_equal_forwards_in_any_order_of_batches(class_name: str, save_folder: SaveFolder) -> None:
    _, info = saved(save_folder, class_name)
    made = load_model(info)
    assert made.is_recordable
    recorder = Again()
    graphs = ForwardGraphs(made, recorder, Buckets(512, info.max_model_len, 64), CPU)
    num_graphs = graphs.record(make_batch)
    assert num_graphs == len(Buckets(512, info.max_model_len, 64).all())
    num_checks = recorder.num_replays
    with torch.inference_mode():
        found = batches()
        for batch in found:
            expected = made.forward(batch).hidden_states
            hidden = graphs.forward(batch).hidden_states
            assert hidden.shape == expected.shape
            # The products have other numbers of rows, and so other orders of adding.
            torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)
    assert recorder.num_replays - num_checks > len(found) // 2


@pytest.mark.usefixtures("_on_borders")
def test_what_is_not_recorded_runs_as_it_is(save_folder: SaveFolder) -> None:
    _, info = saved(save_folder, "BertModel")
    made, recorder = load_model(info), Again()
    graphs = ForwardGraphs(made, recorder, Buckets(128, info.max_model_len, 64), CPU)
    graphs.record(make_batch)
    before = recorder.num_replays
    batch = make_batch([3, 5])
    with torch.inference_mode():
        weights = graphs.forward(batch, need_attention=True).attention_weights
        assert weights is not None
        assert weights.shape == (8, 2)
        graphs.forward(make_batch([129]))
        graphs.forward(make_batch([1] * 65))
        lengths, num_hidden = np.array([3, 5], np.int32), np.array([0, 2], np.int32)
        graphs.forward(replace(batch, hidden=HiddenTokens.of(lengths, num_hidden)))
        graphs.forward(replace(batch, cache=BatchCache(num_new_seqs=2, num_new_tokens=8, context_lens=(0, 0))))
        assert recorder.num_replays == before
        graphs.forward(batch)
    assert recorder.num_replays == before + 1


def test_a_forward_that_takes_lengths_from_the_host_is_found_out(
    save_folder: SaveFolder, caplog: pytest.LogCaptureFixture
) -> None:
    _, info = saved(save_folder, "BertModel")
    made = load_model(info)  # its attention is that of a CPU
    graphs = ForwardGraphs(made, Again(), Buckets(512, info.max_model_len, 64), CPU)
    assert graphs.record(make_batch) == 0
    assert "small batches run without CUDA graphs: " in caplog.text
    batch = make_batch([3, 5])
    with torch.inference_mode():
        torch.testing.assert_close(graphs.forward(batch).hidden_states, made.forward(batch).hidden_states)


class Refusing(Again):
    """A Recorder that records nothing, on a device that may be lost."""

    def __init__(self, error: RuntimeError, *, is_lost: bool = False) -> None:
        super().__init__()
        self.error, self.is_lost = error, is_lost
        self.num_waits = 0

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        raise self.error

    def wait(self) -> None:
        self.num_waits += 1
        if self.is_lost:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError])
def test_a_forward_that_cannot_be_recorded_runs_as_it_is(
    kind: type[RuntimeError], save_folder: SaveFolder, caplog: pytest.LogCaptureFixture
) -> None:
    _, info = saved(save_folder, "BertModel")
    made = load_model(info)
    recorder = Refusing(kind("operation not permitted when stream is capturing\nmore"))
    graphs = ForwardGraphs(made, recorder, Buckets(512, info.max_model_len, 64), CPU)
    assert graphs.record(make_batch) == 0
    assert recorder.num_waits == 1
    assert "operation not permitted when stream is capturing" in caplog.text
    assert "more" not in caplog.messages[-1]
    with torch.inference_mode():
        assert graphs.forward(make_batch([3, 5])).hidden_states.shape == (8, 16)


def test_a_device_that_is_lost_while_recording_ends_the_start(
    save_folder: SaveFolder, caplog: pytest.LogCaptureFixture
) -> None:
    _, info = saved(save_folder, "BertModel")
    recorder = Refusing(torch.AcceleratorError("CUDA error: unspecified launch failure"), is_lost=True)
    graphs = ForwardGraphs(load_model(info), recorder, Buckets(512, info.max_model_len, 64), CPU)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        graphs.record(make_batch)
    assert "without CUDA graphs" not in caplog.text


def chunks(info: ModelInfo) -> list[PrefillChunk]:
    params = PoolingParams().resolved(PoolingTask.EMBED, info)
    rows = PoolingParams().resolved(PoolingTask.TOKEN_EMBED, info)
    found = []
    for i, length in enumerate([1, 2, 20, 200]):
        tokens = TokenizedInput(np.arange(length, dtype=np.int32) % 10)
        request = Request(0, rows if i == 2 else params)
        sequence = QueuedSequence(request_id=i, prompt=tokens, num_tokens=length, request=request)
        found.append(PrefillChunk(sequence, 0, length))
    return found


@pytest.mark.usefixtures("_on_borders")
@pytest.mark.parametrize("wants", [True, False])
def test_a_runner_answers_from_recordings_as_without(
    wants: bool, save_folder: SaveFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The runner of a CPU takes none; here it is told to, with the recordings of this file."""
    config, info = saved(save_folder, "BertModel")
    tokenizer = load_tokenizer(info, trust_remote_code=False, chat_template=None)
    runner = ModelRunner(info, tokenizer, load_model(info), (), config)
    expected = [dict(arrays) for arrays in runner.execute(chunks(info)).split()]
    recorder = Again()

    def on_cpu(
        made: PackedModel, info: ModelInfo, batches: SampleBatches, device: torch.device, limits: SchedulerConfig
    ) -> ForwardGraphs:
        graphs = ForwardGraphs(made, recorder, small_batches(info, limits), device)

        def make(lengths: Sequence[int]) -> PackedBatch:
            return PackedBatch.build(
                [c.sequence.prompt for c in batches.batch(lengths, batches.default_params())], device
            )

        assert graphs.record(make)
        return graphs

    if wants:
        monkeypatch.setattr(model_runner, "record_forwards", on_cpu)
    with caplog.at_level(logging.INFO, "penstock.engine"):
        runner.warm_up()
    assert ("CUDA graphs for small batches in" in caplog.text) is wants
    before = recorder.num_replays
    found = [dict(arrays) for arrays in runner.execute(chunks(info)).split()]
    assert recorder.num_replays - before == wants
    for arrays, wanted in zip(found, expected, strict=True):
        assert arrays.keys() == wanted.keys()
        for name, array in arrays.items():
            np.testing.assert_allclose(array, wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("class_name", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 1e-2), ("float16", 1e-2), ("float32", 1e-4)])
def test_cuda_graphs_equal_forwards(class_name: str, dtype: str, tolerance: float, save_folder: SaveFolder) -> None:
    _, info = saved(save_folder, class_name)
    device = torch.device("cuda")
    info = replace(info, device="cuda", dtype=dtype)
    made: PackedModel = load_model(info)

    def on_device(lengths: Sequence[int]) -> PackedBatch:
        return moved(make_batch(lengths), device)

    graphs = ForwardGraphs(made, CudaRecorder(device), Buckets(512, info.max_model_len, 64), device)
    assert graphs.record(on_device) == len(Buckets(512, info.max_model_len, 64).all())
    with torch.inference_mode():
        for batch in [moved(batch, device) for batch in batches()]:
            expected = made.forward(batch).hidden_states.float()
            found = graphs.forward(batch).hidden_states.float()
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@pytest.mark.gpu
def test_a_recording_that_waits_for_the_device_leaves_it_as_it_was() -> None:
    device = torch.device("cuda")
    x = torch.ones(4, device=device)
    recorder, stream = CudaRecorder(device), torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        recorder.record(lambda: x * x.sum().item())
    assert torch.cuda.current_stream() == stream
    replay, out = recorder.record(lambda: x * 2)
    x.fill_(3)
    replay()
    assert out.tolist() == [6.0] * 4


def moved(batch: PackedBatch, device: torch.device) -> PackedBatch:
    names = ("input_ids", "positions", "token_type_ids", "cu_seqlens")
    tensors = {name: getattr(batch, name) for name in names}
    return replace(batch, **{name: None if t is None else t.to(device) for name, t in tensors.items()})


def test_lengths_of_a_bucket_fill_it_with_its_longest_first() -> None:
    assert Bucket(256, 8, 128).seq_lens() == (128, 128, 0, 0, 0, 0, 0, 0)
