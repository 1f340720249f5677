"""Random encoders, most with one layer, that cover every option of the C library."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu import (
    ActivationCode,
    CpuLibrary,
    DistanceWeights,
    EncoderInput,
    EncoderWeights,
    Format,
    LayerWeights,
    LinearWeights,
    NormWeights,
)

Floats = NDArray[np.float32]


def format_pairs(library: CpuLibrary) -> list[tuple[Format, Format]]:
    """Formats of products and of attention that this machine has."""
    pairs = [
        (Format.F32, Format.F32),
        (Format.BF16, Format.F32),
        (Format.DOT, Format.DOT),
        (Format.INT8, Format.F32),
        (Format.INT8, Format.DOT),
    ]
    return [pair for pair in pairs if library.formats.issuperset(pair)]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes and options of EncoderWeights and LayerWeights."""

    name: str
    head_size: int = 32
    num_heads: int = 2
    inner: int = 96
    embedding_width: int | None = None
    pre_norm: bool = False
    rms: bool = False
    has_bias: bool = True
    gated: bool = False
    activation: ActivationCode = ActivationCode.GELU
    window: tuple[int, int] | None = None
    rotary: bool = False
    distance_bias: bool = False
    distance_terms: str = ""
    positions: bool = True
    num_layers: int = 1
    num_kv_heads: int | None = None
    is_decoder: bool = False
    head_norms: bool = False
    after_norms: bool = False
    softcap: float = 0.0
    own_width: int | None = None

    @property
    def width(self) -> int:
        """Columns of the hidden states."""
        return self.own_width or self.num_heads * self.head_size


def _shapes(name: str) -> tuple[Shape, ...]:
    """Returns the shapes of a table, with the options in its entry `all`.

    Reads the file itself, because fuzz.py and results.py run outside of the package of tables.py.
    """
    shapes = json.loads(Path(__file__).with_name("cases.json").read_text("utf-8"))[name]
    shared = shapes.pop("all", {})
    found = []
    for shape, own in shapes.items():
        options = shared | own
        activation, window = ActivationCode[options.pop("activation", "GELU")], options.pop("window", None)
        found.append(Shape(name=shape, activation=activation, window=window and tuple(window), **options))
    return tuple(found)


SHAPES, DECODERS = _shapes("shapes_of_encoders"), _shapes("shapes_of_decoders")
VOCABULARY = 50
LONGEST = 513


def make_spec(shape: Shape, seed: int = 0) -> EncoderWeights:
    """The same weights at every call."""
    numbers = np.random.default_rng(seed)
    width, embedding = shape.width, shape.embedding_width or shape.width

    def normal(*sizes: int) -> Floats:
        return numbers.standard_normal(sizes, np.float32)

    def norm(size: int, scale: float = 1.0) -> NormWeights:
        bias = None if shape.rms else np.float32(0.1) * normal(size)
        weight = np.float32(scale) * (1 + np.float32(0.1) * normal(size))
        return NormWeights(weight=weight, bias=bias, eps=1e-5, rms=shape.rms)

    def linear(
        num_in: int, num_out: int, activation: ActivationCode = ActivationCode.NONE, gated: bool = False
    ) -> LinearWeights:
        weight = normal(num_out, num_in) / np.float32(np.sqrt(num_in))
        bias = normal(num_out) * np.float32(0.1) if shape.has_bias else None
        return LinearWeights(weight=weight, bias=bias, activation=activation, gated=gated)

    def distances(heads: int, size: int) -> DistanceWeights:
        rows = (np.arange(-LONGEST, LONGEST + 1) + 37).clip(0, 74).astype(np.int32)
        tables = [normal(heads, 75, size) * np.float32(0.3) if term in shape.distance_terms else None for term in "kq"]
        return DistanceWeights(keys=tables[0], queries=tables[1], rows=rows, num_distances=75)

    def layer() -> LayerWeights:
        heads, kv_heads, size = shape.num_heads, shape.num_kv_heads or shape.num_heads, shape.head_size
        qkv = linear(width, (heads + 2 * kv_heads) * size)
        qkv.weight[: (heads + kv_heads) * size] *= np.float32(1.5 * shape.head_size**-0.25)
        angles = np.outer(np.arange(LONGEST), 100.0 ** -np.linspace(0, 1, shape.head_size // 2))
        rotary = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32) if shape.rotary else None
        return LayerWeights(
            attention_norm=norm(width),
            qkv=qkv,
            attention_out=linear(heads * size, width),
            mlp_norm=norm(width),
            mlp_in=linear(width, shape.inner * (2 if shape.gated else 1), shape.activation, shape.gated),
            mlp_out=linear(shape.inner, width),
            window=shape.window,
            rotary=rotary,
            bias=normal(shape.num_heads, 2 * LONGEST + 1) if shape.distance_bias else None,
            distances=distances(heads, size) if shape.distance_terms else None,
            query_norm=norm(size if shape.is_decoder else heads * size, size**-0.5) if shape.head_norms else None,
            key_norm=norm(size if shape.is_decoder else kv_heads * size) if shape.head_norms else None,
            after_attention=norm(width) if shape.after_norms else None,
            after_mlp=norm(width) if shape.after_norms and shape.pre_norm else None,
            softcap=shape.softcap,
        )

    return EncoderWeights(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        pre_norm=shape.pre_norm,
        is_decoder=shape.is_decoder,
        word_embeddings=normal(VOCABULARY, embedding),
        position_embeddings=normal(LONGEST, embedding) if shape.positions else None,
        embedding_norm=None if shape.is_decoder else norm(embedding),
        projection=None if embedding == width else linear(embedding, width),
        layers=[layer() for _ in range(shape.num_layers)],
        final_norm=norm(width) if shape.pre_norm else None,
    )


@dataclass(frozen=True)
class Texts:
    """A packed batch."""

    ids: np.ndarray
    positions: np.ndarray
    starts: np.ndarray
    visible: np.ndarray | None = None

    def input(self, **changes: Any) -> EncoderInput:
        """The batch as an argument of CpuEncoder."""
        return EncoderInput(self.ids, self.positions, self.starts, visible_lens=self.visible)._replace(**changes)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [int(length) for length in np.diff(self.starts)]

    def __getitem__(self, number: int) -> "Texts":
        """The batch that holds one of the sequences alone."""
        begin, end = int(self.starts[number]), int(self.starts[number + 1])
        visible = None if self.visible is None else self.visible[number : number + 1]
        starts = np.array([0, end - begin], np.int32)
        return Texts(self.ids[begin:end], self.positions[begin:end], starts, visible)


def make_texts(lengths: list[int], seed: int = 0, hides: bool = False) -> Texts:
    """Random ids; with `hides`, no token attends to the last tokens of each sequence."""
    numbers = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = numbers.integers(0, VOCABULARY, starts[-1])
    positions = np.concatenate([np.arange(length) for length in lengths])
    visible = np.array([numbers.integers(1, length + 1) for length in lengths], np.int32) if hides else None
    return Texts(ids, positions, starts, visible)
