"""One tile of scores on CPU: a block of rows against some keys, added to the block's sums.

Weights are 2^score, less a shift where that leaves the range of the exponent: the row's maximum in the first tile that
shows it. Letters beside those of the layer: G query heads of a key head, I rows of a block, R = G * I.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..._scratch import scratch
from ._scoring import Scoring, hide

MIN_SUM, MAX_SUM = 1e-30, 1e30
# Scores. A product of fewer costs less than the call: key heads share one.
MIN_PRODUCT = {torch.float32: 1 << 15, torch.bfloat16: 1 << 20, torch.float16: 1 << 20}


@dataclass(slots=True)
class Block:
    """Rows that are computed together.

    Attributes:
        first: First row of the chunk.
        last: Row after its last.
        position: Position of its first row in the sequence.
        q: [Hkv, G, I, K], scaled; rows past last - first are zeros.
        sums: [Hkv, R, 1], float32: sums of weights.
        rows: [Hkv, R, K], float32: sums of weighted values.
        shift: [Hkv, R, 1]: what is subtracted from the scores.
        is_shifted: Whether any of it is not zero.
        is_settled: Whether `shift` stands; otherwise the next tile decides about it.
    """

    first: int
    last: int
    position: int
    q: Tensor
    sums: Tensor
    rows: Tensor
    shift: Tensor
    is_shifted: bool = False
    is_settled: bool = False

    def is_in_range(self) -> bool:
        """Whether no sum of weights overflowed or vanished; False where one is NaN."""
        smallest, largest = _range(self.sums, self)
        return smallest > MIN_SUM and largest < MAX_SUM


def add_tile(
    block: Block, k3: Tensor, v3: Tensor, keys: tuple[int, int], scoring: Scoring, *, expects_shift: bool
) -> None:
    """Adds weights, and weights times values, to the block's sums and rows.

    Args:
        block: The rows.
        k3: [Hkv, J, K].
        v3: [Hkv, J, K].
        keys: Positions of the first key, and after the last; further columns are padding.
        scoring: Scale, limits, bias and cap.
        expects_shift: Whether a block that is not settled takes a shift without trying to do without.
    """
    for heads in _head_ranges(block, k3):
        scores = _score(block, k3, keys, heads, scoring)
        if not block.is_settled and expects_shift:
            sums = _settle(scores, block, keys, heads, scoring)
        else:
            if block.is_shifted:
                scores.sub_(block.shift[heads])
            scores.exp2_()
            _hide(scores, block, keys, scoring, 0.0)
            sums = scores.sum(-1, keepdim=True)
            if not block.is_settled and not _may_go_on(sums, block, scoring):
                scores = _score(block, k3, keys, heads, scoring)
                sums = _settle(scores, block, keys, heads, scoring)
        block.sums[heads].add_(sums)
        block.rows[heads].add_(_multiply("values", scores, v3[heads]))
    block.is_settled = True


def raise_shift(block: Block, k3: Tensor, keys: tuple[int, int], scoring: Scoring) -> None:
    """Makes `shift` at least the largest score that each row has among these keys."""
    for heads in _head_ranges(block, k3):
        scores = _score(block, k3, keys, heads, scoring)
        _hide(scores, block, keys, scoring, float("-inf"))
        shift = block.shift[heads]
        torch.maximum(shift, scores.amax(-1, keepdim=True), out=shift)


def _head_ranges(block: Block, k3: Tensor) -> Iterator[slice]:
    num_kv_heads, num_columns, _ = k3.shape
    step = _heads_of_product(k3.dtype, num_kv_heads, block.sums.shape[1] * num_columns)
    return (slice(h, min(h + step, num_kv_heads)) for h in range(0, num_kv_heads, step))


def _score(block: Block, k3: Tensor, keys: tuple[int, int], heads: slice, scoring: Scoring) -> Tensor:
    group_size, num_rows = block.q.shape[1:3]
    scores = _multiply("scores", block.q[heads].flatten(1, 2), k3[heads].transpose(1, 2))
    scores4 = scores.view(-1, num_rows, scores.shape[2])
    query_heads = (heads.start * group_size, heads.stop * group_size)
    scoring.apply(scores4, query_heads, (block.first, block.last), keys)
    return scores


def _settle(scores: Tensor, block: Block, keys: tuple[int, int], heads: slice, scoring: Scoring) -> Tensor:
    """Makes weights of scores, in place, with a shift by their maxima; returns the sums of weights."""
    _hide(scores, block, keys, scoring, float("-inf"))
    maxima = scores.amax(-1, keepdim=True)
    # A row that sees none of these keys.
    block.shift[heads] = maxima.masked_fill_(maxima == float("-inf"), 0.0)
    block.is_shifted = True
    scores.sub_(block.shift[heads]).exp2_()
    return scores.sum(-1, keepdim=True)


def _hide(scores: Tensor, block: Block, keys: tuple[int, int], scoring: Scoring, value: float) -> None:
    scores4 = scores.view(-1, block.q.shape[2], scores.shape[2])
    hide(scores4, block.position - keys[0], keys[1] - keys[0], scoring.reach, value)


def _may_go_on(sums: Tensor, block: Block, scoring: Scoring) -> bool:
    """Whether the sums of the first tile promise that no shift is needed."""
    smallest, largest = _range(sums, block)
    # A window may show a row nothing of its block's first tile.
    return largest < MAX_SUM and (smallest > MIN_SUM or (scoring.reach[0] >= 0 and smallest == 0.0))


def _range(sums: Tensor, block: Block) -> tuple[float, float]:
    """Smallest and largest of the rows that are not padding."""
    group_size, num_rows = block.q.shape[1:3]
    smallest, largest = torch.aminmax(sums.view(-1, group_size, num_rows)[..., : block.last - block.first])
    return smallest.item(), largest.item()


def _multiply(name: str, a3: Tensor, b3: Tensor) -> Tensor:
    """a3 [B, R, I] times b3 [B, I, C]: [B, R, C]; valid until the next product of this name.

    oneDNN's in float32 too, where torch's own goes through MKL, which runs at half of its speed where it finds no Intel
    processor (107 against 235 GFLOP/s on a core of Zen 5).

    In float32 one of the last two axes of b3 must be contiguous and the other dense: oneDNN falls back to a loop a
    thousand times slower for other strides.
    """
    if a3.shape[0] == 1 and a3.dtype == torch.float32 and _has_onednn():
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(a3[0], b3[0].t(), None, "none", [], "")
        return product[None]
    out = scratch("attention." + name, (a3.shape[0], a3.shape[1], b3.shape[2]), a3.dtype)
    if a3.shape[0] == 1:
        torch.mm(a3[0], b3[0], out=out[0])
        return out
    return torch.bmm(a3, b3, out=out)


def _heads_of_product(dtype: torch.dtype, num_kv_heads: int, num_scores: int) -> int:
    """How many key heads a product should hold, of `num_scores` each."""
    if dtype == torch.float32:
        return 1 if num_scores >= MIN_PRODUCT[dtype] else num_kv_heads
    return min(num_kv_heads, max(1, MIN_PRODUCT[dtype] // num_scores))


@cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
