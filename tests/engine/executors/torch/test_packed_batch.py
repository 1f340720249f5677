"""Tensors that are copied in one buffer keep dtype, shape, bits and alignment; groups of masked tokens."""

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.engine.executors.torch.packed_batch import MaskedTokens, packed, views

CPU = torch.device("cpu")


def mixed(seed: int) -> list[Tensor]:
    """Tensors of every dtype of a batch: odd sizes, one is empty, one is not contiguous."""
    torch.manual_seed(seed)
    return [
        torch.randint(0, 30_000, (seed + 1,)),
        torch.arange(2 * seed + 1, dtype=torch.int32),
        torch.zeros(0, 3, dtype=torch.int32),
        torch.rand(3, seed + 5).t(),
        torch.rand(2, 7) > 0.5,
        torch.tensor([torch.nan, torch.inf, -0.0]),
        torch.tensor(True),
    ]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("seed", [0, 31, 33])
def test_views_of_packed_buffer_equal_tensors(seed: int) -> None:
    tensors = mixed(seed)
    buffer = packed(tensors)
    for view, tensor in zip(views(buffer, tensors), tensors, strict=True):
        assert (view.dtype, view.shape) == (tensor.dtype, tensor.shape)
        assert view.is_contiguous()
        assert bits(view) == bits(tensor)
        assert not tensor.numel() or (view.data_ptr() - buffer.data_ptr()) % 256 == 0
    assert packed([]).shape == (0,)


def test_sequences_with_masked_tokens_are_grouped_by_length() -> None:
    groups = MaskedTokens.of(np.array([3, 2, 3, 2, 3], np.int32), np.array([1, 0, 0, 1, 2], np.int32))
    assert [group.rows.tolist() for group in groups] == [[[8, 9]], [[0, 1, 2], [10, 11, 12]]]
    visible = [[[True, False]], [[True, True, False], [True, False, False]]]
    assert [group.is_visible.tolist() for group in groups] == visible
