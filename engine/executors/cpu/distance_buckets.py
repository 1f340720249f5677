"""The buckets of distances in MPNet, which are T5's (Raffel et al., arXiv 1910.10683)."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

# transformers takes these from no configuration.
_NUM_BUCKETS: Final = 32
_MAX_DISTANCE: Final = 128


def distance_buckets(ahead: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the bucket, int64, of each distance from a query to a key that lies so many tokens ahead.

    Half of the buckets are for keys after the query. In each half, near distances have one bucket each and far ones
    share buckets that grow with the logarithm, up to _MAX_DISTANCE.
    """
    half = _NUM_BUCKETS // 2
    num_exact = half // 2
    magnitude = np.abs(ahead)
    # In float32, as transformers does; where a bucket begins it matters. Distance 0 is left out by the `where`.
    logarithm = np.log(np.maximum(magnitude, 1) / num_exact).astype(np.float32)
    growth = logarithm / np.float32(math.log(_MAX_DISTANCE / num_exact))
    far = num_exact + (np.maximum(growth, 0) * (half - num_exact)).astype(np.int64)
    buckets: NDArray[np.int64] = np.where(magnitude < num_exact, magnitude, np.minimum(far, half - 1))
    return buckets + (ahead > 0) * half
