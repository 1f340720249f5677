"""A model that runs without torch answers as it does on torch: every family, task, pooling type and parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from penstock.engine.core.array_runner import ArrayRunner
from penstock.engine.core.loading.cpu_kernels import load_array_dense, load_array_encoder, load_array_maps
from penstock.engine.core.loading.weights_loader import load_dense, load_model, load_token_maps
from penstock.engine.core.model_runner import ModelRunner
from penstock.engine.core.runner import DeviceMemoryError
from penstock.engine.executors.cpu.array_encoder import read_spec
from penstock.engine.executors.cpu.heads import DENSE_ACTIVATIONS
from penstock.engine.protocol.batch_outputs import BatchOutputs
from penstock.engine.protocol.config import EngineConfig, PoolerConfig
from penstock.engine.protocol.errors import UnsupportedModelError
from penstock.engine.protocol.model_info import Activation, DenseSpec, ModelInfo, ModelKind, TokenizerSpec
from penstock.engine.protocol.multi_vector import MultiVector, SparseKind, SparsePooling, TokenHeads
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.request import TokenizedInput
from penstock.engine.protocol.tasks import PoolingTask, PoolingType
from penstock.engine.scheduling import PrefillChunk, QueuedSequence, Request
from penstock.kernels.cpu import CpuKernelError, Machine

from ..torch.test_encoders import FAMILIES, HAS_TYPES, SIZES

TOKENIZER = TokenizerSpec(json="{}", truncation_side="right", uses_token_types=False, sample_ids=(5, 6, 7))
TOLERANCE = 1e-5
HEADS = ["Model", "ForSequenceClassification", "ForTokenClassification"]
TYPES = [t for t in PoolingType if not t.is_token_level]


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    try:
        opened = Machine(2)
    except CpuKernelError as error:
        pytest.skip(str(error))
    with opened:
        yield opened


def both(info: ModelInfo, machine: Machine) -> tuple[ArrayRunner, ModelRunner]:
    """The same model through the C library, without torch, and on torch."""
    config = EngineConfig(model="m")
    maps, array_maps = load_token_maps(info, TOKENIZER), load_array_maps(info, TOKENIZER, machine)
    arrays = ArrayRunner(
        info, TOKENIZER, load_array_encoder(info, machine), config, load_array_dense(info, machine), array_maps
    )
    return arrays, ModelRunner(info, TOKENIZER, load_model(info), load_dense(info), config, maps)


def chunks_of(info: ModelInfo, inputs: Sequence[TokenizedInput], params: Sequence[PoolingParams]) -> list[PrefillChunk]:
    """A batch of whole sequences; an input whose parameters are None has those of the model's first task."""
    return [
        PrefillChunk(
            QueuedSequence(request_id=(i, 0), prompt=prompt, num_tokens=len(prompt), request=Request(i, own)),
            0,
            len(prompt),
        )
        for i, (prompt, own) in enumerate(zip(inputs, params, strict=True))
    ]


def assert_same(actual: BatchOutputs, expected: BatchOutputs) -> None:
    for ours, theirs in zip(actual.split(), expected.split(), strict=True):
        assert list(ours) == list(theirs)
        for name, array in theirs.items():
            assert ours[name].dtype == np.float32
            assert ours[name].shape == array.shape
            np.testing.assert_allclose(
                ours[name], array, rtol=0, atol=TOLERANCE * max(1.0, np.abs(array).max(initial=0.0))
            )


def inputs_of(family: str, sequences: Sequence[Sequence[int]]) -> list[TokenizedInput]:
    """Of odd lengths, some of them pairs, some with a prompt that pooling leaves out."""
    return [
        TokenizedInput(
            np.array(sequence, np.int32),
            type_boundary=len(sequence) // 2 if family in HAS_TYPES and i % 2 else 0,
            num_prompt_tokens=min(i, len(sequence)) if i % 3 else 0,
        )
        for i, sequence in enumerate(sequences)
    ]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_every_family_and_task(family, config, head, machine, save_model, resolve, sequences):
    if config.get("type_vocab_size") == 1:
        family = "Roberta" if family == "Bert" else family  # one type: boundaries are left out
    folder, _ = save_model(f"{family}{head}", **config)
    info = resolve(folder)
    arrays, on_torch = both(info, machine)
    inputs = inputs_of(family, sequences)
    is_embedding = info.kind is ModelKind.EMBEDDING  # the client compares the vectors
    tasks = [task for task in info.tasks if not (is_embedding and task is PoolingTask.SCORE)]
    for task in tasks:
        batch = chunks_of(info, inputs, [PoolingParams().resolved(task, info)] * len(inputs))
        assert_same(arrays.execute(batch), on_torch.execute(batch))
    # All tasks in one batch, in requests of their own and together in one.
    asked = [PoolingParams().resolved(task, info) for task in tasks]
    if is_embedding:
        asked.append(PoolingParams(also=(PoolingTask.TOKEN_EMBED,)).resolved(PoolingTask.EMBED, info))
    mixed = chunks_of(info, inputs, [asked[i % len(asked)] for i in range(len(inputs))])
    assert_same(arrays.execute(mixed), on_torch.execute(mixed))
    times = arrays.take_times()
    assert len(times) == len(tasks) + 1
    assert {time.whole_tokens for time in times} == {sum(map(len, inputs))}
    assert not arrays.take_times()


