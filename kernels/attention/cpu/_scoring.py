"""Between the product of queries and keys and the weights: scale, cap, bias and limits, on scores to base 2."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .._reference import visible

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Scoring:
    """How scores come from products. Scores are times log2(e), because exp2 costs less than exp: a fifth in float32.

    Attributes:
        scale: Factor of the products.
        reach: (left, right) limits of what a row sees, negative for none.
        relative_bias: [H, Lb, Lb], added.
        softcap: The limit c of c * tanh(score / c), before the bias.
        dtype: Of the products.
    """

    scale: float
    reach: tuple[int, int]
    relative_bias: Tensor | None
    softcap: float | None
    dtype: torch.dtype

    @property
    def factor(self) -> float:
        """What the queries are multiplied with before the product."""
        if self.softcap is None:
            return self.scale * LOG2_E
        return self.scale / self.softcap * (2.0 if self._takes_sigmoid else 1.0)

    @property
    def _takes_sigmoid(self) -> bool:
        """Tanh(x) = 2 sigmoid(2 x) - 1 costs a tenth of tanh in float32, but in 16 bits loses small x."""
        return self.dtype == torch.float32

    def apply(self, scores: Tensor, heads: tuple[int, int], rows: tuple[int, int], keys: tuple[int, int]) -> None:
        """Finishes products in place.

        Args:
            scores: [heads, I, J]; what lies past `rows` and `keys` is padding.
            heads: Range of query heads.
            rows: Range of rows, from the start of the sequence.
            keys: Range of keys.
        """
        if self.softcap is not None:
            limit = self.softcap * LOG2_E
            if self._takes_sigmoid:
                torch.add(torch.tensor(-limit), scores.sigmoid_(), alpha=2.0 * limit, out=scores)
            else:
                scores.tanh_().mul_(limit)
        if self.relative_bias is not None:
            bias = self.relative_bias[slice(*heads), slice(*rows), slice(*keys)]
            scores[:, : bias.shape[1], : bias.shape[2]].add_(bias, alpha=LOG2_E)


def hide(scores: Tensor, position: int, num_keys: int, reach: tuple[int, int], value: float) -> None:
    """Overwrites what a row does not see with `value`, whatever stands there.

    Args:
        scores: [heads, I, J].
        position: Position of the first row, counted from the first column.
        num_keys: Columns that are keys; the others are padding.
        reach: (left, right) limits, negative for none.
        value: 0 for weights, -inf for scores.
    """
    num_rows, num_columns = scores.shape[1:]
    left, right = reach
    hides_left = left >= 0 and position + num_rows - 1 - left > 0
    hides_right = right >= 0 and position + right < num_columns - 1
    if value == 0.0:
        if hides_right:
            scores.tril_(position + right)
        if hides_left:
            scores.triu_(position - left)
    elif hides_left or hides_right:
        is_seen = visible(num_rows, num_columns, reach, position=position)
        scores.masked_fill_(~is_seen, value)
    if num_keys < num_columns:
        scores[:, :, num_keys:].fill_(value)
