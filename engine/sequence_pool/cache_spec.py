"""What a model must remember of a sequence between two of its chunks. Plain Python without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvLayerSpec:
    """One attention layer: keys and values of every token.

    Attributes:
        num_kv_heads: Heads of the keys.
        head_size: Width of a head.
    """

    num_kv_heads: int
    head_size: int


@dataclass(frozen=True, slots=True)
class SsmLayerSpec:
    """One SSM layer: a state of fixed size, whatever the length.

    Attributes:
        conv_shape: Of the causal convolution's last inputs, (channels, width - 1), in the model's dtype.
        ssm_shape: Of the recurrence, float32: (heads, head size, state size) for Mamba-2, (channels, state size) for
            Mamba.
    """

    conv_shape: tuple[int, ...]
    ssm_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """The layers that keep something from chunk to chunk, in the order of the model. A hybrid has both kinds.

    Attributes:
        kv_layers: Attention layers.
        ssm_layers: SSM layers.
        shares_prefixes: Whether texts that begin alike have the same keys and values there. Not where rotary positions
            depend on how long the whole text is.
    """

    kv_layers: tuple[KvLayerSpec, ...] = ()
    ssm_layers: tuple[SsmLayerSpec, ...] = ()
    shares_prefixes: bool = True

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes that the keys and values of one token take in all layers, at `itemsize` Bytes a number."""
        return sum(2 * layer.num_kv_heads * layer.head_size for layer in self.kv_layers) * itemsize

    def ssm_bytes_per_slot(self, itemsize: int) -> int:
        """Bytes that the states of one sequence take in all layers; convolutions at `itemsize` Bytes a number."""
        return sum(math.prod(s.conv_shape) * itemsize + math.prod(s.ssm_shape) * 4 for s in self.ssm_layers)
