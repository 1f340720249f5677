"""BucketTable of CUDA graphs. Replays equal forwards, also after another batch.

A fake recorder calls the function on the recorded tensors again. Attention reads the borders but not the lengths, as on
a GPU, and leaves NaN in rows outside the sequences.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.engine.core import model_runner
from penstock.engine.core.cuda_graphs import Bucket, BucketTable, CudaRecorder, ForwardGraphs, small_batches
from penstock.engine.core.loading.tokenizer_loader import load_tokenizer
from penstock.engine.core.loading.weights_loader import load_model
from penstock.engine.core.model_runner import ModelRunner
from penstock.engine.core.warm_up import SampleBatches
from penstock.engine.executors.torch.layers import attention as attention_layer
from penstock.engine.executors.torch.packed_batch import BatchCache, MaskedTokens, PackedBatch, PackedModel
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import TokenizedInput
from penstock.engine.protocol.model_info import ModelInfo

from ...kernels.attention_reference import attention_reference
from ...tables import table
from .conftest import SaveFolder

# BucketTable

BUCKETS = table(__file__, "bucket_limits_tokens_sequences_and_length")


@pytest.mark.parametrize(("max_model_len", "size", "bucket"), BUCKETS.values(), ids=BUCKETS)
def test_bucket_limits_tokens_sequences_and_length(
    max_model_len: int, size: list[int], bucket: list[int] | None
) -> None:
    assert BucketTable(4096, max_model_len, 2048).find(*size) == (bucket and Bucket(*bucket))
    assert BucketTable(63, max_model_len, 2048).find(*size) is None


# Recordings

CPU = torch.device("cpu")
# Positions of RoBERTa depend on padding ids; MPNet has an attention bias.
FAMILIES = table(__file__, "families_with_cuda_graphs")


class FakeRecorder(CudaRecorder):
    """A recorder that calls the function again instead of replaying a graph."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        out = run().clone()

        def replay() -> None:
            self.num_replays += 1
            out.fill_(float("nan"))
            out.copy_(run())

        return replay, out

    def wait(self) -> None: ...


def attention_by_borders(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, seq_lens: Any, **options: Any) -> Tensor:
    """Attention as on CUDA: it reads the borders and an upper bound of the lengths."""
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
    monkeypatch.setattr(attention_layer, "attention", attention_by_borders)


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
    """Large and small batches in turn, so that a small one follows the remaining rows of a larger one."""
    numbers = np.random.default_rng(1)
    found = []
    for size in (1, 30, 2, 31, 3, 9, 8, 1, 25):
        for longest in (3, 40, 250):
            lengths = sorted(numbers.integers(1, longest + 1, size).tolist())
            if sum(lengths) <= 512:
                found.append(make_batch(lengths, has_types=size % 2 == 0, seed=size))
    return found


@pytest.mark.usefixtures("_on_borders")
@pytest.mark.parametrize("class_name", ["RobertaModel", "MPNetModel", "ModernBertModel"])
def test_replays_equal_forwards_in_any_order(class_name: str, save_folder: SaveFolder) -> None:
    _, info = saved(save_folder, class_name)
    made = load_model(info)
    assert made.is_recordable
    recorder = FakeRecorder()
    graphs = ForwardGraphs(made, recorder, BucketTable(512, info.max_model_len, 64), CPU)
    assert graphs.record(make_batch) == len(BucketTable(512, info.max_model_len, 64).all())
    num_checks = recorder.num_replays
    with torch.inference_mode():
        found = batches()
        for batch in found:
            expected = made.forward(batch).hidden_states
            hidden = graphs.forward(batch).hidden_states
            assert hidden.shape == expected.shape
            # Matrix products with another number of rows add in another order.
            torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)
    assert recorder.num_replays - num_checks > len(found) // 2


