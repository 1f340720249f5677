"""Encoders and decoders on a CPU in C: a whole forward (products, attention, norms) is one call. Pooling is another.

`csrc/` is the C code, `build.py` compiles it. Imports numpy, but not torch. Tests compare the results with torch.
"""

from .encoder import CpuEncoder, CpuForward
from .machine import Activation, CpuKernelError, Format, Machine, Pooling, multiplies_right, shared_machine
from .pages import Pages, Past
from .specs import EncoderSpec, LayerSpec, MapSpec, NormSpec

__all__ = [
    "Activation",
    "CpuEncoder",
    "CpuForward",
    "CpuKernelError",
    "EncoderSpec",
    "Format",
    "LayerSpec",
    "Machine",
    "MapSpec",
    "NormSpec",
    "Pages",
    "Past",
    "Pooling",
    "multiplies_right",
    "shared_machine",
]
