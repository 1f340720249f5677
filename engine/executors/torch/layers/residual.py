"""The sum that runs through a model, and what a layer has yet to add to it.

Without fusion the sum is made by the product that gives the second term. Fused, the term is kept apart until the norm
that follows, which adds and normalises in one pass over memory.

Shape letters: T rows, D model width, I width of what is mapped to D.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from .norm import LayerNorm, RmsNorm


class AddingMap(Protocol):
    """A map that can add a second operand to its result, such as Linear or GatedMlp."""

    def __call__(self, x: Tensor, /, *, add: Tensor | None = None) -> Tensor:
        """Returns [T, D] of [T, I]; `add`, of the shape of the result, is added to it."""
        ...


class Residual(NamedTuple):
    """Hidden states on their way from layer to layer. Its methods return new ones, and modify no tensor.

    Attributes:
        hidden: [T, D].
        term: [T, D], what is still to be added; None where nothing is.
        is_fused: Whether terms wait for the next norm.
    """

    hidden: Tensor
    term: Tensor | None = None
    is_fused: bool = False

    def plus(self, mapping: AddingMap, x_TI: Tensor) -> Residual:
        """Adds what `mapping` makes of [T, I]. No term may wait."""
        if self.is_fused:
            return Residual(self.hidden, mapping(x_TI), is_fused=True)
        return Residual(mapping(x_TI, add=self.hidden))

    def plus_term(self, term_TD: Tensor, *, scale: float = 1.0) -> Residual:
        """Adds `scale` times [T, D], which may be narrower than the sum. No term may wait."""
        if self.is_fused and scale == 1.0:
            return Residual(self.hidden, term_TD, is_fused=True)
        return Residual(self.hidden.add(term_TD, alpha=scale), is_fused=self.is_fused)

    def plus_normed(self, norm: LayerNorm | RmsNorm, term_TD: Tensor) -> Residual:
        """Adds the normed rows of [T, D]. No term may wait."""
        normed_TD = norm(term_TD)
        if self.is_fused:
            return Residual(self.hidden, normed_TD, is_fused=True)
        return Residual(normed_TD.add_(self.hidden))

    def normed(self, norm: LayerNorm | RmsNorm) -> Tensor:
        """Returns the normed rows [T, D] of the sum with its term."""
        return norm(self.hidden) if self.term is None else norm.of_sum(self.term, self.hidden)

    def normed_and_sum(self, norm: LayerNorm | RmsNorm) -> tuple[Tensor, Residual]:
        """As `normed`, for a model that goes on with the sum; no term waits in what is returned."""
        if self.term is None:
            return norm(self.hidden), self
        normed_TD, sum_TD = norm.with_sum(self.term, self.hidden)
        return normed_TD, Residual(sum_TD, is_fused=True)