@pytest.mark.usefixtures("_on_borders")
def test_other_batches_run_the_model(save_folder: SaveFolder) -> None:
    _, info = saved(save_folder, "BertModel")
    made, recorder = load_model(info), FakeRecorder()
    graphs = ForwardGraphs(made, recorder, BucketTable(128, info.max_model_len, 64), CPU)
    graphs.record(make_batch)
    before = recorder.num_replays
    batch = make_batch([3, 5])
    with torch.inference_mode():
        weights = graphs.forward(batch, need_attention=True).attention_weights
        assert weights is not None
        assert weights.shape == (8, 2)
        graphs.forward(make_batch([129]))
        graphs.forward(make_batch([1] * 65))
        lengths, num_masked = np.array([3, 5], np.int32), np.array([0, 2], np.int32)
        graphs.forward(replace(batch, masked=MaskedTokens.of(lengths, num_masked)))
        graphs.forward(replace(batch, cache=BatchCache(num_new_seqs=2, num_new_tokens=8, context_lens=(0, 0))))
        assert recorder.num_replays == before
        graphs.forward(batch)
    assert recorder.num_replays == before + 1


def test_forward_that_reads_lengths_on_the_host_is_rejected(
    save_folder: SaveFolder, caplog: pytest.LogCaptureFixture
) -> None:
    _, info = saved(save_folder, "BertModel")
    made = load_model(info)  # its CPU attention reads the lengths on the host
    graphs = ForwardGraphs(made, FakeRecorder(), BucketTable(512, info.max_model_len, 64), CPU)
    assert graphs.record(make_batch) == 0
    assert "small batches run without CUDA graphs: " in caplog.text
    batch = make_batch([3, 5])
    with torch.inference_mode():
        torch.testing.assert_close(graphs.forward(batch).hidden_states, made.forward(batch).hidden_states)


@pytest.mark.parametrize(
    ("kind", "is_lost"), [(RuntimeError, False), (torch.AcceleratorError, False), (torch.AcceleratorError, True)]
)
def test_failed_recording_runs_the_model(
    kind: type[RuntimeError], is_lost: bool, save_folder: SaveFolder, caplog: pytest.LogCaptureFixture
) -> None:
    _, info = saved(save_folder, "BertModel")
    recorder = Mock()
    recorder.record.side_effect = kind("operation not permitted when stream is capturing\nmore")
    recorder.wait.side_effect = torch.AcceleratorError("the device is lost") if is_lost else None
    graphs = ForwardGraphs(load_model(info), recorder, BucketTable(512, info.max_model_len, 64), CPU)
    if is_lost:
        with pytest.raises(torch.AcceleratorError, match="the device is lost"):
            graphs.record(make_batch)
        assert "without CUDA graphs" not in caplog.text
        return
    assert graphs.record(make_batch) == 0
    recorder.wait.assert_called_once_with()
    assert caplog.messages[-1].endswith("operation not permitted when stream is capturing")
    with torch.inference_mode():
        assert graphs.forward(make_batch([3, 5])).hidden_states.shape == (8, 16)


@pytest.mark.usefixtures("_on_borders")
def test_runner_replays_the_same_results(save_folder: SaveFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    config, info = saved(save_folder, "BertModel")
    tokenizer = load_tokenizer(info, trust_remote_code=False, chat_template=None)
    runner = ModelRunner(info, tokenizer, load_model(info), (), config)
    samples = SampleBatches(info, tokenizer)
    chunks = samples.batch([1, 2, 20, 200], samples.all_params())
    expected = [dict(arrays) for arrays in runner.execute(chunks).split()]
    recorder = FakeRecorder()

    def record(made: PackedModel, info: ModelInfo, _: object, device: torch.device, limits: Any) -> ForwardGraphs:
        graphs = ForwardGraphs(made, recorder, small_batches(info, limits), device)
        assert graphs.record(make_batch)
        return graphs

    monkeypatch.setattr(model_runner, "record_forwards", record)
    runner.warm_up()
    before = recorder.num_replays
    found = [dict(arrays) for arrays in runner.execute(chunks).split()]
    assert recorder.num_replays - before == 1
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

    graphs = ForwardGraphs(made, CudaRecorder(device), BucketTable(512, info.max_model_len, 64), device)
    assert graphs.record(on_device) == len(BucketTable(512, info.max_model_len, 64).all())
    with torch.inference_mode():
        for batch in [moved(batch, device) for batch in batches()]:
            expected = made.forward(batch).hidden_states.float()
            found = graphs.forward(batch).hidden_states.float()
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@pytest.mark.gpu
def test_failed_recording_leaves_the_stream_usable() -> None:
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
