"""Pooler heads give the results of the same steps in torch."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.engine.pooling import ClassifierPoolerHead, EmbeddingPoolerHead, heads
from penstock.engine.pooling.heads import SparsePooler
from penstock.engine.pooling.row_ops import RowOps
from penstock.engine.pooling.tensor_ops import TensorOps
from penstock.engine.protocol.model_info import Activation, ModelKind
from penstock.engine.protocol.multi_vector import SparseKind, SparsePooling, SparseVector
from penstock.engine.protocol.params import PoolingParams

from ...kernels.parameters import every_pair
from .conftest import HIDDEN_SIZE, LENGTHS, make_info, make_metadata

OPS = TensorOps()


def rows(num_rows: int = 6, width: int = 24) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(num_rows, width)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("widths", [(32,), (32, 8)])
def test_dimensions_above_the_width_keep_the_width(widths: tuple[int, ...]) -> None:
    """`dimensions` may be above the width of token rows if a model concatenates pooled rows."""
    params = [PoolingParams(dimensions=widths[i % len(widths)], normalize=False) for i in range(6)]
    values, given = EmbeddingPoolerHead(OPS)(rows(), params)
    assert values.shape == (6, 24)
    assert given == (None if len(widths) == 1 else (24, 8, 24, 8, 24, 8))
    close(values[::2], rows()[::2])


ACTIVATIONS = {
    Activation.SOFTMAX: lambda x: x.softmax(dim=1),
    Activation.SIGMOID: torch.sigmoid,
    Activation.IDENTITY: lambda x: x,
}


def classifier(num_labels: int = 5, **changes: Any) -> tuple[ClassifierPoolerHead[Tensor], Tensor]:
    torch.manual_seed(3)
    weight = torch.randn(num_labels, 24)
    info = make_info(ModelKind.SEQUENCE_CLASSIFIER, num_labels=num_labels, **changes)
    return ClassifierPoolerHead(OPS, info, lambda x: x.float() @ weight.T), rows() @ weight.T


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("use_activation", [True, False, None])
def test_scores_are_scaled_before_the_activation(activation: Activation, use_activation: bool | None) -> None:
    head, logits = classifier(activation=activation, logit_mean=0.5, logit_sigma=2.0)
    logits = (logits - 0.5) / 2.0
    expected = logits if use_activation is False else ACTIVATIONS[activation](logits)
    close(head(rows(), [PoolingParams(use_activation=use_activation)] * 6), expected)


def test_softmax_of_one_label_is_sigmoid() -> None:
    head, logits = classifier(1, activation=Activation.SOFTMAX)
    close(head(rows(), [PoolingParams()] * 6), logits.sigmoid())


VOCAB_SIZE = 11
UNWEIGHTED_IDS = (3, 7)
BY_TOKEN = SparsePooling(kind=SparseKind.TOKEN_WEIGHTS)


def projection(width: int) -> Tensor:
    return torch.randn(HIDDEN_SIZE, width, generator=torch.Generator().manual_seed(6))


def to_logits(rows: Tensor) -> Tensor:
    return rows.float() @ projection(VOCAB_SIZE) - 4.0


def to_weights(rows: Tensor) -> Tensor:
    return rows @ projection(1)


class Rows:
    """Hidden states and heads as tensors or as arrays."""

    def __init__(self, ops: RowOps[Any]) -> None:
        self.ops = ops

    def of(self, rows: Tensor) -> Any:
        return rows if isinstance(self.ops, TensorOps) else rows.numpy()

    def pooler(self, sparse: SparsePooling, head: Callable[[Tensor], Tensor], **options: Any) -> SparsePooler[Any]:
        def map_rows(rows: Any) -> Any:
            return self.of(head(torch.as_tensor(rows)))

        return SparsePooler(self.ops, sparse, map_rows, VOCAB_SIZE, **{"block_rows": 512, **options})


@pytest.fixture
def kind(ops: RowOps[Any]) -> Rows:
    return Rows(ops)


def vectors_of(pairs: Any, counts: Sequence[int]) -> list[dict[int, float]]:
    pairs = torch.as_tensor(pairs)
    assert sum(counts) == len(pairs)
    parts = [SparseVector.of(part.numpy()) for part in pairs.split(list(counts))]
    assert all((np.diff(part.indices) > 0).all() for part in parts)
    return [dict(zip(part.indices.tolist(), part.values.tolist(), strict=True)) for part in parts]


def check(actual: list[dict[int, float]], expected: list[dict[int, float]]) -> None:
    assert [sorted(vector) for vector in actual] == [sorted(vector) for vector in expected]
    for own, other in zip(actual, expected, strict=True):
        assert own == pytest.approx(other, abs=1e-5)


def of_logits(rows: Tensor, sparse: SparsePooling) -> dict[int, float]:
    vector = {}
    for token, column in enumerate(to_logits(rows).T.tolist()):
        weights = [math.log1p(max(logit, 0.0)) for logit in column]
        weights = [math.log1p(weight) for weight in weights] if sparse.log_twice else weights
        weight = sum(weights) if sparse.is_sum else max(weights, default=0.0)
        if weight:
            vector[token] = weight
    return vector


@every_pair(
    block_rows=[1, 4, 31, 50, 512],
    is_sum=[False, True],
    log_twice=[False, True],
    max_seqs=[0, 2, 100],
    stripe=[4, 11, 64],
    padding=[0, 1, 53],
    lengths=[LENGTHS, (0, 50, 0, 0, 58, 0)],
)
def test_vocabulary_logits_give_the_weights_of_the_formula(
    hidden_states: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    kind: Rows,
    block_rows: int,
    is_sum: bool,
    log_twice: bool,
    max_seqs: int,
    stripe: int,
    padding: int,
    lengths: tuple[int, ...],
) -> None:
    monkeypatch.setattr(heads, "_MAX_VALUES", max_seqs * VOCAB_SIZE)
    monkeypatch.setattr(heads, "_STRIPE", stripe)
    settings = SparsePooling(kind=SparseKind.VOCABULARY_LOGITS, is_sum=is_sum, log_twice=log_twice)
    sizes: list[int] = []

    def head(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        # A head on a GPU pads its columns. Large values in them would show in the result.
        return torch.nn.functional.pad(to_logits(rows), (0, padding), value=1e3)

    pooler = kind.pooler(settings, head, block_rows=block_rows)
    pairs, counts = pooler.pool(kind.of(hidden_states), make_metadata(lengths))
    check(vectors_of(pairs, counts), [of_logits(rows, settings) for rows in hidden_states.split(lengths)])
    assert sum(sizes) == len(hidden_states)
    assert max(sizes) <= block_rows


def of_weights(rows: Tensor, ids: Tensor) -> dict[int, float]:
    vector: dict[int, float] = {}
    for token, weight in zip(ids.tolist(), to_weights(rows)[:, 0].tolist(), strict=True):
        if weight > 0 and token not in UNWEIGHTED_IDS:
            vector[token] = max(weight, vector.get(token, 0.0))
    return vector


def test_largest_weight_of_each_token_is_its_value(hidden_states: Tensor, kind: Rows) -> None:
    ids = torch.randint(0, VOCAB_SIZE, (len(hidden_states),), generator=torch.Generator().manual_seed(2))
    pooler = kind.pooler(BY_TOKEN, to_weights, unweighted_ids=UNWEIGHTED_IDS)
    pairs, counts = pooler.pool(kind.of(hidden_states), make_metadata(LENGTHS, token_ids=ids))
    expected = [
        of_weights(rows, own) for rows, own in zip(hidden_states.split(LENGTHS), ids.split(LENGTHS), strict=True)
    ]
    check(vectors_of(pairs, counts), expected)
    with pytest.raises(ValueError, match="need the token ids of the batch"):
        pooler.pool(kind.of(hidden_states), make_metadata(LENGTHS))
