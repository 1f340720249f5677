"""Rotary position embedding (RoPE), halves rotated together as in GPT-NeoX and transformers, and how it is stretched.

Sources: Su et al., RoFormer (arXiv 2104.09864), equation 34; Chen et al., Position Interpolation (2306.15595,
"linear"); bloc97, NTK-aware scaling ("dynamic"); Peng et al., YaRN (2309.00071); Ding et al., LongRoPE (2402.13753);
Grattafiori et al., The Llama 3 Herd of Models (2407.21783). Frequencies are taken in float32, in the order of
transformers' arithmetic.
Shape letters: T packed tokens, N sequences, H heads, K head size, J pairs of columns that turn: K / 2, or fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ...protocol.errors import UnsupportedModelError

if TYPE_CHECKING:
    from ...packed_batch import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """The rotary positions of one kind of layer.

    Attributes:
        rope_type: Name of the scaling, as in config.json.
        theta: Base of the wavelengths.
        size: Columns of a head that turn.
        max_positions: max_position_embeddings of config.json.
        options: What else the scaling takes, under the names of config.json: factor, low_freq_factor, ...

    Raises:
        UnsupportedModelError: The scaling is not known.
    """

    rope_type: str = "default"
    theta: float
    size: int
    max_positions: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the type."""
        if self.rope_type not in _SCALINGS:
            raise UnsupportedModelError(
                f"rope_type is {self.rope_type!r}; penstock knows {', '.join(sorted(_SCALINGS))}."
            )

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies of a text depend on how long it is as a whole."""
        return self.rope_type in ("dynamic", "longrope")

    @property
    def original_positions(self) -> int:
        """Tokens that the model was trained on before it was stretched."""
        return int(self.options.get("original_max_position_embeddings") or self.max_positions)

    def stage(self, length: int) -> int:
        """Returns one length that stands for all that share their frequencies with a text of `length` tokens."""
        if self.rope_type == "dynamic":
            return max(length, self.max_positions)
        if self.rope_type == "longrope":
            return self.original_positions + (length > self.original_positions)
        return 0

    def frequencies(self, length: int = 0) -> tuple[Tensor, float]:
        """Returns the angle per position of each pair of columns, [size / 2] float32, and the factor of cos and sin.

        Args:
            length: Tokens of the whole text; only the types that depend on it look at it.
        """
        return _SCALINGS[self.rope_type](self, length)

    def option(self, name: str) -> float:
        """Returns a number that the type cannot do without.

        Raises:
            UnsupportedModelError: config.json has none.
        """
        value = self.options.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnsupportedModelError(f"rope_type {self.rope_type!r} needs a number {name!r}; it is {value!r}.")
        return float(value)

    def optional(self, name: str) -> float | None:
        """Returns a number, or None where config.json has none."""
        return None if self.options.get(name) is None else self.option(name)


def _plain(spec: RopeSpec, theta: float | None = None) -> Tensor:
    """theta^(-2i / size)."""
    exponents = torch.arange(0, spec.size, 2, dtype=torch.float32) / spec.size
    return 1.0 / ((spec.theta if theta is None else theta) ** exponents)


def _default(spec: RopeSpec, length: int) -> tuple[Tensor, float]:
    return _plain(spec), 1.0


def _linear(spec: RopeSpec, length: int) -> tuple[Tensor, float]:
    """Positions divided by the factor."""
    return _plain(spec) / spec.option("factor"), 1.0


def _dynamic(spec: RopeSpec, length: int) -> tuple[Tensor, float]:
    """A larger base for a text longer than the model was trained on, so that its slowest pair turns no further."""
    factor, ratio = spec.option("factor"), max(length, spec.max_positions) / spec.max_positions
    theta = spec.theta * (factor * ratio - (factor - 1)) ** (spec.size / (spec.size - 2))
    return _plain(spec, theta), 1.0


def _llama3(spec: RopeSpec, length: int) -> tuple[Tensor, float]:
    """Slow pairs are divided by the factor, fast ones left, and those between interpolated."""
    factor, low, high = (spec.option(n) for n in ("factor", "low_freq_factor", "high_freq_factor"))
    frequencies = _plain(spec)
    turns = spec.original_positions * frequencies / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) * frequencies / factor + share * frequencies, 1.0


def _yarn(spec: RopeSpec, length: int) -> tuple[Tensor, float]:
    """As llama3's, with a ramp over the pairs instead of their frequencies; cos and sin grow a little."""
    original = spec.original_positions
    factor = spec.optional("factor") or spec.max_positions / original

    def pair_of(turns: float) -> float:
        """The pair that turns so often over the trained length."""
        return spec.size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    first, last = pair_of(spec.optional("beta_fast") or 32.0), pair_of(spec.optional("beta_slow") or 1.0)
    if spec.options.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.size - 1)
    ramp = (torch.arange(spec.size // 2, dtype=torch.float32) - first) / ((last - first) or 0.001)
    share = ramp.clamp(0, 1)
    frequencies = _plain(spec)
    attention_factor = spec.optional("attention_factor")
    if attention_factor is None:
        mscale, all_dim = spec.optional("mscale"), spec.optional("mscale_all_dim")
        if mscale and all_dim:
            attention_factor = _yarn_scale(factor, mscale) / _yarn_scale(factor, all_dim)
        else:
            attention_factor = _yarn_scale(factor, 1.0)
    return frequencies / factor * share + frequencies * (1 - share), attention_factor


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(spec: RopeSpec, length: int) -> tuple[Tensor, float]:
    """A divisor for every pair, found by search; one list for texts up to the trained length, one for longer ones."""
    original = spec.original_positions
    name = "long_factor" if length > original else "short_factor"
    divisors = spec.options.get(name)
    if not isinstance(divisors, list) or len(divisors) != spec.size // 2:
        raise UnsupportedModelError(f"rope_type 'longrope' needs a list {name!r} of {spec.size // 2} numbers.")
    attention_factor = spec.optional("attention_factor")
    if attention_factor is None:
        factor = spec.optional("factor") or spec.max_positions / original
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    exponents = torch.arange(0, spec.size, 2, dtype=torch.float32) / spec.size
    return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * spec.theta**exponents), attention_factor


_SCALINGS: Final[dict[str, Callable[[RopeSpec, int], tuple[Tensor, float]]]] = {
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles of one batch; the same for every layer of one kind.

    Attributes:
        cos: [T, 1, 1, J] float32.
        sin: [T, 1, 1, J] float32.
    """

    cos: Tensor
    sin: Tensor

    def apply_(self, x_TCHK: Tensor) -> None:
        """Rotates the first 2 * J columns of [T, C, H, K] in place; the arithmetic is float32.

        C lets q and k that lie side by side be rotated at once.
        """
        first, second = x_TCHK[..., : 2 * self.cos.shape[-1]].chunk(2, dim=-1)
        a, b = first.float(), second.float()
        rotated = (a * self.cos).addcmul_(b, self.sin, value=-1)
        second.copy_(b.mul_(self.cos).addcmul_(a, self.sin))
        first.copy_(rotated)


class RotaryEmbedding:
    """Angles p * w_j of every token at position p.

    They are taken for each batch anew, which costs less than a thousandth of the forward, so that no table limits the
    length. Where frequencies depend on the length of the text ("dynamic", "longrope"), it is that of the whole text,
    never of the chunk or of its neighbours in the batch.

    Args:
        spec: Which frequencies w_j.
        device: Where the angles live.
    """

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self._spec = spec
        frequencies_J, self._factor = spec.frequencies()
        self._frequencies_J = frequencies_J.to(device)

    @property
    def depends_on_length(self) -> bool:
        """Whether the angles of a token depend on how long its whole text is."""
        return self._spec.depends_on_length

    def __call__(self, batch: PackedBatch) -> Rotation:
        """Returns the angles of the tokens of a batch."""
        angles_TJ = batch.positions[:, None].float() * self._frequencies(batch)
        cos_TJ, sin_TJ = angles_TJ.cos(), angles_TJ.sin_()
        if self._factor != 1.0:
            cos_TJ, sin_TJ = cos_TJ.mul_(self._factor), sin_TJ.mul_(self._factor)
        return Rotation(cos_TJ[:, None, None], sin_TJ[:, None, None])

    def _frequencies(self, batch: PackedBatch) -> Tensor:
        """Returns [J], or [T, J] where the sequences of the batch differ in it."""
        if not self._spec.depends_on_length:
            return self._frequencies_J
        stages = [self._spec.stage(length) for length in prompt_lens(batch)]
        device = batch.positions.device
        of_stage = {stage: self._spec.frequencies(stage)[0] for stage in set(stages)}
        if len(of_stage) == 1:
            return of_stage[stages[0]].to(device)
        frequencies_NJ = torch.stack([of_stage[stage] for stage in stages]).to(device)
        return frequencies_NJ.repeat_interleave(batch.cu_seqlens.diff(), dim=0, output_size=batch.num_tokens)


def prompt_lens(batch: PackedBatch) -> Sequence[int]:
    """Returns the tokens of each whole sequence of the batch."""
    cache = batch.cache
    if cache is None:
        return batch.seq_lens
    if cache.prompt_lens is not None:
        return cache.prompt_lens
    return [past + length for past, length in zip(cache.context_lens, batch.seq_lens, strict=True)]
