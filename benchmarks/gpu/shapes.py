"""The sizes that are measured: encoders by their configs, without files, and the lengths of ShareGPT's turns."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Final

VOCABULARY_SIZE: Final = 30_522


@dataclass(frozen=True, slots=True)
class Shape:
    """A BERT-like encoder.

    Attributes:
        name: Of the model that has these sizes.
        layers: Blocks.
        width: Of the hidden states.
        heads: Attention heads.
        inner: Width inside the MLP.
        max_tokens: Of its longest text.
    """

    name: str
    layers: int
    width: int
    heads: int
    inner: int
    max_tokens: int = 512

    def operations(self, lengths: list[int]) -> int:
        """Returns the floating-point operations of a forward in matrix products: linear layers and attention."""
        linear = sum(lengths) * (8 * self.width * self.width + 4 * self.width * self.inner)
        attention = 4 * self.width * sum(length * length for length in lengths)
        return self.layers * (linear + attention)

    def products(self) -> dict[str, tuple[int, int]]:
        """Returns the matrix products of a block by name: input and output features."""
        return {
            "qkv": (self.width, 3 * self.width),
            "attention_out": (self.width, self.width),
            "mlp_in": (self.width, self.inner),
            "mlp_out": (self.inner, self.width),
        }


MINILM: Final = Shape("MiniLM-L6", 6, 384, 12, 1536)
BASE: Final = Shape("bge-base", 12, 768, 12, 3072)
LARGE: Final = Shape("bge-large", 24, 1024, 16, 4096)
SHAPES: Final = (MINILM, BASE, LARGE)

TINY_SHAPES: Final = tuple(
    Shape(f"tiny-{shape.name}", 2, width, 2, 2 * width, 64) for shape, width in zip(SHAPES, (32, 48, 64), strict=True)
)
"""Replaces each of SHAPES when only the code is tested."""

OWN_VARIANTS: Final = ("fused", "epilogue", "none")
"""The ways in which a server runs them: values of Fusion."""

USUAL_LENGTH: Final = {"MiniLM-L6": 128, "bge-base": 512, "bge-large": 512}
"""Tokens of the texts that the goals are stated for."""

# Every 128th part of the 61,420 turns of people in the first 17,671 conversations of ShareGPT_V3 (lengths alone, as
# BERT's tokenizer counts them, with [CLS] and [SEP]), at its middle. Cut at 512 tokens the mean is that of all turns to
# 0.1 %, and so is the mean of the squares.
SHAREGPT_LENGTHS: Final = (
    *(3, 3, 3, 3, 4, 4, 5, 5, 6, 6, 6, 7, 7, 7, 8, 8, 8, 8, 9, 9, 9, 9, 10, 10, 10, 10, 10, 11, 11, 11, 11, 12),
    *(12, 12, 12, 12, 13, 13, 13, 13, 14, 14, 14, 14, 15, 15, 15, 15, 16, 16, 16, 16, 17, 17, 17, 18, 18, 18, 18, 19),
    *(19, 20, 20, 20, 21, 21, 21, 22, 22, 23, 23, 24, 24, 25, 25, 26, 27, 27, 28, 29, 29, 30, 31, 32, 32, 33, 34, 35),
    *(36, 37, 39, 40, 41, 43, 44, 46, 47, 49, 52, 54, 56, 58, 61, 64, 67, 71, 75, 79, 83, 89, 95, 102, 110, 121, 133),
    *(149, 167, 190, 218, 257, 308, 360, 432, 537, 685, 931, 1282, 2442),
)


def sharegpt_lengths(number: int, max_tokens: int) -> list[int]:
    """Returns that many lengths in disorder, each part of the histogram as often as any other, cut to `max_tokens`."""
    lengths = list(itertools.islice(itertools.cycle(SHAREGPT_LENGTHS), number))
    random.Random("sharegpt").shuffle(lengths)
    return [min(length, max_tokens) for length in lengths]


def equal_lengths(num_tokens: int, length: int) -> list[int]:
    """Returns as many times `length` as there is room for in `num_tokens`, at least one."""
    return [length] * max(1, num_tokens // length)


def mixed_lengths(num_tokens: int, max_tokens: int) -> list[int]:
    """Returns lengths as ShareGPT has them, which sum to `num_tokens`."""
    lengths: list[int] = []
    for length in itertools.cycle(sharegpt_lengths(len(SHAREGPT_LENGTHS), max_tokens)):
        left = num_tokens - sum(lengths)
        if left <= length:
            return [*lengths, left]
        lengths.append(length)
    raise AssertionError
