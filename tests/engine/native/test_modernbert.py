"""The rotary tables stay within the rounding of transformers' angles, to the last position of a long model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.engine.layers.attention.rotary import RopeSpec
from penstock.engine.native.modernbert import rotary_table


@pytest.mark.parametrize("theta", [10_000.0, 160_000.0])
@pytest.mark.parametrize("head_size", [12, 64])
def test_rotary_tables(theta: float, head_size: int) -> None:
    frequencies, _ = RopeSpec(theta=theta, size=head_size).frequencies()
    angles = torch.arange(8192)[:, None].float() * frequencies
    expected = torch.cat([angles.cos(), angles.sin()], dim=1).numpy()
    table = rotary_table(theta, head_size, 8192)
    assert table.dtype == np.float32
    np.testing.assert_allclose(table, expected, rtol=0, atol=1e-6)
