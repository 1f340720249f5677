"""What config.json says about a decoder. A family says in a subclass what it does differently; knows no weights.

The values are those of transformers, and so are the defaults of what the file leaves out; the properties and class
variables below them are what the forward asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

from ....model_files.json_files import read_config
from ....protocol.errors import UnsupportedModelError
from ..rope_spec import RopeSpec

FULL: Final = "full_attention"
LOCAL: Final = "sliding_attention"
# Scalings that count from the length that the model was trained on before it was stretched.
_STRETCHED: Final = ("llama3", "longrope", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The values that every family has.

    Attributes:
        qkv_names: The maps of q, k and v, or the one that gives all three.
        gate_names: The maps of the gate and of what it gates, or the one that gives both.
        mlp_norm: Name of the norm before the MLP.
        post_norms: Names of the norms of what attention and MLP give, before it is added; () where there are none.
        has_qk_norm: Whether the heads of q and k are normalised.
        norm_offset: Added to the stored weights of norms.
        has_scaled_embedding: Whether embeddings are multiplied with the root of their width.
        reads_bias: Whether attention_bias says that the maps of attention have biases; else they have none.
        reads_window: Whether sliding_window counts where nothing else says which layers are local.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    rope_theta: float | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    original_max_position_embeddings: int | None = None

    qkv_names: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    gate_names: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")
    mlp_norm: ClassVar[str] = "post_attention_layernorm"
    post_norms: ClassVar[tuple[str, ...]] = ()
    has_qk_norm: ClassVar[bool] = False
    norm_offset: ClassVar[float] = 0.0
    has_scaled_embedding: ClassVar[bool] = False
    reads_bias: ClassVar[bool] = False
    reads_window: ClassVar[bool] = True

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Returns the config of config.json.

        Raises:
            UnsupportedModelError: A kind of attention is not known.
        """
        config = read_config(cls, values)
        unknown = set(config.types) - {FULL, LOCAL}
        if unknown:
            raise UnsupportedModelError(
                f"layer_types holds {', '.join(map(repr, sorted(unknown)))}; penstock knows {FULL!r} and {LOCAL!r}."
            )
        return config

    @property
    def num_kv_heads(self) -> int:
        """Heads of k and v."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """Columns of a head that turn."""
        return self.head_size

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.head_size**-0.5)

    @property
    def softcap(self) -> float | None:
        """Bound of the scores."""
        return None

    @property
    def activation(self) -> str:
        """Of the MLP."""
        return self.hidden_act

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have a bias."""
        return self.reads_bias and self.attention_bias

    @property
    def out_bias(self) -> bool:
        """Whether the output projection of attention has one."""
        return self.reads_bias and self.attention_bias

    @property
    def gate_bias(self) -> bool:
        """Whether the maps of the MLP have one."""
        return False

    @property
    def types(self) -> list[str]:
        """The kind of attention of each layer."""
        return [LOCAL if self.sliding_window and self.reads_window else FULL] * self.num_hidden_layers

    def window(self, layer_type: str, *, is_causal: bool) -> tuple[int, int] | None:
        """Returns how far a token of such a layer sees to the left and to the right; None for everything.

        transformers counts the token itself in a causal window, and not in one that looks both ways.
        """
        if layer_type == FULL or self.sliding_window is None:
            return None
        return (self.sliding_window - 1, 0) if is_causal else (self.sliding_window, self.sliding_window)

    def rope(self, layer_type: str) -> RopeSpec:
        """Returns the rotary positions of such a layer, from today's config.json or an older one.

        Raises:
            UnsupportedModelError: Their scaling is not known.
        """
        del layer_type
        values = self.rope_scaling or self.rope_parameters or {}
        return self.rope_spec(values, self.rope_theta or 10_000.0, self.original_max_position_embeddings)

    def rope_spec(self, values: Mapping[str, Any], theta: float, original_positions: int | None) -> RopeSpec:
        """Returns the positions that one block of values describes; `theta` is for a block without its own."""
        rope_type = str(values.get("rope_type") or values.get("type") or "default")
        options = dict(values)
        if rope_type in _STRETCHED and original_positions is not None:
            options["original_max_position_embeddings"] = original_positions
        return RopeSpec(
            rope_type=rope_type,
            theta=float(values.get("rope_theta") or theta),
            size=self.rotary_size,
            max_positions=self.max_position_embeddings,
            options=options,
        )


def alternating(num_layers: int, every: int) -> list[str]:
    """Returns local attention everywhere but in each `every`-th layer."""
    return [LOCAL if (i + 1) % every else FULL for i in range(num_layers)]
