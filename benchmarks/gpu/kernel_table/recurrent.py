"""Kernels that go along time: convolution, the scans of Mamba and Mamba-2."""

from __future__ import annotations

from functools import partial

from penstock.kernels.causal_conv1d import causal_conv1d
from penstock.kernels.selective_scan import selective_scan
from penstock.kernels.ssd import ssd

from .work import Inputs, Packed, States, Work


def convolution(inputs: Inputs, size: Packed) -> Work:
    """Convolves along time."""
    x, weight, bias = (
        inputs.normal(sum(size.lengths), size.width),
        inputs.normal(size.width, 4),
        inputs.normal(size.width),
    )
    call = partial(causal_conv1d, x, weight, bias, inputs.borders(size.lengths), size.lengths, activation="silu")
    return Work(call, 2 * x.nbytes)


def mamba_scan(inputs: Inputs, size: Packed) -> Work:
    """Runs the recurrence of Mamba, with 16 states a channel."""
    tokens, states = sum(size.lengths), 16
    x, (b, c) = inputs.normal(tokens, size.width), inputs.normal(tokens, 2 * states).chunk(2, dim=1)
    dt, a = 0.1 * inputs.uniform(tokens, size.width), -16 * inputs.uniform(size.width, states)
    call = partial(selective_scan, x, dt, a, b, c, inputs.borders(size.lengths), size.lengths)
    return Work(call, 2 * x.nbytes + dt.nbytes + 2 * tokens * states * x.itemsize)


def duality(inputs: Inputs, size: States) -> Work:
    """Runs the recurrence of Mamba-2, with one group."""
    tokens, inner = sum(size.lengths), size.heads * size.size
    xbc = inputs.normal(tokens, inner + 2 * size.state)
    x, b, c = xbc.split([inner, size.state, size.state], dim=1)
    dt, a = 0.1 * inputs.uniform(tokens, size.heads), -16 * inputs.uniform(size.heads)
    borders = inputs.borders(size.lengths)
    call = partial(ssd, x.unflatten(1, (size.heads, size.size)), dt, a, b[:, None], c[:, None], borders, size.lengths)
    return Work(call, xbc.nbytes + tokens * inner * x.itemsize + dt.nbytes)
