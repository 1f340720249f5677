"""Position buckets of MPNet equal those of transformers."""

import numpy as np
import torch
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from penstock.engine.families.mpnet import distance_buckets


def test_buckets_of_all_distances_equal_transformers() -> None:
    ahead = np.arange(-9000, 9001)
    expected = MPNetEncoder.relative_position_bucket(torch.from_numpy(ahead), num_buckets=32, max_distance=128)
    assert np.array_equal(distance_buckets(ahead), expected.numpy())
