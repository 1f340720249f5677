"""How much faster than float32 a processor multiplies in bfloat16: measured, in a few milliseconds.

Its flags say whether it can, not whether that is worth it: some run the instruction at half the speed of float32, some
at twice that.
"""

from __future__ import annotations

import math
import time
from typing import Final, NamedTuple

import numpy as np

from penstock.kernels.cpu import Format, Machine

# A short text, where reading the weights counts, and a batch, where it does not.
_ROWS: Final = (8, 96)
# Of the product that is measured: as bfloat16 they lie in the second cache, beside what else is there.
_WEIGHTS: Final = 2**18
_LEAST_WIDTH: Final = 64
_ROUNDS: Final = 5


class Bfloat16Gain(NamedTuple):
    """How many times as fast products are in bfloat16.

    Attributes:
        over_float32: As those with float32 weights.
        over_widened: As those with bfloat16 weights that are widened to float32.
    """

    over_float32: float
    over_widened: float


def bfloat16_gain(machine: Machine, width: int) -> Bfloat16Gain | None:
    """Measures products of a model's width, on one core, with few rows and with many, which count alike.

    Args:
        machine: The native kernels.
        width: Of the model.

    Returns:
        None where the processor has no products in bfloat16.
    """
    if Format.DOT not in machine.formats:
        return None
    width = max(width + width % 2, _LEAST_WIDTH)
    numbers = np.random.default_rng(0)
    weights = numbers.random((_WEIGHTS // width, width), np.float32)
    products = {form: machine.pack(weights, None, form) for form in (Format.F32, Format.BF16, Format.DOT)}
    logs = dict.fromkeys(products, 0.0)
    for num_rows in _ROWS:
        rows = numbers.random((num_rows, width), np.float32)
        least = dict.fromkeys(products, math.inf)
        for _ in range(_ROUNDS):
            for form, product in products.items():
                began_s = time.thread_time()  # the processor may have other work
                machine.product(product, rows)
                least[form] = min(least[form], time.thread_time() - began_s)
        for form, seconds in least.items():
            logs[form] += math.log(seconds) / len(_ROWS)
    return Bfloat16Gain(
        over_float32=math.exp(logs[Format.F32] - logs[Format.DOT]),
        over_widened=math.exp(logs[Format.BF16] - logs[Format.DOT]),
    )
