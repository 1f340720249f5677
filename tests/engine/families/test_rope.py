"""Rotary tables stay within rounding of transformers' angles up to the last position."""

import numpy as np
import pytest
import torch

from penstock.engine.families.rope import RopeSpec


@pytest.mark.parametrize("theta", [10_000.0, 160_000.0])
@pytest.mark.parametrize("size", [12, 64])
def test_rotary_table_equals_transformers_angles(theta: float, size: int) -> None:
    frequencies = 1.0 / (theta ** (torch.arange(0, size, 2).float() / size))
    angles = torch.arange(8192)[:, None].float() * frequencies
    expected = torch.cat([angles.cos(), angles.sin()], dim=1).numpy()
    table = RopeSpec(theta=theta, size=size).table(8192)
    assert table.dtype == np.float32
    np.testing.assert_allclose(table, expected, rtol=0, atol=1e-6)


def test_rotary_table_is_scaled_by_the_attention_factor() -> None:
    spec = RopeSpec(
        rope_type="yarn", theta=500.0, size=12, max_positions=256, options={"factor": 4.0, "attention_factor": 1.5}
    )
    np.testing.assert_array_equal(spec.table(3)[0], [1.5] * 6 + [0.0] * 6)


def test_long_factors_are_for_texts_above_the_training_length() -> None:
    options = {"original_max_position_embeddings": 64, "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
    spec = RopeSpec(rope_type="longrope", theta=500.0, size=4, max_positions=256, options=options)
    frequencies = {length: spec.frequencies(spec.stage(length))[0].tolist() for length in (1, 64, 65, 256)}
    assert frequencies[1] == frequencies[64] == spec.frequencies(64)[0].tolist()
    assert frequencies[65] == frequencies[256] == spec.frequencies(65)[0].tolist()
