"""The sum that runs through a model, and what a layer has yet to add to it.

Without fusion the sum is made by the product that gives the second term. Fused, the term is kept apart until the norm
that follows, which adds and normalises in one pass over memory.

Shape letters: R rows, D model width, I width of what is mapped to D.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from .norm import LayerNorm, RmsNorm
from .rows import Rows


class AddingMap(Protocol):
    """A map that can add a second operand to its result, such as Linear or GatedMlp."""

    def __call__(self, x: Tensor, /, *, add: Tensor | None = None) -> Tensor:
        """Returns [R, D] of [R, I]; `add`, of the shape of the result, is added to it."""
        ...


class Residual(NamedTuple):
    """Hidden states on their way from layer to layer. Its methods return new ones, and modify no tensor.

    Attributes:
        hidden: [R, D].
        term: [R, D], what is still to be added; None where nothing is.
        is_fused: Whether terms wait for the next norm.
    """

    hidden: Tensor
    term: Tensor | None = None
    is_fused: bool = False

    def plus(self, mapping: AddingMap, x_RI: Tensor) -> Residual:
        """Adds what `mapping` makes of [R, I]. No term may wait."""
        if self.is_fused:
            return Residual(self.hidden, mapping(x_RI), is_fused=True)
        return Residual(mapping(x_RI, add=self.hidden))

    def plus_term(self, term_RD: Tensor, *, scale: float = 1.0) -> Residual:
        """Adds `scale` times [R, D], which may be narrower than the sum. No term may wait."""
        if self.is_fused and scale == 1.0:
            return Residual(self.hidden, term_RD, is_fused=True)
        return Residual(self.hidden.add(term_RD, alpha=scale), is_fused=self.is_fused)

    def plus_normed(self, norm: LayerNorm | RmsNorm, term_RD: Tensor) -> Residual:
        """Adds the normed rows of [R, D]. No term may wait."""
        normed_RD = norm(term_RD)
        if self.is_fused:
            return Residual(self.hidden, normed_RD, is_fused=True)
        return Residual(normed_RD.add_(self.hidden))

    def normed(self, norm: LayerNorm | RmsNorm) -> Tensor:
        """Returns the normed rows [R, D] of the sum with its term."""
        return norm(self.hidden) if self.term is None else norm.of_sum(self.term, self.hidden)

    def normed_and_sum(self, norm: LayerNorm | RmsNorm) -> tuple[Tensor, Residual]:
        """As `normed`, for a model that goes on with the sum; no term waits in what is returned."""
        if self.term is None:
            return norm(self.hidden), self
        normed_RD, sum_RD = norm.with_sum(self.term, self.hidden)
        return normed_RD, Residual(sum_RD, is_fused=True)

    def trim(self, rows: Rows) -> Residual:
        """Returns views of the rows that are tokens."""
        term_RD = None if self.term is None else rows.trim(self.term)
        return Residual(rows.trim(self.hidden), term_RD, is_fused=self.is_fused)
