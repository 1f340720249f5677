"""Sparse vectors against plain loops: of logits over the vocabulary and of token weights, in blocks of any size."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.engine.executors.torch.base import ModelOutput
from penstock.engine.pooling import TokenMaps, sparse
from penstock.engine.pooling.array_ops import ArrayOps
from penstock.engine.pooling.heads import RowOps
from penstock.engine.pooling.sparse import SparsePooler
from penstock.engine.pooling.tensor_ops import TensorOps, tensor_pooler
from penstock.engine.protocol.multi_vector import SparseKind, SparsePooling, SparseVector
from penstock.engine.protocol.tasks import PoolingTask
from penstock.kernels.cpu import shared_machine

from .conftest import HIDDEN_SIZE, LENGTHS, TinyModel, describe, make_info, resolved

VOCAB_SIZE = 11
UNWEIGHTED_IDS = (3, 7)
BY_SPLADE = SparsePooling(kind=SparseKind.VOCABULARY_LOGITS)
BY_TOKEN = SparsePooling(kind=SparseKind.TOKEN_WEIGHTS)


def projection(width: int) -> Tensor:
    return torch.randn(HIDDEN_SIZE, width, generator=torch.Generator().manual_seed(6))


def to_logits(rows: Tensor) -> Tensor:
    return rows.float() @ projection(VOCAB_SIZE) - 4.0


def to_weights(rows: Tensor) -> Tensor:
    return rows @ projection(1)


@dataclasses.dataclass
class Kind:
    """Rows as tensors or as arrays."""

    ops: RowOps[Any]

    def of(self, rows: Tensor) -> Any:
        return rows if isinstance(self.ops, TensorOps) else rows.numpy()

    def head(self, to_rows: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
        return lambda rows: self.of(to_rows(torch.as_tensor(rows)))

    def pooler(self, recipe: SparsePooling, head: Callable[[Tensor], Tensor], **options: Any) -> SparsePooler[Any]:
        return SparsePooler(self.ops, recipe, self.head(head), VOCAB_SIZE, **{"block_rows": 512, **options})


@pytest.fixture(params=["tensors", "arrays"])
def kind(request: pytest.FixtureRequest) -> Kind:
    machine = shared_machine()
    if request.param == "arrays" and machine is None:
        pytest.skip("the C library is not built")
    return Kind(TensorOps() if request.param == "tensors" else ArrayOps(machine))


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


def of_logits(rows: Tensor, recipe: SparsePooling) -> dict[int, float]:
    vector = {}
    for token, column in enumerate(to_logits(rows).T.tolist()):
        weights = [math.log1p(max(logit, 0.0)) for logit in column]
        weights = [math.log1p(weight) for weight in weights] if recipe.log_twice else weights
        weight = sum(weights) if recipe.is_sum else max(weights, default=0.0)
        if weight:
            vector[token] = weight
    return vector


@pytest.mark.parametrize("block_rows", [1, 4, 5, 31, 512])
@pytest.mark.parametrize("is_sum", [False, True], ids=["max", "sum"])
@pytest.mark.parametrize("log_twice", [False, True], ids=["", "twice"])
@pytest.mark.parametrize("max_seqs", [0, 2, 100])
def test_logits_over_the_vocabulary(
    hidden_states: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind,
    block_rows: int,
    is_sum: bool,
    log_twice: bool,
    max_seqs: int,
) -> None:
    monkeypatch.setattr(sparse, "_MAX_VALUES", max_seqs * VOCAB_SIZE)
    recipe = SparsePooling(kind=SparseKind.VOCABULARY_LOGITS, is_sum=is_sum, log_twice=log_twice)
    sizes: list[int] = []

    def head(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return to_logits(rows)

    pooler = kind.pooler(recipe, head, block_rows=block_rows)
    pairs, counts = pooler.pool(kind.of(hidden_states), describe(LENGTHS))
    check(vectors_of(pairs, counts), [of_logits(rows, recipe) for rows in hidden_states.split(LENGTHS)])
    assert sum(sizes) == len(hidden_states)
    assert max(sizes) <= block_rows


@pytest.mark.parametrize("block_rows", [1, 9, 50, 1 << 20])
@pytest.mark.parametrize("width", [4, 11, 64])
@pytest.mark.parametrize("is_sum", [False, True], ids=["max", "sum"])
@pytest.mark.parametrize("lengths", [LENGTHS, (0, 50, 0, 0, 58, 0)], ids=["texts", "with_empty"])
def test_blocks_and_stripes_change_nothing(
    hidden_states: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind,
    lengths: tuple[int, ...],
    is_sum: bool,
    width: int,
    block_rows: int,
) -> None:
    """Blocks that end within a text, and columns that a program of the kernel can hold."""
    recipe = SparsePooling(kind=SparseKind.VOCABULARY_LOGITS, is_sum=is_sum)
    pooler, whole = kind.pooler(recipe, to_logits, block_rows=block_rows), kind.pooler(recipe, to_logits)
    bounds, rows = np.array([0, *np.cumsum(lengths)]), kind.of(hidden_states)
    for part in (bounds, bounds[1:5], bounds[2:3].repeat(2)):
        expected = whole._pool_logits(rows, part)
        with monkeypatch.context() as patch:
            patch.setattr(sparse, "_STRIPE", width)
            actual = pooler._pool_logits(rows, part)
        torch.testing.assert_close(torch.as_tensor(actual), torch.as_tensor(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("padding", [1, 5, 53])
@pytest.mark.parametrize("width", [4, 8, 64])
@pytest.mark.parametrize("is_sum", [False, True], ids=["max", "sum"])
def test_columns_beyond_the_vocabulary_are_left_out(
    hidden_states: Tensor, monkeypatch: pytest.MonkeyPatch, kind: Kind, is_sum: bool, width: int, padding: int
) -> None:
    """The head of a GPU pads its rows. Large values there would be seen."""
    monkeypatch.setattr(sparse, "_STRIPE", width)
    recipe, bounds = SparsePooling(kind=SparseKind.VOCABULARY_LOGITS, is_sum=is_sum), np.array([0, *np.cumsum(LENGTHS)])

    def padded(rows: Tensor) -> Tensor:
        return torch.nn.functional.pad(to_logits(rows), (0, padding), value=1e3)

    rows = kind.of(hidden_states)
    actual = kind.pooler(recipe, padded)._pool_logits(rows, bounds)
    expected = kind.pooler(recipe, to_logits)._pool_logits(rows, bounds)
    torch.testing.assert_close(torch.as_tensor(actual), torch.as_tensor(expected), atol=0, rtol=0)


def test_a_sequence_without_rows_has_no_entries(hidden_states: Tensor, kind: Kind) -> None:
    lengths = (3, 0, 2)
    pairs, counts = kind.pooler(BY_SPLADE, to_logits).pool(kind.of(hidden_states[:5]), describe(lengths))
    check(vectors_of(pairs, counts), [of_logits(rows, BY_SPLADE) for rows in hidden_states[:5].split(lengths)])


def of_weights(rows: Tensor, ids: Tensor) -> dict[int, float]:
    vector: dict[int, float] = {}
    for token, weight in zip(ids.tolist(), to_weights(rows)[:, 0].tolist(), strict=True):
        if weight > 0 and token not in UNWEIGHTED_IDS:
            vector[token] = max(weight, vector.get(token, 0.0))
    return vector


def test_the_largest_weight_of_each_token_counts(hidden_states: Tensor, kind: Kind) -> None:
    ids = torch.randint(0, VOCAB_SIZE, (len(hidden_states),), generator=torch.Generator().manual_seed(2))
    pooler = kind.pooler(BY_TOKEN, to_weights, unweighted_ids=UNWEIGHTED_IDS)
    pairs, counts = pooler.pool(kind.of(hidden_states), describe(LENGTHS, token_ids=ids))
    expected = [
        of_weights(rows, own) for rows, own in zip(hidden_states.split(LENGTHS), ids.split(LENGTHS), strict=True)
    ]
    check(vectors_of(pairs, counts), expected)
    with pytest.raises(ValueError, match="need the token ids of the batch"):
        pooler.pool(kind.of(hidden_states), describe(LENGTHS))


@pytest.mark.parametrize("recipe", [BY_SPLADE, BY_TOKEN], ids=["logits", "weights"])
def test_a_model_takes_the_head_of_its_recipe(recipe: SparsePooling, hidden_states: Tensor, token_ids: Tensor) -> None:
    tasks = (PoolingTask.SPARSE_EMBED, PoolingTask.EMBED)
    info = make_info(sparse=recipe, tasks=tasks, vocab_size=VOCAB_SIZE)
    model = TinyModel()
    model.vocabulary_head = to_logits  # type: ignore[assignment]
    ids = token_ids % VOCAB_SIZE
    pooler = tensor_pooler(info, model, maps=TokenMaps(weights=to_weights, unweighted_ids=UNWEIGHTED_IDS))
    params = [resolved(info, PoolingTask.SPARSE_EMBED), resolved(info, PoolingTask.EMBED)] * (len(LENGTHS) // 2)
    output = pooler.pool(ModelOutput(hidden_states=hidden_states), describe(LENGTHS, params, token_ids=ids)).to_numpy()
    parts = zip(hidden_states.split(LENGTHS), ids.split(LENGTHS), output, strict=True)
    for n, (rows, own_ids, arrays) in enumerate(parts):
        assert sorted(arrays) == (["embedding"] if n % 2 else ["sparse"])
        if not n % 2:
            expected = of_logits(rows, recipe) if recipe is BY_SPLADE else of_weights(rows, own_ids)
            pairs = torch.from_numpy(arrays["sparse"])
            check(vectors_of(pairs, [len(pairs)]), [expected])
