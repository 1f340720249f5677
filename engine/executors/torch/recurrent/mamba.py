"""Mamba, Falcon-Mamba and Mamba-2: layers of one mixer each, no attention, no positions, no separate MLP.

Source: Gu and Dao, Mamba (arXiv 2312.00752); Zuo et al., Falcon Mamba (2410.05355); Dao and Gu, Transformers are SSMs
(2405.21060). Held to transformers 5.23 in float32 within 1e-5.
Shape letters: T packed tokens, V vocabulary, D model width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
import torch.nn.functional as F

from ....families.config_values import read_config
from ....families.decoder import decoder_head
from ....families.spec import NormSpec
from ....protocol.errors import ModelLoadError, UnsupportedModelError, UnsupportedTaskError
from ....protocol.model_info import ModelInfo
from ....scheduling import CacheSpec
from ..base import ModelOutput, PackedModel
from ..heads import load_head
from ..layers.mixers import Mamba2Mixer, Mamba2Sizes, MambaMixer, MambaSizes, StepNorms
from ..layers.norm import Residual, RmsNorm
from ..layers.weights import Fusion, Weights

if TYPE_CHECKING:
    from ..packed_batch import PackedBatch

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

    def __call__(self, stream: Residual, batch: PackedBatch) -> Residual:
        """Returns the next hidden states."""
        x_TD, stream = stream.normed_and_sum(self.norm)
        x_TD = x_TD.to(self.dtype)
        if stream.hidden.dtype is self.dtype and not stream.is_fused:
            return Residual(self.mixer(x_TD, batch, add=stream.hidden))
        return stream.plus_term(self.mixer(x_TD, batch))


class SsmModel(PackedModel):
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
        self.embedding_VD = embedding.table("weight", config.vocab_size, D)

        norms = replace(base, dtype=self.sum_dtype)
        eps = config.layer_norm_epsilon
        self.layers = [
            SsmLayer(
                RmsNorm.load(norms, NormSpec(name=f"layers.{i}.norm", size=D, eps=eps, is_rms=True)),
                config.load_mixer(base.scope(f"layers.{i}.mixer"), i),
                self.dtype,
            )
            for i in range(config.num_hidden_layers)
        ]
        self.final_norm = RmsNorm.load(norms, NormSpec(name="norm_f", size=D, eps=eps, is_rms=True))
        self.is_fused = weights.fusion is Fusion.FUSED
        self.cache_spec = CacheSpec(ssm_layers=tuple(layer.mixer.sizes.cache_spec for layer in self.layers))
        head = load_head(weights, embedding, decoder_head(info, D), "weight")
        self.set_head(info.kind, head, scores_rows=not info.classifier_tokens)

    def forward(self, batch: PackedBatch, *, need_attention: bool = False) -> ModelOutput:
        """See PackedModel."""
        if need_attention:
            raise UnsupportedTaskError(
                "The model has no attention, so that there are no weights for ATTENTION pooling.", param="pooling_type"
            )
        hidden_TD = F.embedding(batch.input_ids, self.embedding_VD).to(self.sum_dtype)
        stream = Residual(hidden_TD, is_fused=self.is_fused)
        for layer in self.layers:
            stream = layer(stream, batch)
        return ModelOutput(hidden_states=stream.normed(self.final_norm).to(self.dtype))


def require_causal(info: ModelInfo) -> None:
    """Checks that nobody expects a recurrence to look ahead.

    Raises:
        UnsupportedModelError: The model is said to look both ways.
    """
    if not info.is_causal:
        raise UnsupportedModelError(
            f"{info.name} is said to look both ways ({info.sources['is_causal']}), but a recurrence only looks back."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig(SsmConfig):
    """The values of config.json that the forward depends on, with transformers' defaults."""

    vocab_size: int = 50280
    hidden_size: int = 768
    num_hidden_layers: int = 32
    state_size: int = 16
    expand: float = 2
    intermediate_size: int | None = None
    time_step_rank: int | str = "auto"
    mixer_rms_eps: float = 1e-6

    @property
    def sizes(self) -> MambaSizes:
        """Of every layer's mixer."""
        rank = self.time_step_rank
        return MambaSizes(
            hidden_size=self.hidden_size,
            inner_size=self.intermediate_size or int(self.expand * self.hidden_size),
            state_size=self.state_size,
            conv_width=self.conv_kernel,
            step_rank=math.ceil(self.hidden_size / 16) if isinstance(rank, str) else rank,
            bias=self.use_bias,
            conv_bias=self.use_conv_bias,
            activation=self.hidden_act,
        )

    def load_mixer(self, weights: Weights, index: int) -> MambaMixer:
        """See SsmConfig."""
        return MambaMixer(weights, self.sizes, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconMambaConfig(MambaConfig):
    """Mamba whose mixers bring step, B and C to unit scale before the recurrence; these norms have no weights."""

    def load_mixer(self, weights: Weights, index: int) -> MambaMixer:
        """See SsmConfig."""
        sizes = self.sizes

        def norm(size: int) -> RmsNorm:
            weight = torch.ones(size, device=weights.device)
            return RmsNorm(weight, self.mixer_rms_eps, fused_dtype=weights.dtype)

        norms = StepNorms(step=norm(sizes.step_rank), b=norm(sizes.state_size), c=norm(sizes.state_size))
        return MambaMixer(weights, sizes, index, norms)


class MambaModel(SsmModel):
    """Mamba."""

    config_class = MambaConfig


class FalconMambaModel(SsmModel):
    """Falcon-Mamba."""

    config_class = FalconMambaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config(SsmConfig):
    """The values of config.json that the forward depends on, with transformers' defaults."""

    vocab_size: int = 32768
    hidden_size: int = 4096
    num_hidden_layers: int = 64
    num_heads: int = 128
    head_dim: int = 64
    state_size: int = 128
    expand: float = 2
    n_groups: int = 8
    time_step_limit: Any = field(default_factory=lambda: [0.0, float("inf")])

    @property
    def sizes(self) -> Mamba2Sizes:
        """Of every layer's mixer."""
        if self.num_heads * self.head_dim != int(self.expand * self.hidden_size):
            raise ModelLoadError(
                f"config.json: num_heads {self.num_heads} * head_dim {self.head_dim} is not "
                f"expand {self.expand} * hidden_size {self.hidden_size}."
            )
        return Mamba2Sizes(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            head_size=self.head_dim,
            num_groups=self.n_groups,
            state_size=self.state_size,
            conv_width=self.conv_kernel,
            bias=self.use_bias,
            conv_bias=self.use_conv_bias,
            activation=self.hidden_act,
            step_limit=read_step_limit(self.time_step_limit),
            eps=self.layer_norm_epsilon,
        )

    def load_mixer(self, weights: Weights, index: int) -> Mamba2Mixer:
        """See SsmConfig."""
        return Mamba2Mixer(weights, self.sizes, index)


class Mamba2Model(SsmModel):
    """Mamba-2."""

    config_class = Mamba2Config


def read_step_limit(value: Any) -> tuple[float, float]:
    """Returns the smallest and the largest step; transformers writes infinity as {"__float__": "Infinity"}.

    Raises:
        ModelLoadError: They are not two numbers in order.
    """
    parts: list[Any] = list(value) if isinstance(value, list | tuple) else []
    try:
        low, high = (float(part["__float__"] if isinstance(part, dict) else part) for part in parts)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"config.json: time_step_limit is {value!r}; it must be two numbers.") from error
    if not low < high:
        raise ModelLoadError(f"config.json: time_step_limit is {value!r}; the first must be below the second.")
    return low, high
