"""How far the elementwise work of a model goes into other kernels: chosen once, when its layers are made."""

from __future__ import annotations

from enum import Enum
from importlib.util import find_spec

import torch


class Fusion(Enum):
    """What runs together on a GPU. On a CPU products take what follows them inside anyway (see linear.py).

    Members:
        NONE: Every operation is a kernel of torch's by itself.
        EPILOGUE: GELU is part of the product before it, in 16 bits.
        FUSED: So it is, and sums are part of the norms that follow, look-ups of embeddings of theirs, and the
            activation of a gate of its product; heads are normed, turned and stored at once.
    """

    NONE = "none"
    EPILOGUE = "epilogue"
    FUSED = "fused"

    @classmethod
    def of_device(cls, device: torch.device) -> Fusion:
        """Returns what models take on this device. The kernels are made for compute capability 8.0 and later."""
        if device.type != "cuda":
            return cls.NONE
        is_made_for = find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)
        return cls.FUSED if is_made_for else cls.EPILOGUE
