"""The frequencies of rotary positions, and their scalings for texts longer than in training.

Sources: Su et al., RoFormer (arXiv 2104.09864), equation 34; Chen et al., Position Interpolation (2306.15595,
"linear"); bloc97, NTK-aware scaling ("dynamic"); Peng et al., YaRN (2309.00071); Ding et al., LongRoPE (2402.13753);
Grattafiori et al., The Llama 3 Herd of Models (2407.21783). In float32, in the order of transformers' arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from ..protocol.errors import UnsupportedModelError

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """The rotary positions of one kind of layer.

    Attributes:
        rope_type: Name of the scaling, as in config.json.
        theta: Base of the frequencies.
        size: Rotated columns of a head.
        max_positions: max_position_embeddings of config.json.
        options: Other values of the scaling, under the names of config.json: factor, low_freq_factor, ...

    Raises:
        UnsupportedModelError: The scaling is not known.
    """

    rope_type: str = "default"
    theta: float
    size: int
    max_positions: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rope_type not in _SCALINGS:
            raise UnsupportedModelError(
                f"rope_type is {self.rope_type!r}; penstock supports {', '.join(sorted(_SCALINGS))}."
            )

    @classmethod
    def read(cls, values: Mapping[str, Any], *, theta: float, size: int, max_positions: int) -> Self:
        """Returns the rotary positions of the object rope_parameters or rope_scaling of config.json.

        Args:
            values: The object; empty for plain rotary positions.
            theta: Base of the frequencies if `values` has no rope_theta.
            size: Rotated columns of a head.
            max_positions: max_position_embeddings of config.json.

        Raises:
            UnsupportedModelError: The scaling is not known.
        """
        return cls(
            rope_type=str(values.get("rope_type") or values.get("type") or "default"),
            theta=float(values.get("rope_theta") or theta),
            size=size,
            max_positions=max_positions,
            options=values,
        )

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies depend on the length of the whole text."""
        return self.rope_type in ("dynamic", "longrope")

    @property
    def original_positions(self) -> int:
        """Length of the training before the scaling, in tokens."""
        return int(self.options.get("original_max_position_embeddings") or self.max_positions)

    def stage(self, length: int) -> int:
        """Returns a key for the frequencies of a text of `length` tokens: a length with the same frequencies."""
        if self.rope_type == "dynamic":
            return max(length, self.max_positions)
        if self.rope_type == "longrope":
            return self.original_positions + (length > self.original_positions)
        return 0

    def frequencies(self, length: int = 0) -> tuple[Floats, float]:
        """Returns the angle per position of each pair of columns, [size / 2] float32, and the factor of cos and sin.

        Args:
            length: Tokens of the whole text; only used if `depends_on_length`.
        """
        return _SCALINGS[self.rope_type](self, length)

    def table(self, length: int) -> Floats:
        """Returns [length, size] float32: the cosines of the angles of each position, then their sines."""
        frequencies_J, factor = self.frequencies(length)
        angles_LJ = np.arange(length, dtype=np.float32)[:, None] * frequencies_J
        return np.concatenate([np.cos(angles_LJ), np.sin(angles_LJ)], axis=1) * np.float32(factor)

    def option(self, name: str) -> float:
        """Returns a required number of `options`.

        Raises:
            UnsupportedModelError: The number is missing.
        """
        value = self.options.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnsupportedModelError(f"rope_type {self.rope_type!r} needs a number {name!r}; it is {value!r}.")
        return float(value)

    def optional(self, name: str) -> float | None:
        """Returns a number of `options`, or None if it is missing."""
        return None if self.options.get(name) is None else self.option(name)


def _plain(spec: RopeSpec, theta: float | None = None) -> Floats:
    """theta^(-2i / size)."""
    return np.float32(1) / _powers(spec.theta if theta is None else theta, spec.size)


def _powers(theta: float, size: int) -> Floats:
    """theta^(2i / size), float32 rounded from double precision."""
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    return (theta ** exponents.astype(np.float64)).astype(np.float32)


def _default(spec: RopeSpec, length: int) -> tuple[Floats, float]:
    return _plain(spec), 1.0


def _linear(spec: RopeSpec, length: int) -> tuple[Floats, float]:
    return _plain(spec) / spec.option("factor"), 1.0


def _dynamic(spec: RopeSpec, length: int) -> tuple[Floats, float]:
    """Increases the base for texts longer than in training, so that the slowest pair does not rotate further."""
    factor = spec.option("factor")
    ratio = max(length, spec.max_positions) / spec.max_positions
    theta = spec.theta * (factor * ratio - (factor - 1)) ** (spec.size / (spec.size - 2))
    return _plain(spec, theta), 1.0


def _llama3(spec: RopeSpec, length: int) -> tuple[Floats, float]:
    """Divides low frequencies by the factor, keeps high frequencies, and interpolates in between."""
    factor, low, high = (spec.option(n) for n in ("factor", "low_freq_factor", "high_freq_factor"))
    frequencies = _plain(spec)
    rotations = spec.original_positions * frequencies / (2 * math.pi)
    share: Floats = ((rotations - low) / (high - low)).clip(0, 1)
    scaled = (1 - share) * frequencies / factor + share * frequencies
    return scaled.astype(np.float32), 1.0


def _yarn(spec: RopeSpec, length: int) -> tuple[Floats, float]:
    """Like llama3, but interpolates over the index of the pairs, and scales cos and sin."""
    original = spec.original_positions
    factor = spec.optional("factor") or spec.max_positions / original

    def pair_of(rotations: float) -> float:
        """Returns the index of the pair with `rotations` rotations over the training length."""
        return spec.size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    first, last = pair_of(spec.optional("beta_fast") or 32.0), pair_of(spec.optional("beta_slow") or 1.0)
    if spec.options.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.size - 1)
    ramp = (np.arange(spec.size // 2, dtype=np.float32) - first) / ((last - first) or 0.001)
    share: Floats = ramp.clip(0, 1)
    frequencies = _plain(spec)
    attention_factor = spec.optional("attention_factor")
    if attention_factor is None:
        mscale, all_dim = spec.optional("mscale"), spec.optional("mscale_all_dim")
        if mscale and all_dim:
            attention_factor = _yarn_scale(factor, mscale) / _yarn_scale(factor, all_dim)
        else:
            attention_factor = _yarn_scale(factor, 1.0)
    scaled = frequencies / factor * share + frequencies * (1 - share)
    return scaled.astype(np.float32), attention_factor


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(spec: RopeSpec, length: int) -> tuple[Floats, float]:
    """Divides each frequency by a stored number: one list for texts up to the training length, one for longer texts."""
    original = spec.original_positions
    name = "long_factor" if length > original else "short_factor"
    divisors = spec.options.get(name)
    if not isinstance(divisors, list) or len(divisors) != spec.size // 2:
        raise UnsupportedModelError(f"rope_type 'longrope' needs a list {name!r} of {spec.size // 2} numbers.")
    attention_factor = spec.optional("attention_factor")
    if attention_factor is None:
        factor = spec.optional("factor") or spec.max_positions / original
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return np.float32(1) / (np.array(divisors, np.float32) * _powers(spec.theta, spec.size)), attention_factor


_SCALINGS: Final[dict[str, Callable[[RopeSpec, int], tuple[Floats, float]]]] = {
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}
