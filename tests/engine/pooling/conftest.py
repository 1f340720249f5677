"""Small packed batches and models for the tests of pooling."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.engine.executors.torch.packed_batch import ModelOutput, PackedBatch, PackedModel
from penstock.engine.pooling import ModelPooler, PoolerOutput, PoolingMetadata
from penstock.engine.pooling.array_ops import ArrayOps
from penstock.engine.pooling.row_ops import RowOps
from penstock.engine.pooling.tensor_ops import TensorOps
from penstock.engine.protocol.model_info import DenseSpec, ModelInfo, ModelKind
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingTask, PoolingType
from penstock.kernels.cpu import shared_library

from .. import model_infos
from ..model_infos import HIDDEN_SIZE, NUM_HEADS, NUM_LABELS

LENGTHS = (1, 2, 7, 63, 5, 30)
ATTENTION_HEAD = 2
SEQUENCE_TYPES = [t for t in PoolingType if not t.is_token_level]
DENSE = (DenseSpec(folder="2_Dense", in_features=HIDDEN_SIZE, out_features=10, bias=True, activation="Tanh"),)


def make_info(kind: ModelKind = ModelKind.EMBEDDING, num_labels: int = NUM_LABELS, **changes: Any) -> ModelInfo:
    """Returns a model with embeddings of any number of dimensions."""
    return model_infos.make_info(kind, num_labels, **{"is_matryoshka": True, **changes})


class TinyModel(PackedModel):
    """Heads only. The tests make the hidden states."""

    def __init__(self, num_labels: int = NUM_LABELS) -> None:
        torch.manual_seed(7)
        self.hidden_size = HIDDEN_SIZE
        self.weight = torch.randn(num_labels, HIDDEN_SIZE)
        self.sequence_head = self.token_head = lambda rows: rows @ self.weight.T

    def forward(self, batch: Any, *, need_attention: bool = False) -> ModelOutput:
        raise AssertionError("the tests make the hidden states")


@pytest.fixture
def array_ops() -> ArrayOps:
    library = shared_library()
    if library is None:
        pytest.skip("needs the C library: make native")
    return ArrayOps(library)


@pytest.fixture(params=["tensors", "arrays"])
def ops(request: pytest.FixtureRequest) -> RowOps[Any]:
    return TensorOps() if request.param == "tensors" else request.getfixturevalue("array_ops")


@pytest.fixture
def hidden_states() -> Tensor:
    """[T, D] float32, T the sum of LENGTHS."""
    torch.manual_seed(0)
    return torch.randn(sum(LENGTHS), HIDDEN_SIZE)


@pytest.fixture
def attention_weights() -> Tensor:
    """[T, H] float32; they sum to 1 over a sequence, as attention does."""
    torch.manual_seed(1)
    logits = torch.randn(sum(LENGTHS), NUM_HEADS)
    return torch.cat([part.softmax(dim=0) for part in logits.split(LENGTHS)])


@pytest.fixture
def token_ids() -> Tensor:
    """[T] int64; about every third token is 3."""
    torch.manual_seed(2)
    ids = torch.randint(0, 100, (sum(LENGTHS),))
    ids[torch.randperm(len(ids))[: len(ids) // 3]] = 3
    return ids


def make_metadata(
    total_lens: Sequence[int],
    params: Sequence[PoolingParams] | None = None,
    *,
    chunk_sizes: Sequence[int] | None = None,
    chunk_starts: Sequence[int] | None = None,
    seq_ids: Sequence[Hashable] | None = None,
    token_ids: Tensor | None = None,
    skip_tokens: Tensor | None = None,
    device: str = "cpu",
) -> PoolingMetadata:
    """Describes a batch as the runner does. By default a chunk is the whole sequence."""
    if chunk_starts is None:
        chunk_starts = [0] * len(total_lens)
    if chunk_sizes is None:
        chunk_sizes = [n - s for n, s in zip(total_lens, chunk_starts, strict=True)]
    num_tokens = sum(chunk_sizes)
    batch = PackedBatch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64) if token_ids is None else token_ids,
        positions=torch.zeros(num_tokens, dtype=torch.int64),
        token_type_ids=None,
        cu_seqlens=torch.tensor([0, *np.cumsum(chunk_sizes)], dtype=torch.int32, device=device),
        seq_lens=tuple(chunk_sizes),
        max_seqlen=max(chunk_sizes),
        skip_tokens=None if skip_tokens is None else skip_tokens.numpy(),
    )
    params = [PoolingParams()] * len(total_lens) if params is None else params
    seq_ids = range(len(total_lens)) if seq_ids is None else seq_ids
    metadata = PoolingMetadata.for_batch(batch, params, seq_ids=seq_ids, starts=chunk_starts, total_lens=total_lens)
    return replace(metadata, token_ids=None if token_ids is None else token_ids.cpu().numpy())


def resolved(info: ModelInfo, task: PoolingTask, **fields: Any) -> PoolingParams:
    return PoolingParams(**fields).resolved(task, info)


def dense_chain(in_features: int = HIDDEN_SIZE, out_features: int = 10) -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(in_features, out_features), torch.nn.Tanh()).requires_grad_(False)


def assert_same(left: Sequence[Any], right: Sequence[Any], atol: float = 1e-6) -> None:
    """Compares the arrays of each sequence by name."""
    for actual, expected in zip(left, right, strict=True):
        assert actual.keys() == expected.keys()
        for name, array in actual.items():
            np.testing.assert_allclose(array, expected[name], atol=atol, rtol=0)


def embedding_cases() -> Iterator[tuple[ModelInfo, list[torch.nn.Module]]]:
    for pooling_type in SEQUENCE_TYPES:
        yield make_info(sequence_pooling=(pooling_type,)), []
    yield make_info(sequence_pooling=(PoolingType.CLS, PoolingType.WEIGHTED_MEAN)), []
    yield make_info(dense=DENSE), [dense_chain()]


PoolAll = Callable[..., PoolerOutput[Tensor]]


@pytest.fixture
def pool_all(hidden_states: Tensor, attention_weights: Tensor, token_ids: Tensor) -> PoolAll:
    """Pools the batch of whole sequences, or only the sequences `indices`."""

    def run(
        pooler: ModelPooler[Tensor],
        params: Sequence[PoolingParams],
        *,
        indices: Sequence[int] | None = None,
        skip_tokens: Tensor | None = None,
    ) -> PoolerOutput[Tensor]:
        metadata = make_metadata(LENGTHS, params, token_ids=token_ids, skip_tokens=skip_tokens)
        metadata = replace(metadata, chunks=None)
        rows = None
        if indices is not None:
            rows, metadata = metadata.select(indices)
        picked = slice(None) if rows is None else torch.arange(sum(LENGTHS))[rows]
        attention = attention_weights[picked] if pooler.needs_attention(metadata.params) else None
        return pooler.pool(ModelOutput(hidden_states=hidden_states[picked], attention_weights=attention), metadata)

    return run
