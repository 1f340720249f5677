"""Reference of the norms: their formulas in float32."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

NormKind = Literal["layer", "rms"]


class Norm(NamedTuple):
    """Kind, weight and bias of a norm.

    Attributes:
        kind: "layer" or "rms".
        weight: [D], float32/bfloat16/float16, contiguous.
        bias: [D], as `weight`; None for 0.
        eps: Added to the variance, or to the mean square.
    """

    kind: NormKind
    weight: Tensor
    bias: Tensor | None
    eps: float


class Embeddings(NamedTuple):
    """The tables of rows that make a token's embedding; of any float type, contiguous.

    Attributes:
        word: [V, D], by token id.
        place: [Y * P, D], by token type and position: row y * P + p. None where there is none.
        num_positions: P.
    """

    word: Tensor
    place: Tensor | None = None
    num_positions: int = 0


def normalise_reference(sum_TD: Tensor, norm: Norm) -> Tensor:
    """Returns the normed rows of float32 rows, float32."""
    kind, weight, bias, eps = norm
    if kind == "layer":
        sum_TD = sum_TD - sum_TD.mean(-1, keepdim=True)
    normed_TD = sum_TD / torch.sqrt(sum_TD.square().mean(-1, keepdim=True) + eps) * weight.float()
    return normed_TD if bias is None else normed_TD + bias.float()


def norm_reference(x: Tensor, norm: Norm, residual: Tensor | None, return_sum: bool) -> tuple[Tensor, Tensor | None]:
    """Same as `add_norm`."""
    sum_TD = x.float()
    if residual is not None:
        sum_TD = sum_TD + residual.float()
    normed_TD = normalise_reference(sum_TD, norm).to(x.dtype)
    return normed_TD, sum_TD.to(x.dtype if residual is None else residual.dtype) if return_sum else None


def embed_norm_reference(
    input_ids: Tensor,
    tables: Embeddings,
    norm: Norm,
    positions: Tensor | None,
    token_type_ids: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Same as `embed_norm`."""
    sum_TD = tables.word[input_ids.long()].float()
    if tables.place is not None and positions is not None:
        types_T = torch.zeros_like(positions) if token_type_ids is None else token_type_ids
        sum_TD = sum_TD + tables.place[positions.long() + types_T.long() * tables.num_positions].float()
    return normalise_reference(sum_TD, norm).to(out_dtype)
