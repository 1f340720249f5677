"""Pooler heads give the results of the same steps in torch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.pooling import ClassifierPoolerHead, EmbeddingPoolerHead
from penstock.engine.pooling.tensor_ops import TensorOps
from penstock.engine.protocol.model_info import Activation, ModelKind
from penstock.engine.protocol.params import PoolingParams

from .conftest import make_info

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
