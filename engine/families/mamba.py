"""Mamba, Falcon-Mamba and Mamba-2: layers of one mixer each, no attention, no positions, no separate MLP.

Source: Gu and Dao, Mamba (arXiv 2312.00752); Zuo et al., Falcon Mamba (2410.05355); Dao and Gu, Transformers are SSMs
(2405.21060). Defaults are those of transformers 5.23.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from ..protocol.errors import ModelLoadError, UnsupportedModelError
from ..protocol.model_info import ModelInfo
from .config_values import read_config
from .decoder import decoder_head
from .spec import EmbeddingSpec, Family, LayerSpec, Mamba2Spec, MambaSpec, MixerSpec, ModelSpec, NormSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SsmConfig(ABC):
    """Values of config.json that all three families have."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_norm_epsilon: float = 1e-5
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    residual_in_fp32: bool = True

    @property
    @abstractmethod
    def mixer(self) -> MixerSpec:
        """The mixer of every layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig(SsmConfig):
    """Values of config.json."""

    vocab_size: int = 50280
    hidden_size: int = 768
    num_hidden_layers: int = 32
    state_size: int = 16
    expand: float = 2
    intermediate_size: int | None = None
    time_step_rank: int | str = "auto"
    mixer_rms_eps: float = 1e-6

    @property
    def step_rank(self) -> int:
        """Q; see MambaSpec."""
        rank = self.time_step_rank
        return math.ceil(self.hidden_size / 16) if isinstance(rank, str) else rank

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        """No norms."""
        return ()

    @property
    def mixer(self) -> MambaSpec:
        """The selective scan of every layer."""
        return MambaSpec(
            prefix="mixer",
            inner_size=self.intermediate_size or int(self.expand * self.hidden_size),
            state_size=self.state_size,
            conv_width=self.conv_kernel,
            step_rank=self.step_rank,
            bias=self.use_bias,
            conv_bias=self.use_conv_bias,
            activation=self.hidden_act,
            norms=self.norms,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconMambaConfig(MambaConfig):
    """Falcon-Mamba: mixers normalise step, B and C before the recurrence."""

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        """Norms without weights of the step, B and C."""
        sizes = (self.step_rank, self.state_size, self.state_size)
        return tuple(NormSpec(name=None, size=size, eps=self.mixer_rms_eps, is_rms=True) for size in sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config(SsmConfig):
    """Values of config.json."""

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
    def mixer(self) -> Mamba2Spec:
        """The state space duality mixer of every layer.

        Raises:
            ModelLoadError: The sizes are inconsistent.
        """
        if self.num_heads * self.head_dim != int(self.expand * self.hidden_size):
            raise ModelLoadError(
                f"config.json: num_heads {self.num_heads} * head_dim {self.head_dim} is not "
                f"expand {self.expand} * hidden_size {self.hidden_size}."
            )
        return Mamba2Spec(
            prefix="mixer",
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


def ssm_reader(config_class: type[SsmConfig]) -> Callable[[ModelInfo], ModelSpec]:
    """Returns Family.read for a config class."""
    return lambda info: _spec(read_config(config_class, info.config), info)


def _spec(config: SsmConfig, info: ModelInfo) -> ModelSpec:
    require_causal(info)
    D = config.hidden_size
    mixer = config.mixer

    def norm(name: str) -> NormSpec:
        return NormSpec(name=name, size=D, eps=config.layer_norm_epsilon, is_rms=True)

    return ModelSpec(
        hidden_size=D,
        prefixes=("backbone", ""),
        embedding=EmbeddingSpec(word_embeddings="embeddings.weight", vocab_size=config.vocab_size, size=D),
        attention=None,
        kinds={},
        layers=tuple(
            LayerSpec(prefix=f"layers.{i}", attention_norm=norm("norm"), mixer=mixer)
            for i in range(config.num_hidden_layers)
        ),
        is_pre_norm=True,
        is_decoder=True,
        final_norm=norm("norm_f"),
        has_float32_sum=config.residual_in_fp32,
        head=decoder_head(info, D),
        scores_rows=not info.classifier_tokens,
    )


def require_causal(info: ModelInfo) -> None:
    """Raises UnsupportedModelError for a recurrent model that is configured as bidirectional."""
    if not info.is_causal:
        raise UnsupportedModelError(
            f"{info.name} is configured as bidirectional ({info.sources['is_causal']}), but a recurrence is causal."
        )


def read_step_limit(value: Any) -> tuple[float, float]:
    """Returns the smallest and the largest step. transformers writes infinity as {"__float__": "Infinity"}.

    Raises:
        ModelLoadError: The value is not a list of two ascending numbers.
    """
    parts: list[Any] = list(value) if isinstance(value, list | tuple) else []
    try:
        low, high = (float(part["__float__"] if isinstance(part, dict) else part) for part in parts)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"config.json: time_step_limit is {value!r}; it must be two numbers.") from error
    if not low < high:
        raise ModelLoadError(f"config.json: time_step_limit is {value!r}; the first must be below the second.")
    return low, high


FAMILIES: Final = (
    Family("mamba", "Mamba", ssm_reader(MambaConfig)),
    Family("falcon_mamba", "FalconMamba", ssm_reader(FalconMambaConfig)),
    Family("mamba2", "Mamba2", ssm_reader(Mamba2Config)),
)
