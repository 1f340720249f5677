"""The pooler over numpy arrays gives the results of the pooler over tensors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.executors.cpu.array_encoder import ArrayOutput
from penstock.engine.executors.torch.packed_batch import ModelOutput
from penstock.engine.pooling import ModelPooler
from penstock.engine.pooling.array_ops import ArrayOps
from penstock.engine.pooling.tensor_ops import tensor_pooler
from penstock.engine.protocol.model_info import Activation, ModelInfo, ModelKind
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingTask, PoolingType

from .chunking import mixed_params
from .conftest import LENGTHS, SEQUENCE_TYPES, TinyModel, assert_same, make_info, make_metadata, resolved

SKIP_TOKENS = torch.tensor([0, 1, 3, 0, 2, 29], dtype=torch.int32)


@pytest.fixture
def compare(array_ops: ArrayOps, hidden_states: Tensor, attention_weights: Tensor, token_ids: Tensor) -> Any:
    """Pools LENGTHS as arrays and as tensors and compares the results."""

    def run(info: ModelInfo, params: Sequence[PoolingParams], skip_tokens: Tensor | None = None) -> None:
        model = TinyModel()

        def classify(rows: NDArray[np.float32]) -> NDArray[np.float32]:
            # torch multiplies for both poolers: BLAS libraries round differently.
            return (torch.from_numpy(rows) @ model.weight.T).numpy()

        pooler = ModelPooler(info, array_ops, classify, classify)
        metadata = make_metadata(LENGTHS, params, token_ids=token_ids, skip_tokens=skip_tokens)
        arrays = pooler.pool(ArrayOutput(hidden_states.numpy(), attention_weights.numpy()), metadata).to_numpy()
        output = ModelOutput(hidden_states=hidden_states, attention_weights=attention_weights)
        assert_same(arrays, tensor_pooler(info, model).pool(output, metadata).to_numpy())

    return run


@pytest.mark.parametrize("types", [*((t,) for t in SEQUENCE_TYPES), (PoolingType.CLS, PoolingType.MEAN)], ids=str)
@pytest.mark.parametrize("skip_tokens", [None, SKIP_TOKENS], ids=["", "skip"])
def test_array_embeddings_equal_tensor_embeddings(
    types: tuple[PoolingType, ...], skip_tokens: Tensor | None, compare: Any
) -> None:
    info = make_info(sequence_pooling=types)
    compare(info, [resolved(info, PoolingTask.EMBED)] * len(LENGTHS), skip_tokens)
    compare(info, mixed_params(info), skip_tokens)


@pytest.mark.parametrize("activation", Activation)
def test_array_class_scores_equal_tensor_scores(activation: Activation, compare: Any) -> None:
    info = make_info(ModelKind.CROSS_ENCODER, activation=activation, logit_mean=0.5, logit_sigma=2.0)
    tasks = [PoolingTask.CLASSIFY, PoolingTask.SCORE] * 3
    compare(info, [resolved(info, task, use_activation=i % 3 == 0) for i, task in enumerate(tasks)])
    compare(info, [resolved(info, PoolingTask.SCORE)] * len(LENGTHS))


@pytest.mark.parametrize("pooling_type", [PoolingType.ALL, PoolingType.STEP])
def test_array_token_scores_equal_tensor_scores(pooling_type: PoolingType, compare: Any) -> None:
    info = make_info(ModelKind.TOKEN_CLASSIFIER, sequence_pooling=(), token_pooling=pooling_type)
    options: list[dict[str, Any]] = [{}, {"use_activation": False}] * 3
    if pooling_type is PoolingType.STEP:
        options = [{"step_tag_id": 3}, {}, {"step_tag_id": 3, "returned_token_ids": (4, 1)}] * 2
    compare(info, [resolved(info, PoolingTask.TOKEN_CLASSIFY, **fields) for fields in options])


def test_rows_of_a_caller_become_contiguous_float32(array_ops: ArrayOps) -> None:
    rows = np.arange(12.0).reshape(3, 4)
    for given in (rows, rows.T, rows[:, ::2], rows.astype(np.float16)):
        found = array_ops.rows_of(given)
        assert (found.dtype, found.flags.c_contiguous) == (np.float32, True)
        np.testing.assert_array_equal(found, given)
    integers = np.arange(4)
    assert array_ops.rows_of(integers) is integers, "the caller rejects them"
