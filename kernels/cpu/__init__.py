"""Whole encoders and decoders on a CPU, in C: products with packed weights, attention, norms and pooling in one call.

`csrc/` is the C code, `build.py` compiles it, and tests compare it with torch. Imports numpy, but not torch.
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
