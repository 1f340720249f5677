"""Parameters that the tests of several kernels share."""

import pytest

from .cases import DTYPES

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
states = pytest.mark.parametrize("has_states", [False, True], ids=["zeros", "states"])
