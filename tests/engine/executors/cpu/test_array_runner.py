"""ArrayRunner gives the results of ModelRunner for each family, task, pooling type and parameter."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from penstock.engine.core.array_runner import ArrayRunner
from penstock.engine.core.loading.cpu_kernels import load_array_dense, load_array_encoder, load_array_token_heads
from penstock.engine.core.loading.weights_loader import load_dense, load_model, load_token_heads
from penstock.engine.core.model_runner import ModelRunner
from penstock.engine.core.runner import DeviceMemoryError
from penstock.engine.executors.cpu.array_encoder import ArrayEncoder
from penstock.engine.executors.cpu.array_head import DENSE_ACTIVATIONS
from penstock.engine.protocol.batch_outputs import BatchOutputs
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import UnsupportedModelError
from penstock.engine.protocol.messages import TokenizedInput
from penstock.engine.protocol.model_info import DenseSpec, ModelInfo, ModelKind, TokenizerSpec
from penstock.engine.protocol.multi_vector import MultiVector, SparseKind, SparsePooling, TokenHeadFiles
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingTask, PoolingType
from penstock.engine.scheduling import InputSequence, PrefillChunk, Request
from penstock.kernels.cpu import CpuLibrary, OutputRows

from ....clock import Clock
from ..families import ENCODER_SIZES as SIZES, ENCODERS, boundaries_of, chosen

TOKENIZER = TokenizerSpec(json="{}", truncation_side="right", uses_token_types=False, sample_ids=(5, 6, 7))
TOLERANCE = 1e-5
HEADS = ["Model", "ForSequenceClassification", "ForTokenClassification"]
EMBED, TOKEN_EMBED, SPARSE_EMBED = PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.SPARSE_EMBED
Batch = list[PrefillChunk]


@pytest.fixture
def library(three_lane_library: CpuLibrary) -> CpuLibrary:
    return three_lane_library


class Runners:
    """Both runners of a model, and a comparison of their results."""

    def __init__(self, info: ModelInfo, library: CpuLibrary, inputs: Sequence[TokenizedInput]) -> None:
        config = EngineConfig(model="m")
        self.info, self.inputs = info, inputs
        self.arrays = ArrayRunner(
            info,
            TOKENIZER,
            load_array_encoder(info, library),
            config,
            load_array_dense(info, library),
            load_array_token_heads(info, TOKENIZER, library),
        )
        token_heads = load_token_heads(info, TOKENIZER)
        self.on_torch = ModelRunner(info, TOKENIZER, load_model(info), load_dense(info), config, token_heads)

    def batch(self, params: Sequence[PoolingParams], inputs: Sequence[TokenizedInput] | None = None) -> Batch:
        """One chunk for each input; a short list of parameters repeats."""
        inputs = self.inputs if inputs is None else inputs
        chunks = []
        for i, prompt in enumerate(inputs):
            request = Request(i, params[i % len(params)])
            sequence = InputSequence(sequence_id=(i, 0), tokens=prompt, num_tokens=len(prompt), request=request)
            chunks.append(PrefillChunk(sequence, 0, len(prompt)))
        return chunks

    def compare(self, *params: PoolingParams, inputs: Sequence[TokenizedInput] | None = None) -> None:
        """Runs a batch for each element of `params`, and a batch with all elements."""
        for own in [[one] for one in params] + [list(params)]:
            batch = self.batch(own, inputs)
            assert_same(self.arrays.execute(batch), self.on_torch.execute(batch))


def assert_same(actual: BatchOutputs, expected: BatchOutputs) -> None:
    for found, wanted in zip(actual.split(), expected.split(), strict=True):
        assert list(found) == list(wanted)
        for name, array in wanted.items():
            assert found[name].dtype == np.float32
            assert found[name].shape == array.shape
            limit = TOLERANCE * max(1.0, np.abs(array).max(initial=0.0))
            np.testing.assert_allclose(found[name], array, rtol=0, atol=limit)


@pytest.fixture
def inputs(sequences) -> list[TokenizedInput]:
    """Odd lengths; two of three inputs start with a prompt that pooling skips."""
    return [
        TokenizedInput(np.array(sequence, np.int32), num_skipped_tokens=min(i, len(sequence)) if i % 3 else 0)
        for i, sequence in enumerate(sequences)
    ]


def bert(save_model, resolve, **config: Any) -> ModelInfo:
    folder, _ = save_model("BertModel", **config or SIZES)
    return resolve(folder)


@pytest.mark.parametrize(
    ("family", "config", "head"),
    [
        *((*case.values, HEADS[i % 3]) for i, case in enumerate([*ENCODERS, *chosen("llama-two-way")])),
        *(("Bert", SIZES, head) for head in HEADS[1:]),
    ],
)
def test_every_family_and_task_equals_torch(family, config, head, library, save_model, resolve, sequences, inputs):
    folder, _ = save_model(f"{family}{head}", **config)
    info = resolve(folder)
    boundaries = boundaries_of(family, config, sequences)
    inputs = [replace(one, type_boundary=boundaries[i] if i % 2 else 0) for i, one in enumerate(inputs)]
    runners = Runners(info, library, inputs)
    is_embedding = info.kind is ModelKind.EMBEDDING  # the client compares the vectors
    params = [
        PoolingParams().resolved(task, info) for task in info.tasks if not (is_embedding and task is PoolingTask.SCORE)
    ]
    if is_embedding:
        params.append(PoolingParams(extra_tasks=(TOKEN_EMBED,)).resolved(EMBED, info))
    runners.compare(*params)
    times = runners.arrays.take_times()
    assert len(times) == len(params) + 1
    assert {time.short_tokens for time in times} == {sum(map(len, inputs))}
    assert not runners.arrays.take_times()


def test_time_of_overlapping_forwards_counts_once(library, save_model, resolve, inputs, monkeypatch):
    clock = Clock(1.0)
    monkeypatch.setattr("penstock.engine.core.array_runner.time", SimpleNamespace(perf_counter=clock))
    info = bert(save_model, resolve)
    runner = Runners(info, library, inputs)
    batch = runner.batch([PoolingParams().resolved(EMBED, info)])
    forwards = []
    for clock.now_s in (1.0, 2.0):
        forwards.append(runner.arrays.begin(batch))
    for clock.now_s, forward in zip((5.0, 9.0), forwards, strict=True):
        forward.outputs()
    assert [time.seconds for time in runner.arrays.take_times()] == [4.0, 4.0]


def test_limits_follow_the_library(library, save_model, resolve, inputs, monkeypatch):
    info = bert(save_model, resolve)
    for min_part_tokens, expected in ((12, 48), (13, 52)):
        monkeypatch.setattr(ArrayEncoder, "min_part_tokens", min_part_tokens)
        runner = Runners(info, library, inputs).arrays
        assert runner.limits.min_batch_tokens == expected
    for num_free in (0, 1):
        monkeypatch.setattr(CpuLibrary, "num_free", num_free)
        assert runner.has_capacity == bool(num_free)


@pytest.mark.parametrize("activation", list(DENSE_ACTIVATIONS))
def test_dense_modules_equal_torch(activation, library, save_model, resolve, inputs):
    folder, _ = save_model("BertModel", **SIZES)
    specs = []
    for name, num_in, num_out, has_bias in (("2_Dense", 48, 64, True), ("3_Dense", 64, 20, False)):
        layer = torch.nn.Linear(num_in, num_out, bias=has_bias)
        (folder / name).mkdir()
        save_file({f"linear.{k}": v for k, v in layer.state_dict().items()}, folder / name / "model.safetensors")
        specs.append(
            DenseSpec(folder=name, in_features=num_in, out_features=num_out, bias=has_bias, activation=activation)
        )
    info = replace(resolve(folder), dense=tuple(specs), embedding_size=20, is_matryoshka=True)
    params = [
        PoolingParams(dimensions=dimensions).resolved(task, info)
        for dimensions in (None, 5)
        for task in (EMBED, TOKEN_EMBED)
    ]
    Runners(info, library, inputs).compare(*params)


@pytest.mark.parametrize("is_sum", [False, True], ids=["max", "sum"])
@pytest.mark.parametrize(("family", "config"), chosen("bert", "roberta", "modernbert"))
def test_sparse_vectors_of_logits_equal_torch(family, config, is_sum, library, save_model, resolve, inputs):
    folder, _ = save_model(f"{family}ForMaskedLM", **config)
    info = resolve(folder)
    sparse = SparsePooling(kind=SparseKind.VOCABULARY_LOGITS, is_sum=is_sum)
    info = replace(info, sparse=sparse, tasks=(*info.tasks, SPARSE_EMBED))
    Runners(info, library, inputs).compare(PoolingParams().resolved(SPARSE_EMBED, info))


def test_sparse_vectors_without_a_head_are_rejected(library, save_model, resolve):
    info = replace(bert(save_model, resolve), sparse=SparsePooling(kind=SparseKind.VOCABULARY_LOGITS))
    for load in (lambda: load_array_encoder(info, library), lambda: load_model(info)):
        with pytest.raises(UnsupportedModelError, match="has no head of a masked language model"):
            load()


def test_token_heads_and_comparisons_equal_torch(library, save_model, resolve, inputs):
    folder, _ = save_model("BertModel", **SIZES)
    for name, width in (("sparse_linear.pt", 1), ("colbert_linear.pt", 48)):
        torch.save(torch.nn.Linear(48, width).state_dict(), folder / name)
    tasks = (EMBED, TOKEN_EMBED, SPARSE_EMBED)
    info = replace(
        resolve(folder),
        sparse=SparsePooling(kind=SparseKind.TOKEN_WEIGHTS),
        token_heads=TokenHeadFiles(weights_file="sparse_linear.pt", vectors_file="colbert_linear.pt"),
        multi_vector=MultiVector(),
        tasks=tasks,
    )
    inputs = [replace(one, num_masked=min(i, len(one) - 1)) for i, one in enumerate(inputs)]
    runners = Runners(info, library, inputs)
    runners.compare(PoolingParams(extra_tasks=tasks[1:]).resolved(EMBED, info))
    numbers = np.random.default_rng(3)
    queries = [numbers.normal(size=(length, 48)).astype(np.float32) for length in (3, 9)]
    compared = [replace(one, query_vectors=queries[i // 3 % 2]) for i, one in enumerate(inputs)]
    params = replace(PoolingParams().resolved(TOKEN_EMBED, info), is_compared=True)
    runners.compare(params, inputs=compared)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_pickle_files_equal_torch(dtype, library, save_model, resolve, inputs):
    folder, reference = save_model("BertModel", **SIZES)
    info = resolve(folder)
    (folder / "model.safetensors").unlink()
    torch.save(reference.to(dtype).state_dict(), folder / "pytorch_model.bin")
    Runners(info, library, inputs).compare(PoolingParams().resolved(info.tasks[0], info))


def test_runner_serves_after_a_memory_error(library, save_model, resolve, inputs, monkeypatch: pytest.MonkeyPatch):
    info = bert(save_model, resolve)
    runners = Runners(info, library, inputs)
    batch = runners.batch([PoolingParams().resolved(EMBED, info)])

    def reject(*_: Any) -> None:
        raise MemoryError("too little memory")

    monkeypatch.setattr(library, "begin", reject)
    with pytest.raises(DeviceMemoryError, match="too little memory"):
        runners.arrays.execute(batch)
    monkeypatch.undo()
    assert runners.arrays.free_tokens() > 0
    assert runners.arrays.execute(batch).is_finite.all()


@pytest.mark.parametrize(
    ("pooling", "output_rows"),
    [(PoolingType.CLS, OutputRows.FIRST), (PoolingType.LAST, OutputRows.LAST), (PoolingType.MEAN, OutputRows.ALL)],
)
def test_last_layer_runs_for_pooled_rows_only(pooling, output_rows, library, save_model, resolve, inputs, monkeypatch):
    info = replace(bert(save_model, resolve), sequence_pooling=(pooling,))
    runner = Runners(info, library, [replace(one, num_skipped_tokens=0) for one in inputs])
    found, begin = [], ArrayEncoder.begin

    def record(encoder: ArrayEncoder, *arguments: Any, output_rows: OutputRows, **options: Any) -> Any:
        found.append(output_rows)
        return begin(encoder, *arguments, output_rows=output_rows, **options)

    monkeypatch.setattr(ArrayEncoder, "begin", record)
    embed, token_embed = (PoolingParams().resolved(task, info) for task in (EMBED, TOKEN_EMBED))
    for params in ([embed], [token_embed], [embed, token_embed]):
        runner.arrays.execute(runner.batch(params))
    assert found == [output_rows, OutputRows.ALL, OutputRows.ALL]