@pytest.mark.parametrize("pooling_type", TYPES)
def test_every_pooling_type_with_cuts_and_norms(pooling_type, machine, save_model, resolve, sequences):
    folder, _ = save_model("BertModel", **SIZES)
    pooler = PoolerConfig(seq_pooling_type=pooling_type)
    info = replace(resolve(folder, pooler_config=pooler), is_matryoshka=True)
    arrays, on_torch = both(info, machine)
    inputs = inputs_of("Bert", sequences)
    asked = [
        PoolingParams(dimensions=dimensions, normalize=normalize).resolved(task, info)
        for dimensions, normalize in ((None, None), (7, True), (16, False), (48, None), (1, True))
        for task in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)
    ]
    for params in asked:
        batch = chunks_of(info, inputs, [params] * len(inputs))
        assert_same(arrays.execute(batch), on_torch.execute(batch))
    batch = chunks_of(info, inputs * 2, asked)
    assert_same(arrays.execute(batch), on_torch.execute(batch))


@pytest.mark.parametrize("attention_head", [None, 2])
@pytest.mark.parametrize("names", ["ATTENTION", "CLS MEAN ATTENTION"])
def test_attention_and_concatenated_types(names, attention_head, machine, save_model, resolve, sequences):
    types = tuple(map(PoolingType, names.split()))
    folder, _ = save_model("BertModel", **SIZES)
    info = replace(
        resolve(folder), sequence_pooling=types, attention_head=attention_head, embedding_size=48 * len(types)
    )
    arrays, on_torch = both(info, machine)
    inputs = inputs_of("Bert", sequences)
    batch = chunks_of(info, inputs, [PoolingParams().resolved(PoolingTask.EMBED, info)] * len(inputs))
    assert_same(arrays.execute(batch), on_torch.execute(batch))


@pytest.mark.parametrize("activation", list(DENSE_ACTIVATIONS))
def test_dense_modules(activation, machine, save_model, resolve, sequences):
    folder, _ = save_model("BertModel", **SIZES)
    specs = []
    for name, layer in (("2_Dense", torch.nn.Linear(48, 64)), ("3_Dense", torch.nn.Linear(64, 20, bias=False))):
        (folder / name).mkdir()
        save_file({f"linear.{k}": v for k, v in layer.state_dict().items()}, folder / name / "model.safetensors")
        specs.append(
            DenseSpec(
                folder=name,
                in_features=layer.in_features,
                out_features=layer.out_features,
                bias=layer.bias is not None,
                activation=activation,
            )
        )
    info = replace(resolve(folder), dense=tuple(specs), embedding_size=20, is_matryoshka=True)
    arrays, on_torch = both(info, machine)
    inputs = inputs_of("Bert", sequences)
    asked = [
        PoolingParams(dimensions=dimensions).resolved(task, info)
        for dimensions in (None, 5)
        for task in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)
    ]
    for params in asked:
        batch = chunks_of(info, inputs, [params] * len(inputs))
        assert_same(arrays.execute(batch), on_torch.execute(batch))
    batch = chunks_of(info, inputs, [asked[i % 4] for i in range(len(inputs))])
    assert_same(arrays.execute(batch), on_torch.execute(batch))


