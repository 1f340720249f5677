"""Packing, forward, pooling and copies out never wait for the device, and the results equal those on a CPU.

Without a GPU the tests simulate a device (device/pretend_cuda.py). This needs triton's interpreter, so they run in a
process of their own (test_hidden_syncs_interpreted.py). With a GPU, torch reports every wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.core.device.stream import stream_of
from penstock.engine.core.loading.weights_loader import load_model
from penstock.engine.executors.torch.base import PackedModel
from penstock.engine.executors.torch.packed_batch import PackedBatch
from penstock.engine.pooling import ChunkedPoolingManager, ModelPooler, PoolingMetadata, TokenMaps, tensor_ops
from penstock.engine.pooling.sparse import SparsePooler
from penstock.engine.pooling.tensor_ops import tensor_pooler
from penstock.engine.protocol.model_info import ModelInfo
from penstock.engine.protocol.multi_vector import MultiVector, SparseKind, SparsePooling
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.request import TokenizedInput
from penstock.engine.protocol.tasks import PoolingTask, PoolingType

from ....interpreter import IS_INTERPRETED
from ...device.pretend_cuda import PretendCuda, pretend_cuda

interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1 from the start")
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
DISTILBERT = {"vocab_size": 120, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48}
MODERNBERT = SIZES | IDS | {"local_attention": 16, "cls_token_id": 1, "sep_token_id": 2}
MAMBA = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_labels": 3}
MAMBA2 = MAMBA | {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 32}
HYBRID = DECODER | {"mamba_d_state": 16}
JAMBA = HYBRID | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "expert_layer_offset": 0}
GRANITE = HYBRID | {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "num_local_experts": 4}
GRANITE |= {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}}
LENGTHS = (1, 2, 5, 33, 20)


class Device(contextlib.AbstractContextManager["Device"]):
    """Where a test runs, and what watches it there."""

    name = "cuda:0"
    tolerance = 2e-5

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

    def wait(self) -> None:
        """Until the device has done what it was asked."""


class RealDevice(Device):
    """A GPU, watched by torch."""

    tolerance = 1e-4  # other products and other sums, in float32

    def __enter__(self) -> Device:
        return self

    def watched(self) -> contextlib.AbstractContextManager[None]:
        return _sync_mode("error")

    def unwatched(self) -> contextlib.AbstractContextManager[None]:
        return _sync_mode("default")

    def wait(self) -> None:
        torch.cuda.synchronize()


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
        marked = tensor_ops.counts_on_host

        def counts_on_host(counts: torch.Tensor) -> list[int]:
            with device.unwatched():
                return marked(counts)

        patch.setattr(tensor_ops, "counts_on_host", counts_on_host)
        yield device


@dataclass
class Served:
    """A model with its pooler, on one device."""

    info: ModelInfo
    model: PackedModel
    pooler: ModelPooler[torch.Tensor]

    @classmethod
    def load(cls, info: ModelInfo, device: str = "cpu", maps: TokenMaps | None = None) -> Served:
        info = replace(info, device=device)
        model = load_model(info)
        return cls(info, model, tensor_pooler(info, model, (), maps))


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
    """The arrays of each input; on a device packing, forward, pooling and the begun copy of the answers are watched."""
    inputs = inputs_of() if inputs is None else inputs
    with torch.inference_mode(), contextlib.nullcontext() if device is None else device.watched():
        batch = PackedBatch.build(inputs, torch.device(served.info.device))
        metadata = PoolingMetadata.for_batch(batch, params)
        metadata.queries = queries
        output = served.model.forward(batch, need_attention=served.pooler.needs_attention(params))
        pooled = served.pooler.pool(output, metadata)
        stream = stream_of(torch.device(served.info.device))
        copies = pooled.begin_copy(stream.to_host)
    if device is not None:
        device.wait()
    return [dict(arrays) for arrays in copies.arrived().split()]


def check(
    actual: Sequence[Mapping[object, np.ndarray]], expected: Sequence[Mapping[object, np.ndarray]], device: Device
) -> None:
    for own, other in zip(actual, expected, strict=True):
        assert own.keys() == other.keys()
        assert own
        for name, values in other.items():
            np.testing.assert_allclose(
                own[name], values, atol=device.tolerance * max(1.0, abs(values).max(initial=0)), rtol=0
            )


def compare(info: ModelInfo, params: Sequence[PoolingParams], device: Device, maps: TokenMaps | None = None) -> None:
    """The answers of the device, where nothing waited, are those of the CPU."""
    expected = answers(Served.load(info, maps=maps), params)
    with device:
        check(answers(Served.load(info, device.name, maps), params, device), expected, device)


def resolved(info: ModelInfo, task: PoolingTask, **fields: object) -> PoolingParams:
    return PoolingParams(**fields).resolved(task, info)


EMBEDDERS = [
    pytest.param("BertModel", SIZES, id="bert"),
    pytest.param("RobertaModel", SIZES | {"type_vocab_size": 1}, id="roberta"),
    pytest.param("DistilBertModel", DISTILBERT, id="distilbert"),
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


TYPES = [t for t in PoolingType if not t.is_token_level]


@pytest.mark.parametrize("pooling_type", TYPES)
@pytest.mark.parametrize(("class_name", "config"), [p for p in EMBEDDERS if p.id in ("bert", "llama")])
def test_no_pooling_type_waits(
    pooling_type: PoolingType, class_name: str, config: dict[str, Any], save_model: Any, resolve: Any, device: Device
) -> None:
    folder, _ = save_model(class_name, **config)
    info = replace(resolve(folder), sequence_pooling=(pooling_type,), is_matryoshka=True)
    params = resolved(info, PoolingTask.EMBED)
    compare(info, [params, params.clone(dimensions=7), params.clone(normalize=False), params, params], device)


def test_prompts_that_are_left_out_never_wait(save_model: Any, resolve: Any, device: Device) -> None:
    folder, _ = save_model("BertModel", **SIZES)
    info = replace(resolve(folder), sequence_pooling=(PoolingType.MEAN, PoolingType.MAX))
    inputs = [replace(tokens, num_prompt_tokens=n) for n, tokens in enumerate(inputs_of((3, 5, 9)))]
    params = [resolved(info, PoolingTask.EMBED)] * 3
    expected = answers(Served.load(info), params, inputs=inputs)
    with device:
        check(answers(Served.load(info, device.name), params, device, inputs), expected, device)


def test_mixed_tasks_never_wait(save_model: Any, resolve: Any, device: Device) -> None:
    folder, _ = save_model("BertModel", **SIZES)
    info = resolve(folder)
    embed, tokens = resolved(info, PoolingTask.EMBED), resolved(info, PoolingTask.TOKEN_EMBED)
    cut = tokens.clone(dimensions=5)
    compare(info, [embed, tokens, cut, embed, tokens], device)
    compare(info, [embed.clone(also=(PoolingTask.TOKEN_EMBED,))] * 5, device)


@pytest.mark.parametrize("class_name", ["BertForSequenceClassification", "LlamaForSequenceClassification"])
def test_classes_never_wait(class_name: str, save_model: Any, resolve: Any, device: Device) -> None:
    folder, _ = save_model(class_name, **(SIZES if class_name.startswith("Bert") else DECODER))
    info = resolve(folder)
    params = resolved(info, PoolingTask.CLASSIFY)
    compare(info, [params, params.clone(use_activation=False), params, params, params], device)


def test_classes_of_tokens_never_wait(save_model: Any, resolve: Any, device: Device) -> None:
    folder, _ = save_model("BertForTokenClassification", **SIZES)
    info = resolve(folder)
    params = resolved(info, PoolingTask.TOKEN_CLASSIFY)
    raw, column = params.clone(use_activation=False), params.clone(returned_token_ids=(2, 0))
    compare(info, [params] * 5, device)
    compare(info, [params, raw, column, raw, params], device)


def test_steps_never_wait(save_model: Any, resolve: Any, device: Device) -> None:
    folder, _ = save_model("BertForTokenClassification", **SIZES)
    info = replace(resolve(folder), token_pooling=PoolingType.STEP)
    params = resolved(info, PoolingTask.TOKEN_CLASSIFY)
    tags = [int(inputs_of()[3].token_ids[n]) for n in (0, 7)]
    compare(info, [*(params.clone(step_tag_id=tag) for tag in (*tags, 0, tags[0])), params], device)


@pytest.mark.parametrize("skips_queries", [False, True])
def test_token_vectors_never_wait(skips_queries: bool, save_model: Any, resolve: Any, device: Device) -> None:
    folder, _ = save_model("BertModel", **SIZES)
    recipe = MultiVector(skip_words=("x",), skips_queries=skips_queries)
    info = replace(resolve(folder), multi_vector=recipe)
    document = resolved(info, PoolingTask.TOKEN_EMBED)
    maps = TokenMaps(skip_ids=tuple(range(3, 60)))
    compare(info, [document, document.clone(is_query=True)] * 2 + [document], device, maps)
    inputs = [replace(tokens, num_hidden=n) for n, tokens in enumerate(inputs_of((3, 5, 5)))]
    expected = answers(Served.load(info, maps=maps), [document] * 3, inputs=inputs)
    with device:
        check(answers(Served.load(info, device.name, maps), [document] * 3, device, inputs), expected, device)


def test_comparison_with_queries_never_waits(save_model: Any, resolve: Any, device: Device) -> None:
    folder, _ = save_model("BertModel", **SIZES)
    info = replace(resolve(folder), multi_vector=MultiVector(skip_words=("x",)))
    params = [resolved(info, PoolingTask.TOKEN_EMBED).clone(is_compared=True)] * 5
    maps = TokenMaps(skip_ids=tuple(range(3, 60)))
    rows = np.random.default_rng(1).standard_normal((7, SIZES["hidden_size"])).astype(np.float32)
    queries = [rows[:3], rows[3:], rows[3:], rows[:3], rows[3:]]
    expected = answers(Served.load(info, maps=maps), params, queries=queries)
    with device:
        check(answers(Served.load(info, device.name, maps), params, device, queries=queries), expected, device)


@pytest.mark.parametrize("log_twice", [False, True])
@pytest.mark.parametrize("is_sum", [False, True])
def test_sparse_vectors_of_logits_wait_where_it_is_marked(
    is_sum: bool, log_twice: bool, save_model: Any, resolve: Any, device: Device
) -> None:
    folder, _ = save_model("BertForMaskedLM", **SIZES)
    recipe = SparsePooling(kind=SparseKind.VOCABULARY_LOGITS, is_sum=is_sum, log_twice=log_twice)
    info = resolve(folder)
    info = replace(info, sparse=recipe, tasks=(*info.tasks, PoolingTask.SPARSE_EMBED))
    compare(info, [resolved(info, PoolingTask.SPARSE_EMBED)] * 5, device)


@pytest.mark.parametrize("is_sum", [False, True], ids=["max", "sum"])
def test_sparse_vectors_of_a_head_in_bfloat16_stay_close(
    is_sum: bool, save_model: Any, resolve: Any, device: Device
) -> None:
    """Cosine to those of float32 on the CPU above 0.999, from the same hidden states."""
    folder, _ = save_model("BertForMaskedLM", **(SIZES | {"vocab_size": 3001, "hidden_size": 64}))
    recipe = SparsePooling(kind=SparseKind.VOCABULARY_LOGITS, is_sum=is_sum)
    info = resolve(folder)
    info = replace(info, sparse=recipe, tasks=(*info.tasks, PoolingTask.SPARSE_EMBED))
    params = [resolved(info, PoolingTask.SPARSE_EMBED)] * 5
    served = Served.load(info)
    batch = PackedBatch.build(inputs_of(), torch.device("cpu"))
    hidden_states = served.model.forward(batch).hidden_states
    expected = [arrays["sparse"] for arrays in answers(served, params)]
    with device:
        head = load_model(replace(info, device=device.name, dtype="bfloat16")).vocabulary_head
        assert head is not None
        logits = head(hidden_states[:3].to(device.name)).cpu()
        assert logits.dtype == torch.bfloat16
        assert logits.shape == (3, 3008)  # rows are aligned to 16 bytes
        assert not logits[:, 3001:].any()
        metadata = PoolingMetadata.for_batch(PackedBatch.build(inputs_of(), torch.device(device.name)), params)
        with torch.inference_mode():
            pairs, counts = SparsePooler(
                tensor_ops.TensorOps(device.name), recipe, head, info.vocab_size, block_rows=512
            ).pool(hidden_states.to(device.name, torch.bfloat16), metadata)
        parts = pairs.cpu().split(list(counts))
    for part, other in zip(parts, expected, strict=True):
        own, exact = np.zeros(info.vocab_size), np.zeros(info.vocab_size)
        own[part[:, 0].int().numpy()] = part[:, 1].numpy()
        exact[other[:, 0].astype(int)] = other[:, 1]
        assert np.count_nonzero(exact) > 100
        assert own @ exact > 0.999 * np.linalg.norm(own) * np.linalg.norm(exact)


class Map:
    """A linear map of given numbers, on whichever device the rows are."""

    def __init__(self, width: int, device: str) -> None:
        weight = torch.randn(width, SIZES["hidden_size"], generator=torch.Generator().manual_seed(4))
        self._weight = weight.to(device)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rows.float(), self._weight)


def test_three_outputs_of_one_forward_never_wait(save_model: Any, resolve: Any, device: Device) -> None:
    folder, _ = save_model("BertModel", **SIZES)
    info = resolve(folder)
    recipe = SparsePooling(kind=SparseKind.TOKEN_WEIGHTS)
    tasks = (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.SPARSE_EMBED)
    info = replace(info, sparse=recipe, multi_vector=MultiVector(skip_words=()), tasks=tasks)
    params = resolved(info, PoolingTask.EMBED).clone(also=tasks[1:])

    def served(name: str) -> Served:
        maps = TokenMaps(vectors=Map(8, name), weights=Map(1, name), unweighted_ids=tuple(range(3, 20)))
        return Served.load(info, name, maps)

    expected = answers(served("cpu"), [params] * 5)
    with device:
        check(sparse_alike(answers(served(device.name), [params] * 5, device)), sparse_alike(expected), device)


def sparse_alike(arrays: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """Without the entries that are 0."""
    return [one | {"sparse": one["sparse"][one["sparse"][:, 1] != 0]} for one in arrays]


CHUNKED = [p for p in EMBEDDERS if p.id in ("llama", "mistral-window", "gemma2", "qwen3", "mamba", "mamba2")]
CHUNKED += [p for p in EMBEDDERS if p.id.endswith("experts")]


def chunk_answers(
    served: Served, params: Sequence[PoolingParams], chunked_run: Any, device: Device | None = None
) -> list[list[np.ndarray]]:
    """What each step gives each sequence, of chunks of 7 tokens; forward and pooling are watched."""
    sequences = [tokens.token_ids.tolist() for tokens in inputs_of()]
    run = chunked_run(served.model, sequences, device=served.info.device)
    done, found = [0] * len(sequences), [[] for _ in sequences]
    manager = ChunkedPoolingManager(
        served.info.hidden_size, strategy=served.info.sequence_pooling, device=served.info.device
    )
    while any(at < len(tokens) for at, tokens in zip(done, sequences, strict=True)):
        chunks = [(n, done[n], min(done[n] + 7, len(s))) for n, s in enumerate(sequences) if done[n] < len(s)]
        batch = run.pack(chunks)
        own = [params[n] for n, *_ in chunks]
        with torch.inference_mode(), contextlib.nullcontext() if device is None else device.watched():
            assert batch.cache is not None
            metadata = PoolingMetadata.for_batch(
                batch,
                own,
                seq_ids=[n for n, *_ in chunks],
                starts=batch.cache.context_lens,
                prompt_lens=batch.cache.prompt_lens,
            )
            output = served.model.forward(batch, need_attention=served.pooler.needs_attention(own))
            pooled = served.pooler.pool(output, metadata, manager)
            manager.commit(metadata)
        for (n, _, end), arrays in zip(chunks, pooled.to_numpy(), strict=True):
            found[n] += arrays.values()
            done[n] = end
    return found


@pytest.mark.parametrize(("class_name", "config"), CHUNKED)
def test_chunks_never_wait(
    class_name: str, config: dict[str, Any], save_recurrent: Any, resolve: Any, chunked_run: Any, device: Device
) -> None:
    folder, _ = save_recurrent(class_name, **config)
    check_chunks(resolve(folder), chunked_run, device)


@pytest.mark.parametrize("pooling_type", TYPES)
def test_states_of_chunks_never_wait(
    pooling_type: PoolingType, save_model: Any, resolve: Any, chunked_run: Any, device: Device
) -> None:
    folder, _ = save_model("LlamaModel", **DECODER)
    check_chunks(replace(resolve(folder), sequence_pooling=(pooling_type,)), chunked_run, device)


def check_chunks(info: ModelInfo, chunked_run: Any, device: Device) -> None:
    embed, tokens = resolved(info, PoolingTask.EMBED), resolved(info, PoolingTask.TOKEN_EMBED)
    params = [embed, embed, tokens, embed, embed]
    expected = chunk_answers(Served.load(info), params, chunked_run)
    with device:
        found = chunk_answers(Served.load(info, device.name), params, chunked_run, device)
    for own, other in zip(found, expected, strict=True):
        assert len(own) == len(other) > 0
        check([dict(enumerate(own))], [dict(enumerate(other))], device)
