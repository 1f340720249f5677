"""Whether a machine multiplies right: for instruction sets that no test has run on the processor itself."""

from __future__ import annotations

from typing import Final

import numpy as np

from .machine import Machine

_ROWS: Final = (1, 16, 17, 45)
# Inputs and outputs that fill neither the last tile nor the last panel.
_SHAPES: Final = ((76, 45), (128, 64))


def multiplies_right(machine: Machine) -> bool:
    """Whether products of whole numbers are right to the last bit, in every format; takes a few milliseconds.

    Their sums are below 2^24 and the largest of each row and column is 127, so that no format has anything to round.
    """
    numbers = np.random.default_rng(0)
    for num_in, num_out in _SHAPES:
        weight_ND = numbers.integers(-127, 128, (num_out, num_in))
        weight_ND[:, 0] = 127
        for form in machine.formats:
            packed = machine.pack(weight_ND.astype(np.float32), None, form)
            for num_rows in _ROWS:
                x_RD = numbers.integers(-127, 128, (num_rows, num_in))
                x_RD[:, -1] = -127
                if not np.array_equal(machine.product(packed, x_RD.astype(np.float32)), x_RD @ weight_ND.T):
                    return False
    return True
