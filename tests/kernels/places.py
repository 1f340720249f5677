"""Where the tests of kernels with a triton path run."""

import os

import pytest

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# triton without a GPU only where its interpreter is on: see test_ssm_interpreted.
interpreted_only = pytest.mark.skipif(not IS_INTERPRETED, reason="needs a GPU, or TRITON_INTERPRET=1 from the start")

PLACES = (
    ("torch", "cpu"),
    pytest.param(("triton", "cpu"), marks=interpreted_only),
    pytest.param(("torch", "cuda"), marks=pytest.mark.gpu),
    pytest.param(("triton", "cuda"), marks=pytest.mark.gpu),
)
