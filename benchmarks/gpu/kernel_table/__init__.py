"""Kernels with inputs for tests and measurements. Add a kernel as a function in this package and a line in KERNELS.

Sizes come in pairs: small ones to compare a kernel with its reference, and large ones to time it. The reference is too
slow, or needs too much memory, for large sizes. Shape letters: T rows, D width, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from .heads import packed_attention, paged_attention, turning, turning_and_storing
from .recurrent import convolution, duality, mamba_scan
from .rows import embedding, experts, gate, gate_and_norm, late_interaction, pooling, sum_and_norm
from .work import Groups, Heads, Inputs, Packed, States, Work

__all__ = ["KERNELS", "Heads", "Inputs", "Kernel", "Work", "packed_attention"]

Make = Callable[[Inputs, Any], Work]


class Kernel(NamedTuple):
    """A line of the table.

    Attributes:
        make: Makes inputs of a size, and the call.
        compared: The size at which it is compared with its reference.
        timed: The size at which it is timed.
        tiny: Replaces both sizes when only the code is tested.
        tolerance: Largest error in bfloat16, of the largest value of the reference.
    """

    make: Make
    compared: Any
    timed: Any
    tiny: Any
    tolerance: float = 1e-2


ODD: Final = (1, 300, 3, 257, 64, 65, 0, 130)

_WIDE: Final = Packed((512,) * 128, 1024)
"""64k tokens of bge-large: the size that the goal of bandwidth is stated for."""

KERNELS: Final = {
    "pooling mean": Kernel(partial(pooling, "mean"), Packed(ODD, 1000), _WIDE, Packed((3, 9), 8)),
    "pooling max": Kernel(partial(pooling, "max"), Packed(ODD, 1000), _WIDE, Packed((3, 9), 8)),
    "pooling mean, short": Kernel(
        partial(pooling, "mean"), Packed((7,) * 99, 384), Packed((16,) * 4096, 384), Packed((3, 9), 8)
    ),
    "pooling mean, one long": Kernel(
        partial(pooling, "mean"), Packed((5000,), 1024), Packed((65_536,), 1024), Packed((300,), 8)
    ),
    "pooling cls": Kernel(partial(pooling, "cls"), Packed(ODD, 1000), _WIDE, Packed((3, 9), 8)),
    "sum and layer norm": Kernel(partial(sum_and_norm, "layer"), Packed(ODD, 1000), _WIDE, Packed((3, 9), 8)),
    "sum and RMS norm": Kernel(partial(sum_and_norm, "rms"), Packed(ODD, 1000), _WIDE, Packed((3, 9), 8)),
    "embedding": Kernel(embedding, Packed(ODD, 1000), _WIDE, Packed((3, 9), 8)),
    "gate, silu": Kernel(partial(gate, "silu"), Packed(ODD, 1000), Packed((512,) * 32, 3072), Packed((3, 9), 8)),
    "gate, gelu": Kernel(partial(gate, "gelu"), Packed(ODD, 1000), Packed((512,) * 32, 1152), Packed((3, 9), 8)),
    "gate and norm": Kernel(
        partial(gate_and_norm, 1), Packed(ODD, 1000), Packed((512,) * 32, 1536), Packed((3, 9), 16)
    ),
    "gate and norm of groups": Kernel(
        partial(gate_and_norm, 8), Packed(ODD, 1000), Packed((512,) * 32, 8192), Packed((3, 9), 16)
    ),
    "attention": Kernel(partial(packed_attention, None), Heads(ODD), Heads((512,) * 32), Heads((3, 9), 2, 2, 16), 3e-2),
    "attention, grouped heads": Kernel(
        partial(packed_attention, None),
        Heads(ODD, 8, 2, 128),
        Heads((512,) * 32, 16, 8, 128),
        Heads((9,), 4, 2, 16),
        3e-2,
    ),
    "attention, capped": Kernel(
        partial(packed_attention, 50.0), Heads(ODD, 8, 4), Heads((512,) * 32, 8, 4, 128), Heads((9,), 4, 2, 16), 3e-2
    ),
    "attention, biased": Kernel(
        partial(packed_attention, None, has_bias=True), Heads(ODD), Heads((512,) * 32), Heads((3, 9), 2, 2, 16), 3e-2
    ),
    "attention, paged": Kernel(
        paged_attention,
        Heads((70, 1, 130), 8, 2, 128, 300),
        Heads((512,) * 4, 16, 8, 128, 8192),
        Heads((3, 9), 4, 2, 16, 20),
        3e-2,
    ),
    "rotary": Kernel(turning, Heads(ODD), Heads((512,) * 32), Heads((3, 9), 2, 2, 16)),
    "rotary, norm and store": Kernel(
        turning_and_storing, Heads(ODD, 8, 2, 128), Heads((512,) * 32, 16, 8, 128), Heads((3, 9), 4, 2, 16)
    ),
    "causal_conv1d": Kernel(convolution, Packed(ODD, 1000), Packed((512,) * 32, 3328), Packed((3, 9), 8)),
    "selective_scan": Kernel(mamba_scan, Packed(ODD, 200), Packed((512,) * 32, 1536), Packed((3, 9), 8)),
    "ssd": Kernel(duality, States(ODD, 6, 64, 128), States((512,) * 32, 24, 64, 128), States((3, 9), 2, 16, 16)),
    "grouped_linear": Kernel(
        experts, Groups(ODD, 200, 312), Groups((1024,) * 16, 1024, 4096), Groups((3, 0, 9), 16, 24)
    ),
    "maxsim": Kernel(late_interaction, Packed(ODD, 128), Packed((180,) * 1000, 128), Packed((3, 9), 16), 1e-5),
}