@pytest.mark.parametrize("is_sum", [False, True], ids=["max", "sum"])
@pytest.mark.parametrize("family", ["Bert", "Roberta", "ModernBert"])
def test_sparse_vectors_of_logits(family, is_sum, machine, save_model, resolve, sequences):
    sizes = SIZES | {"pad_token_id": 0} if family == "ModernBert" else SIZES
    folder, _ = save_model(f"{family}ForMaskedLM", **sizes)
    info = resolve(folder)
    recipe = SparsePooling(kind=SparseKind.VOCABULARY_LOGITS, is_sum=is_sum)
    info = replace(info, sparse=recipe, tasks=(*info.tasks, PoolingTask.SPARSE_EMBED))
    arrays, on_torch = both(info, machine)
    batch = chunks_of(
        info, inputs_of(family, sequences), [PoolingParams().resolved(PoolingTask.SPARSE_EMBED, info)] * len(sequences)
    )
    assert_same(arrays.execute(batch), on_torch.execute(batch))


def test_sparse_vectors_without_a_head_are_refused(machine, save_model, resolve):
    folder, _ = save_model("BertModel", **SIZES)
    info = replace(resolve(folder), sparse=SparsePooling(kind=SparseKind.VOCABULARY_LOGITS))
    for load in (lambda: load_array_encoder(info, machine), lambda: load_model(info)):
        with pytest.raises(UnsupportedModelError, match="holds no head of one that penstock knows"):
            load()


