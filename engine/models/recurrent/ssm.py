"""The decoder that Mamba and Mamba-2 share: layers of one mixer each, no attention, no positions, no separate MLP.

Shape letters: T packed tokens in R rows, V vocabulary, D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ...layers.norm import RmsNorm
from ...layers.recurrent.mamba2_mixer import Mamba2Mixer
from ...layers.recurrent.mamba_mixer import MambaMixer
from ...layers.rows import Rows
from ...layers.weights import Weights
from ...protocol.errors import UnsupportedModelError, UnsupportedTaskError
from ...protocol.model_info import ModelInfo
from ...sequence_pool.cache_spec import CacheSpec
from ..base import ModelOutput, NativeModel, read_config
from ..heads import decoder_head

if TYPE_CHECKING:
    from ...packed_batch import PackedBatch

# The first is today's; the second that of the checkpoints that came with the papers.
_EMBEDDING_NAMES: Final = ("embeddings", "embedding")
_PREFIXES: Final = ("backbone", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class SsmConfig(ABC):
    """The values of config.json that both families have, and how what differs is read."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_norm_epsilon: float = 1e-5
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    residual_in_fp32: bool = True

    @abstractmethod
    def load_mixer(self, weights: Weights, index: int) -> MambaMixer | Mamba2Mixer:
        """Returns the mixer of layer `index`, whose tensors `weights` holds."""


class SsmLayer:
    """x + Mixer(RMSNorm(x)). The sum has a type of its own, so that many small terms are not lost in 16 bits.

    Args:
        norm: For input of the type of the sum.
        mixer: Of the layer.
        dtype: Of the mixer's input and output.
    """

    def __init__(self, norm: RmsNorm, mixer: MambaMixer | Mamba2Mixer, dtype: torch.dtype) -> None:
        self.norm = norm
        self.mixer = mixer
        self.dtype = dtype

    def __call__(self, hidden_RD: Tensor, rows: Rows) -> Tensor:
        """Returns the next hidden states."""
        normed_RD = self.norm(hidden_RD).to(self.dtype)
        if hidden_RD.dtype is self.dtype:
            return self.mixer(normed_RD, rows, add=hidden_RD)
        return hidden_RD + self.mixer(normed_RD, rows)


class SsmModel(NativeModel):
    """The decoder with the head that the model's kind asks for.

    Attributes:
        config_class: What config.json is read into.
    """

    config_class: ClassVar[type[SsmConfig]]

    def __init__(self, info: ModelInfo, weights: Weights) -> None:
        require_causal(info)
        config = read_config(self.config_class, info.config)
        self.hidden_size = D = config.hidden_size
        self.dtype = weights.dtype
        self.sum_dtype = torch.float32 if config.residual_in_fp32 else weights.dtype
        base = weights.scope_of("norm_f.weight", _PREFIXES)
        embedding = base.scope_of("weight", _EMBEDDING_NAMES)
        self.embedding_VD = embedding.tensor("weight", config.vocab_size, D)

        norms = replace(base, dtype=self.sum_dtype)
        eps = config.layer_norm_epsilon
        self.layers = [
            SsmLayer(
                RmsNorm.load(norms, f"layers.{i}.norm", D, eps),
                config.load_mixer(base.scope(f"layers.{i}.mixer"), i),
                self.dtype,
            )
            for i in range(config.num_hidden_layers)
        ]
        self.final_norm = RmsNorm.load(norms, "norm_f", D, eps)
        self.cache_spec = CacheSpec(ssm_layers=tuple(layer.mixer.sizes.cache_spec for layer in self.layers))
        self.set_head(info.kind, decoder_head(weights, info, D, f"{embedding.prefix}weight"))

    def forward(self, batch: PackedBatch, *, need_attention: bool = False) -> ModelOutput:
        """See PackedModel."""
        if need_attention:
            raise UnsupportedTaskError(
                "The model has no attention, so that there are no weights for ATTENTION pooling.", param="pooling_type"
            )
        rows = Rows.of(batch)
        hidden_RD = F.embedding(rows.input_ids, self.embedding_VD).to(self.sum_dtype)
        for layer in self.layers:
            hidden_RD = layer(hidden_RD, rows)
        return ModelOutput(hidden_states=rows.trim(self.final_norm(hidden_RD).to(self.dtype)))


def require_causal(info: ModelInfo) -> None:
    """Checks that nobody expects a recurrence to look ahead.

    Raises:
        UnsupportedModelError: The model is said to look both ways.
    """
    if not info.is_causal:
        raise UnsupportedModelError(
            f"{info.name} is said to look both ways ({info.sources['is_causal']}), but a recurrence only looks back."
        )
