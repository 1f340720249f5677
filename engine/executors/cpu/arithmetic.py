"""In what an encoder computes, by the type of its weights and by what was measured when it was loaded."""

from __future__ import annotations

from typing import NamedTuple

from penstock.kernels.cpu import Format

from ...protocol.model_info import ModelInfo


class Arithmetic(NamedTuple):
    """What the C library computes in.

    Attributes:
        products: Of the products with weights.
        attention: Of the two products of attention: DOT or F32.
    """

    products: Format
    attention: Format

    @classmethod
    def of(cls, info: ModelInfo) -> Arithmetic:
        """Returns that of a model; with int8 products, what lies between them is rounded to bfloat16 as well."""
        if info.dtype == "float32":
            return cls(Format.F32, Format.F32)
        rounds = info.arithmetic == "bfloat16"
        attention = Format.DOT if rounds else Format.F32
        if info.dtype == "int8":
            return cls(Format.INT8, attention)
        return cls(Format.DOT if rounds else Format.BF16, attention)