def test_vectors_weights_and_similarities_of_tokens(machine, save_model, resolve, sequences):
    folder, _ = save_model("BertModel", **SIZES)
    for name, width in (("sparse_linear.pt", 1), ("colbert_linear.pt", 48)):
        torch.save(torch.nn.Linear(48, width).state_dict(), folder / name)
    tasks = (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.SPARSE_EMBED)
    info = replace(
        resolve(folder),
        sparse=SparsePooling(kind=SparseKind.TOKEN_WEIGHTS),
        token_heads=TokenHeads(weights_file="sparse_linear.pt", vectors_file="colbert_linear.pt"),
        multi_vector=MultiVector(),
        tasks=tasks,
    )
    arrays, on_torch = both(info, machine)
    inputs = [replace(one, num_hidden=min(i, len(one) - 1)) for i, one in enumerate(inputs_of("Bert", sequences))]
    params = PoolingParams(also=tasks[1:]).resolved(PoolingTask.EMBED, info)
    batch = chunks_of(info, inputs, [params] * len(inputs))
    assert_same(arrays.execute(batch), on_torch.execute(batch))
    numbers = np.random.default_rng(3)
    queries = [numbers.normal(size=(length, 48)).astype(np.float32) for length in (3, 9)]
    compared = [replace(one, query=queries[i // 3 % 2]) for i, one in enumerate(inputs)]
    params = replace(PoolingParams().resolved(PoolingTask.TOKEN_EMBED, info), is_compared=True)
    batch = chunks_of(info, compared, [params] * len(compared))
    assert_same(arrays.execute(batch), on_torch.execute(batch))
    alone = [arrays.execute([chunk]).split()[0] for chunk in batch]
    for own, one in zip(arrays.execute(batch).split(), alone, strict=True):
        assert own.keys() == one.keys()
        assert all(np.array_equal(own[name], one[name]) for name in own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_only_torch_reads(dtype, machine, save_model, resolve, sequences):
    folder, reference = save_model("BertModel", **SIZES)
    info = resolve(folder)
    (folder / "model.safetensors").unlink()
    torch.save(reference.to(dtype).state_dict(), folder / "pytorch_model.bin")
    arrays, on_torch = both(info, machine)
    batch = chunks_of(info, inputs_of("Bert", sequences), [PoolingParams().resolved(info.tasks[0], info)] * 5)
    assert_same(arrays.execute(batch), on_torch.execute(batch))


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("head", HEADS[1:])
def test_scores(head, activation, num_labels, machine, save_model, resolve, sequences):
    folder, _ = save_model(f"Bert{head}", **{**SIZES, "num_labels": num_labels})
    info = replace(resolve(folder), activation=activation, logit_mean=0.3, logit_sigma=1.7)
    arrays, on_torch = both(info, machine)
    inputs = inputs_of("Bert", sequences)
    asked = [PoolingParams(use_activation=uses).resolved(info.tasks[0], info) for uses in (None, True, False)]
    for params in ([asked[0]] * 5, [asked[2]] * 5, [asked[i % 3] for i in range(5)]):
        batch = chunks_of(info, inputs, params)
        assert_same(arrays.execute(batch), on_torch.execute(batch))


def test_steps_and_columns(machine, save_model, resolve, sequences):
    folder, _ = save_model("BertForTokenClassification", **SIZES)
    info = resolve(folder, pooler_config=PoolerConfig(tok_pooling_type=PoolingType.STEP))
    arrays, on_torch = both(info, machine)
    sequences = [[17, *sequence, 17, 17][: 17 + len(sequence)] for sequence in sequences]
    inputs = inputs_of("Bert", [*sequences, [5, 6]])
    asked = [
        PoolingParams(step_tag_id=tag, returned_token_ids=columns).resolved(PoolingTask.TOKEN_CLASSIFY, info)
        for tag, columns in ((None, None), (17, None), (17, (2, 0)), (None, (1,)), (199, None))
    ]
    for params in asked:
        batch = chunks_of(info, inputs, [params] * len(inputs))
        assert_same(arrays.execute(batch), on_torch.execute(batch))
    batch = chunks_of(info, inputs, [asked[i % len(asked)] for i in range(len(inputs))])
    assert_same(arrays.execute(batch), on_torch.execute(batch))


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_the_same_to_the_bit_in_any_batch(family, config, machine, save_model, resolve, sequences):
    folder, _ = save_model(f"{family}ForSequenceClassification", **config)
    info = resolve(folder)
    arrays, _ = both(info, machine)
    params = PoolingParams().resolved(PoolingTask.CLASSIFY, info)
    inputs = [TokenizedInput(np.array(sequence, np.int32)) for sequence in sequences]
    alone = [arrays.execute(chunks_of(info, [one], [params])).split()[0]["scores"] for one in inputs]
    together = arrays.execute(chunks_of(info, inputs, [params] * len(inputs))).split()
    assert all(np.array_equal(a, t["scores"]) for a, t in zip(alone, together, strict=True))


def test_an_answer_does_not_depend_on_the_next_batch(machine, save_model, resolve, sequences):
    folder, _ = save_model("BertModel", **SIZES)
    info = resolve(folder)
    arrays, _ = both(info, machine)
    inputs = inputs_of("Bert", sequences)
    for task in info.tasks[:2]:
        params = [PoolingParams(normalize=False).resolved(task, info)] * len(inputs)
        (first, *_) = arrays.execute(chunks_of(info, inputs, params)).split()
        kept = {name: array.copy() for name, array in first.items()}
        arrays.execute(chunks_of(info, inputs[::-1], params))
        assert all(np.array_equal(first[name], array) for name, array in kept.items())


def test_memory_that_runs_short_is_told(machine, save_model, resolve, monkeypatch: pytest.MonkeyPatch):
    folder, _ = save_model("BertModel", **SIZES)
    info = resolve(folder)
    arrays, _ = both(info, machine)
    batch = chunks_of(info, [TokenizedInput(np.array([5], np.int32))], [PoolingParams().resolved(info.tasks[0], info)])

    def refuse(*_: Any) -> None:
        raise MemoryError("too little memory")

    monkeypatch.setattr(machine, "begin", refuse)
    with pytest.raises(DeviceMemoryError, match="too little memory"):
        arrays.execute(batch)
    monkeypatch.undo()
    assert arrays.free_tokens() > 0
    assert arrays.execute(batch).is_finite.all()


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
def test_decoders_that_look_both_ways(head, machine, save_model, resolve, sequences):
    folder, _ = save_model(f"Llama{head}", **SIZES | {"num_key_value_heads": 2, "is_causal": False})
    info = resolve(folder)
    arrays, on_torch = both(info, machine)
    inputs = inputs_of("Llama", sequences)
    is_embedding = info.kind is ModelKind.EMBEDDING
    for task in [task for task in info.tasks if not (is_embedding and task is PoolingTask.SCORE)]:
        batch = chunks_of(info, inputs, [PoolingParams().resolved(task, info)] * len(inputs))
        assert_same(arrays.execute(batch), on_torch.execute(batch))


def test_whom_the_native_kernels_do_not_know(save_model, resolve):
    folder, _ = save_model("BertModel", **SIZES)
    info = resolve(folder)
    assert read_spec(info) is not None
    for changed in (replace(info, device="cuda"), replace(info, dtype="float16"), replace(info, packed=False)):
        assert read_spec(changed) is None
    for name, values in (
        ("BertModel", {"hidden_act": "mish"}),
        ("LlamaModel", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
        ("ModernBertForSequenceClassification", {"pad_token_id": 0, "classifier_activation": "mish"}),
    ):
        folder, _ = save_model(name, **{**SIZES, **values})
        assert read_spec(resolve(folder)) is None
