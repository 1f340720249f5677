"""Pooler heads give the results of the same steps in torch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
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


def test_dense_modules_run_before_the_cut() -> None:
    torch.manual_seed(1)
    chain = [torch.nn.Linear(24, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10, bias=False)]
    with torch.no_grad():
        values, _ = EmbeddingPoolerHead(OPS, chain)(
            rows().bfloat16(), [PoolingParams(dimensions=4, normalize=True)] * 6
        )
        expected = torch.nn.Sequential(*chain)(rows().bfloat16().float())[:, :4]
    close(values, F.normalize(expected, dim=1))


def test_token_rows_take_the_params_of_their_sequence() -> None:
    params = [PoolingParams(dimensions=3, normalize=True), PoolingParams(normalize=False)]
    values, widths = EmbeddingPoolerHead(OPS)(rows(), params, (2, 4))
    assert widths == (3, 24)
    close(values[:2, :3], F.normalize(rows()[:2, :3], dim=1))
    close(values[2:], rows()[2:])
    params = [PoolingParams(dimensions=width, normalize=False) for width in (3, 5)]
    values, widths = EmbeddingPoolerHead(OPS)(rows(), params, (2, 4))
    assert (widths, values.shape) == ((3, 5), (6, 5))
    assert EmbeddingPoolerHead(OPS)(rows(2), params)[0].shape == (2, 5)


@pytest.mark.parametrize("widths", [(32,), (32, 8)])
def test_dimensions_above_the_width_keep_the_width(widths: tuple[int, ...]) -> None:
    """`dimensions` may be above the width of token rows if a model concatenates pooled rows."""
    params = [PoolingParams(dimensions=widths[i % len(widths)], normalize=False) for i in range(6)]
    values, given = EmbeddingPoolerHead(OPS)(rows(), params)
    assert values.shape == (6, 24)
    assert given == (None if len(widths) == 1 else (24, 8, 24, 8, 24, 8))
    close(values[::2], rows()[::2])


def test_results_do_not_share_memory_with_hidden_states() -> None:
    hidden = rows()
    values, _ = EmbeddingPoolerHead(OPS)(hidden, [PoolingParams(normalize=False)] * 6)
    hidden.zero_()
    close(values, rows())


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


def test_heads_compute_on_the_device_of_their_rows() -> None:
    """Operations on the device "meta" fail if a tensor is on another device."""
    hidden = rows().to("meta")
    mixed = [PoolingParams(dimensions=d, normalize=n) for d, n in ((3, True), (5, False))]
    for params, row_lens in ((mixed * 3, None), (mixed, (2, 4)), ([PoolingParams(dimensions=5)] * 6, None)):
        values, _ = EmbeddingPoolerHead(OPS)(hidden, params, row_lens)
        assert (values.device.type, values.shape) == ("meta", (6, 5))
    head = ClassifierPoolerHead(OPS, make_info(ModelKind.SEQUENCE_CLASSIFIER), lambda x: x[:, :5])
    uses = [PoolingParams(use_activation=use) for use in (True, False)]
    scores = head(hidden, uses, (2, 4), (3, 0))
    assert (scores.device.type, scores.shape) == ("meta", (6, 2))
