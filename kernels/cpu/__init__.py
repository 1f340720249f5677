"""Encoders and decoders on a CPU in C: a whole forward (products, attention, norms) is one call. Pooling is another.

`csrc/` is the C code, `build.py` compiles it. Imports numpy, but not torch. Tests compare the results with torch.
"""

from .encoder import CpuEncoder, CpuForward, EncoderInput
from .encoder_weights import (
    ADAPTED_LINEARS,
    AdapterWeights,
    DistanceWeights,
    EncoderWeights,
    LayerWeights,
    LinearWeights,
    LowRankWeights,
    NormWeights,
)
from .kv_cache import BatchBlocks, PagedKvCache
from .library import (
    ActivationCode,
    CpuKernelError,
    CpuLibrary,
    Format,
    OutputRows,
    PoolingCode,
    has_exact_products,
    shared_library,
)

__all__ = [
    "ADAPTED_LINEARS",
    "ActivationCode",
    "AdapterWeights",
    "BatchBlocks",
    "CpuEncoder",
    "CpuForward",
    "CpuKernelError",
    "CpuLibrary",
    "DistanceWeights",
    "EncoderInput",
    "EncoderWeights",
    "Format",
    "LayerWeights",
    "LinearWeights",
    "LowRankWeights",
    "NormWeights",
    "OutputRows",
    "PagedKvCache",
    "PoolingCode",
    "has_exact_products",
    "shared_library",
]
