"""Kernels name an invalid argument in the message. Every row of cases.json breaks one condition."""

import re
from typing import Any

import pytest
import torch

from penstock.kernels.attention import attention, attention_paged
from penstock.kernels.causal_conv1d import causal_conv1d
from penstock.kernels.gated import gated, gated_norm
from penstock.kernels.grouped_linear import grouped_linear
from penstock.kernels.maxsim import maxsim
from penstock.kernels.norm import Embeddings, Norm, add_norm, embed_norm
from penstock.kernels.pooling import pool
from penstock.kernels.rotary import HeadNorm, KvDestination, rotary
from penstock.kernels.selective_scan import selective_scan
from penstock.kernels.ssd import ssd

from ..tables import table

KERNELS = (attention, attention_paged, gated, gated_norm, grouped_linear, maxsim, add_norm, embed_norm, pool, rotary)
FUNCTIONS: dict[str, Any] = {kernel.__name__: kernel for kernel in (*KERNELS, causal_conv1d, selective_scan, ssd)}
TUPLES: dict[str, Any] = {kind.__name__: kind for kind in (Embeddings, HeadNorm, KvDestination, Norm)}
ARGUMENTS = table(__file__, "arguments")
TYPE = re.compile(r"(bool|b?float\d+|int\d+)(\[.*])?(.*)")


def value_of(value: Any) -> Any:
    """Returns an argument. "int64[3, 8]" is a tensor of ones, {"int64": [3, 8]} one of two numbers."""
    if isinstance(value, list):
        return tuple(map(value_of, value))
    if isinstance(value, dict):
        [(name, fields)] = value.items()
        return TUPLES[name](*map(value_of, fields)) if name in TUPLES else torch.tensor(fields, dtype=value_of(name))
    if not isinstance(value, str) or not (found := TYPE.fullmatch(value)):
        return value
    dtype, shape, kind = getattr(torch, found[1]), found[2], found[3]
    if shape is None:
        return dtype
    ones = torch.ones(*map(int, shape[1:-1].split(", ")), dtype=dtype, device="meta" if kind == " on meta" else "cpu")
    return torch.stack((ones, ones), -1)[..., 0] if kind == " with gaps" else ones


@pytest.mark.parametrize("name", ARGUMENTS)
def test_valid_arguments_are_accepted(name: str) -> None:
    for changes in ARGUMENTS[name]["accepted"]:
        FUNCTIONS[name](**{key: value_of(value) for key, value in (ARGUMENTS[name]["valid"] | changes).items()})


@pytest.mark.parametrize(
    ("name", "changes", "message"), [(name, *row) for name, rows in ARGUMENTS.items() for row in rows["refused"]]
)
def test_invalid_argument_is_named(name: str, changes: dict[str, Any], message: str) -> None:
    arguments = {key: value_of(value) for key, value in (ARGUMENTS[name]["valid"] | changes).items()}
    with pytest.raises(ValueError, match=re.escape(message)):
        FUNCTIONS[name](**arguments)
