"""Where the tests of kernels with a triton path run."""

import pytest

from ..interpreter import IS_INTERPRETED

# triton without a GPU only where its interpreter is on: see interpreter.py.
interpreted_only = pytest.mark.skipif(not IS_INTERPRETED, reason="needs a GPU, or TRITON_INTERPRET=1 from the start")

PLACES = (
    ("torch", "cpu"),
    pytest.param(("triton", "cpu"), marks=interpreted_only),
    pytest.param(("torch", "cuda"), marks=pytest.mark.gpu),
    pytest.param(("triton", "cuda"), marks=pytest.mark.gpu),
)
