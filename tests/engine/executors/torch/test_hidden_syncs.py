"""Packing, forward, pooling and the copy of results never wait for the device, and the results equal a CPU's.

Without a GPU, tests/pretend_cuda.py simulates one in Triton's interpreter (test_interpreted.py). With a GPU, torch
raises an error at each wait.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.core.device.stream import stream_of
from penstock.engine.core.loading.weights_loader import load_model
from penstock.engine.executors.torch.packed_batch import PackedBatch, PackedModel
from penstock.engine.pooling import ChunkedPoolingManager, ModelPooler, PoolingMetadata, TokenHeads, tensor_ops
from penstock.engine.pooling.tensor_ops import tensor_pooler
from penstock.engine.protocol.messages import TokenizedInput
from penstock.engine.protocol.model_info import ModelInfo
from penstock.engine.protocol.multi_vector import MultiVector, SparseKind, SparsePooling
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingTask, PoolingType

from ....interpreter import IS_INTERPRETED
from ....pretend_cuda import PretendCuda, pretend_cuda
from ..families import DECODER_SIZES, ENCODER_SIZES, chosen

VOCAB_SIZE, HIDDEN_SIZE = ENCODER_SIZES["vocab_size"], ENCODER_SIZES["hidden_size"]
LENGTHS = (1, 2, 5, 18, 9)
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
DYNAMIC_ROPE = DECODER_SIZES | {"max_position_embeddings": 16, "rope_parameters": DYNAMIC}
MODELS = [
    *chosen("bert", "roberta", "distilbert", "mpnet", "electra", "modernbert", "nomic-bert", "gte"),
    *chosen("llama", "mistral-window", "qwen3", "gemma2", "gemma3", "phi3", "mamba", "mamba2", "jamba", "granite"),
    pytest.param("Llama", DYNAMIC_ROPE, id="llama-dynamic-rope"),
]
SEQUENCE_TYPES = [t for t in PoolingType if not t.is_token_level]
BERT, LLAMA = (case.values for case in chosen("bert", "llama"))

Results = list[dict[Any, np.ndarray]]


class Device:
    """A device that raises an error if the host waits for it."""

    def __init__(self, simulated: PretendCuda | None) -> None:
        self._simulated = simulated
        self.name = "cuda:0"
        # A GPU sums products in another order.
        self.tolerance = 1e-4 if simulated is None else 2e-5

    def watched(self) -> contextlib.AbstractContextManager[None]:
        return _sync_mode("error") if self._simulated is None else self._simulated.watched()

    def unwatched(self) -> contextlib.AbstractContextManager[None]:
        return _sync_mode("default") if self._simulated is None else self._simulated.unwatched()

    def synchronize(self) -> None:
        if self._simulated is None:
            torch.cuda.synchronize()


@contextlib.contextmanager
def _sync_mode(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.fixture(
    params=[
        pytest.param(
            "simulated",
            marks=pytest.mark.skipif(
                not IS_INTERPRETED, reason="needs Triton's interpreter: TRITON_INTERPRET=1 from the start"
            ),
        ),
        pytest.param("real", marks=pytest.mark.gpu),
    ]
)
def open_device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], contextlib.AbstractContextManager[Device]]:
    """Opens the device. The counts of sparse vectors are the only wait that is allowed."""

    @contextlib.contextmanager
    def opened() -> Iterator[Device]:
        with pretend_cuda() if request.param == "simulated" else contextlib.nullcontext() as simulated:
            device = Device(simulated)
            original = tensor_ops.counts_on_host

            def counts_on_host(counts: torch.Tensor) -> list[int]:
                with device.unwatched():
                    return original(counts)

            monkeypatch.setattr(tensor_ops, "counts_on_host", counts_on_host)
            yield device
            monkeypatch.setattr(tensor_ops, "counts_on_host", original)

    return opened


@dataclass
class Served:
    """A model with its pooler on one device."""

    info: ModelInfo
    model: PackedModel
    pooler: ModelPooler[torch.Tensor]

    @classmethod
    def load(cls, info: ModelInfo, device: str = "cpu", token_heads: TokenHeads | None = None) -> "Served":
        info = replace(info, device=device)
        model = load_model(info)
        return cls(info, model, tensor_pooler(info, model, (), token_heads))


def inputs_of(lengths: Sequence[int] = LENGTHS) -> list[TokenizedInput]:
    numbers = np.random.default_rng(0)
    return [TokenizedInput(numbers.integers(3, VOCAB_SIZE, n).astype(np.int32)) for n in lengths]


def run(
    served: Served,
    params: Sequence[PoolingParams],
    inputs: Sequence[TokenizedInput],
    queries: Sequence[Any] | None,
    device: Device | None = None,
) -> Results:
    with torch.inference_mode(), contextlib.nullcontext() if device is None else device.watched():
        batch = PackedBatch.build(inputs, torch.device(served.info.device))
        metadata = PoolingMetadata.for_batch(batch, params, queries=queries)
        output = served.model.forward(batch, need_attention=served.pooler.needs_attention(params))
        pooled = served.pooler.pool(output, metadata)
        copies = pooled.begin_copy(stream_of(torch.device(served.info.device)).to_host)
    if device is not None:
        device.synchronize()
    return [dict(arrays) for arrays in copies.outputs().split()]


def assert_close(
    actual: Sequence[Mapping[Any, np.ndarray]], expected: Sequence[Mapping[Any, np.ndarray]], device: Device
) -> None:
    for found, wanted in zip(actual, expected, strict=True):
        assert found.keys() == wanted.keys()
        assert found
        for name, values in wanted.items():
            limit = device.tolerance * max(1.0, abs(values).max(initial=0))
            np.testing.assert_allclose(found[name], values, atol=limit, rtol=0)


Check = Callable[..., None]


@pytest.fixture
def check(open_device: Callable[[], contextlib.AbstractContextManager[Device]]) -> Check:
    """Compares the results of a batch on the device, which must not wait, with the results on a CPU."""

    def compare(
        info: ModelInfo,
        *params: PoolingParams,
        inputs: Sequence[TokenizedInput] | None = None,
        queries: Sequence[Any] | None = None,
        token_heads: Callable[[str], TokenHeads | None] = lambda device: None,
    ) -> None:
        inputs = inputs_of() if inputs is None else inputs
        each = (params * len(inputs))[: len(inputs)]
        expected = run(Served.load(info, token_heads=token_heads("cpu")), each, inputs, queries)
        with open_device() as device:
            served = Served.load(info, device.name, token_heads(device.name))
            assert_close(without_zeros(run(served, each, inputs, queries, device)), without_zeros(expected), device)

    return compare


def without_zeros(results: Results) -> Results:
    """Drops zero entries of sparse vectors."""
    return [
        arrays | {"sparse": arrays["sparse"][arrays["sparse"][:, 1] != 0]} if "sparse" in arrays else arrays
        for arrays in results
    ]


@pytest.fixture
def load_info(save_recurrent: Any, resolve: Any) -> Callable[..., ModelInfo]:
    def load(family: str, config: dict[str, Any], head: str = "Model", **changes: Any) -> ModelInfo:
        if family in ("Bert", "Llama", "Qwen3"):
            config = config | {"num_hidden_layers": 1}
        folder, _ = save_recurrent(f"{family}{head}", **config)
        return replace(resolve(folder), **changes)

    return load


def resolved(info: ModelInfo, task: PoolingTask, **fields: object) -> PoolingParams:
    return PoolingParams(**fields).resolved(task, info)


@pytest.mark.parametrize(("family", "config"), MODELS)
def test_embedding_never_waits(family: str, config: dict[str, Any], load_info: Any, check: Check) -> None:
    info = load_info(family, config)
    check(info, resolved(info, PoolingTask.EMBED))


@pytest.mark.parametrize("pooling_type", SEQUENCE_TYPES)
@pytest.mark.parametrize(("family", "config"), chosen("bert", "llama"))
def test_pooling_type_never_waits(
    pooling_type: PoolingType, family: str, config: dict[str, Any], load_info: Any, check: Check
) -> None:
    info = load_info(family, config, sequence_pooling=(pooling_type,), is_matryoshka=True)
    params = resolved(info, PoolingTask.EMBED)
    check(info, params, params.clone(dimensions=7), params.clone(normalize=False))


def test_prompts_and_mixed_tasks_never_wait(load_info: Any, check: Check) -> None:
    info = load_info(*BERT, sequence_pooling=(PoolingType.MEAN, PoolingType.MAX))
    inputs = [replace(tokens, num_skipped_tokens=n) for n, tokens in enumerate(inputs_of((3, 5, 9)))]
    embed, tokens = resolved(info, PoolingTask.EMBED), resolved(info, PoolingTask.TOKEN_EMBED)
    check(info, embed, inputs=inputs)
    check(info, embed, tokens, tokens.clone(dimensions=5))
    check(info, embed.clone(extra_tasks=(PoolingTask.TOKEN_EMBED,)))


@pytest.mark.parametrize(("family", "config"), [BERT, LLAMA], ids=["bert", "llama"])
def test_classes_never_wait(family: str, config: dict[str, Any], load_info: Any, check: Check) -> None:
    info = load_info(family, config, "ForSequenceClassification")
    params = resolved(info, PoolingTask.CLASSIFY)
    check(info, params, params.clone(use_activation=False))


@pytest.mark.parametrize("changes", [{}, {"token_pooling": PoolingType.STEP}], ids=["tokens", "steps"])
def test_classes_of_tokens_never_wait(changes: Any, load_info: Any, check: Check) -> None:
    info = load_info(*BERT, "ForTokenClassification", **changes)
    params = resolved(info, PoolingTask.TOKEN_CLASSIFY)
    tag = int(inputs_of()[3].token_ids[0])
    check(info, params)
    check(info, params.clone(use_activation=False), params.clone(returned_token_ids=(2, 0)), params)
    if changes:
        check(info, params.clone(step_tag_id=tag), params.clone(step_tag_id=0), params)


@pytest.mark.parametrize("skips_queries", [False, True])
def test_token_vectors_never_wait(skips_queries: bool, load_info: Any, check: Check) -> None:
    info = load_info(*BERT, multi_vector=MultiVector(skip_words=("x",), skips_queries=skips_queries))
    document = resolved(info, PoolingTask.TOKEN_EMBED)
    token_heads = TokenHeads(skip_ids=tuple(range(3, 60)))
    check(info, document, document.clone(is_query=True), token_heads=lambda device: token_heads)
    inputs = [replace(tokens, num_masked=n) for n, tokens in enumerate(inputs_of((3, 5, 5)))]
    check(info, document, inputs=inputs, token_heads=lambda device: token_heads)


def test_comparison_with_queries_never_waits(load_info: Any, check: Check) -> None:
    info = load_info(*BERT, multi_vector=MultiVector(skip_words=("x",)))
    token_heads = TokenHeads(skip_ids=tuple(range(3, 60)))
    rows = np.random.default_rng(1).standard_normal((7, HIDDEN_SIZE)).astype(np.float32)
    queries = [rows[:3], rows[3:], rows[3:], rows[:3], rows[3:]]
    params = resolved(info, PoolingTask.TOKEN_EMBED).clone(is_compared=True)
    check(info, params, queries=queries, token_heads=lambda device: token_heads)


@pytest.mark.parametrize("log_twice", [False, True])
@pytest.mark.parametrize("is_sum", [False, True], ids=["max", "sum"])
def test_sparse_vectors_of_logits_wait_for_counts_only(
    is_sum: bool, log_twice: bool, load_info: Any, check: Check
) -> None:
    info = load_info(*BERT, "ForMaskedLM")
    sparse = SparsePooling(kind=SparseKind.VOCABULARY_LOGITS, is_sum=is_sum, log_twice=log_twice)
    info = replace(info, sparse=sparse, tasks=(*info.tasks, PoolingTask.SPARSE_EMBED))
    check(info, resolved(info, PoolingTask.SPARSE_EMBED))


def run_chunks(
    served: Served, params: Sequence[PoolingParams], chunked_run: Any, device: Device | None = None
) -> list[dict[Any, np.ndarray]]:
    """Results of each sequence in the order of its chunks of 7 tokens."""
    sequences = [tokens.token_ids.tolist() for tokens in inputs_of()]
    runner = chunked_run(served.model, sequences, device=served.info.device)
    done, results = [0] * len(sequences), [[] for _ in sequences]
    manager = ChunkedPoolingManager(
        served.info.hidden_size, strategy=served.info.sequence_pooling, device=served.info.device
    )
    while any(at < len(tokens) for at, tokens in zip(done, sequences, strict=True)):
        chunks = [(n, done[n], min(done[n] + 7, len(s))) for n, s in enumerate(sequences) if done[n] < len(s)]
        batch = runner.pack(chunks)
        of_chunks = [params[n] for n, *_ in chunks]
        with torch.inference_mode(), contextlib.nullcontext() if device is None else device.watched():
            metadata = PoolingMetadata.for_batch(
                batch,
                of_chunks,
                seq_ids=[n for n, *_ in chunks],
                starts=batch.cache.context_lens,
                total_lens=batch.cache.total_lens,
            )
            output = served.model.forward(batch, need_attention=served.pooler.needs_attention(of_chunks))
            metadata = manager.with_cursors(metadata)
            pooled = served.pooler.pool(output, metadata, manager)
            manager.commit(metadata, pooled.states)
        for (n, _, end), arrays in zip(chunks, pooled.to_numpy(), strict=True):
            results[n] += arrays.values()
            done[n] = end
    return [dict(enumerate(arrays)) for arrays in results]


@pytest.mark.parametrize(
    ("family", "config", "changes"),
    [
        *(pytest.param(*case.values, {}, id=case.id) for case in chosen("mistral-window", "mamba", "granite")),
        *(pytest.param(*LLAMA, {"sequence_pooling": (kind,)}, id=f"llama-{kind}") for kind in SEQUENCE_TYPES),
    ],
)
def test_chunks_never_wait(
    family: str, config: dict[str, Any], changes: Any, load_info: Any, chunked_run: Any, open_device: Any
) -> None:
    info = load_info(family, config, **changes)
    embed, tokens = resolved(info, PoolingTask.EMBED), resolved(info, PoolingTask.TOKEN_EMBED)
    params = [embed, embed, tokens, embed, embed]
    expected = run_chunks(Served.load(info), params, chunked_run)
    with open_device() as device:
        actual = run_chunks(Served.load(info, device.name), params, chunked_run, device)
    assert_close(actual, expected, device)
