"""Estimated sizes of responses."""

import numpy as np

from penstock.engine.protocol.multi_vector import SparseVector
from penstock.server.response_size import size_beyond_expected, size_of_sparse


def test_sparse_vectors_take_36_bytes_per_entry() -> None:
    assert size_of_sparse(2) == (2 * 512 * 36, 2 * 512 * 8)
    vectors = [SparseVector(np.arange(n, dtype=np.int32), np.ones(n, np.float32)) for n in (600, 500)]
    assert size_beyond_expected(vectors) == (76 * 36, 76 * 8)
    assert size_beyond_expected(vectors[1:]) == (0, 0)
