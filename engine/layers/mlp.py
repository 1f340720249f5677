"""The MLP of today's decoders, down(activation(gate(x)) * up(x)), and a sparse mixture of several as experts.

Source of the mixture: Shazeer et al., Outrageously Large Neural Networks (arXiv 1701.06538); Fedus et al., Switch
Transformers (arXiv 2101.03961).
Shape letters: R rows, D model width, I inner width, T packed tokens in R rows, X experts, K experts of a token, M rows
of one expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..protocol.errors import ModelLoadError
from .linear import GatedLinear, Linear
from .rows import Rows, round_up
from .weights import Weights


class GatedMlp:
    """down(activation(gate(x)) * up(x)).

    Args:
        both: Gate and up.
        down: Back to the model's width.
    """

    __slots__ = ("_both", "_down")

    def __init__(self, both: GatedLinear, down: Linear) -> None:
        self._both = both
        self._down = down

    @classmethod
    def load(
        cls,
        weights: Weights,
        size: int,
        inner_size: int,
        *,
        activation: str,
        names: tuple[str, ...] = ("gate_proj", "up_proj"),
        down: str = "down_proj",
        bias: bool = False,
    ) -> GatedMlp:
        """Reads the three maps.

        Args:
            weights: View that holds them.
            size: D.
            inner_size: I.
            activation: Name as in config.json.
            names: Those of gate and up, or of one map that gives both.
            down: Name of the map back to the model's width.
            bias: Whether they have one.
        """
        rows = 2 * inner_size // len(names)
        weight_2ID = torch.cat([weights.tensor(f"{name}.weight", rows, size) for name in names])
        bias_2I = torch.cat([weights.tensor(f"{name}.bias", rows) for name in names]) if bias else None
        return cls(
            GatedLinear(weight_2ID, bias_2I, activation, fusion=weights.fusion),
            Linear.load(weights, down, inner_size, size, bias=bias),
        )

    def __call__(self, x_RD: Tensor, *, add: Tensor | None = None) -> Tensor:
        """Returns [R, D]; `add`, of the same shape and type, is added to it (a residual)."""
        return self._down(self._both(x_RD), add=add)


class SparseExperts:
    """The sum of a token's K best experts, weighted by the router's softmax; no token is dropped.

    Router, weights and sum are float32 whatever the type of the model.

    Args:
        router_XD: [X, D] float32.
        experts: X of them.
        top_k: K.
        renormalise: Whether the weights of a token's K experts sum to 1, instead of those of all X.

    Raises:
        ModelLoadError: There are fewer than K experts.
    """

    def __init__(self, router_XD: Tensor, experts: Sequence[GatedMlp], top_k: int, *, renormalise: bool) -> None:
        if not 1 <= top_k <= len(experts):
            raise ModelLoadError(f"config.json: num_experts_per_tok is {top_k}, but there are {len(experts)} experts.")
        self._router = Linear(router_XD, None, reorder=False)
        self._experts = experts
        self._top_k = top_k
        self._renormalise = renormalise

    def __call__(self, x_RD: Tensor, rows: Rows) -> Tensor:
        """Returns [R, D]; rows that are no tokens are zero."""
        x_TD = rows.trim(x_RD)
        weight_TK, expert_TK = self._route(x_TD)
        order_A = expert_TK.flatten().argsort(stable=True)
        token_A = order_A // self._top_k
        weight_A1 = weight_TK.flatten()[order_A, None]
        counts = torch.bincount(expert_TK.flatten(), minlength=len(self._experts)).tolist()
        sum_RD = torch.zeros(x_RD.shape, device=x_RD.device)
        parts = zip(self._experts, token_A.split(counts), weight_A1.split(counts), strict=True)
        for expert, token_M, weight_M1 in parts:
            if len(token_M):
                sum_RD.index_add_(0, token_M, _run(expert, x_TD, token_M).float() * weight_M1)
        return sum_RD.to(x_RD.dtype)

    def _route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns weights and numbers of each token's experts, [T, K] each."""
        logits_TX = self._router(x_TD.float())
        if not self._renormalise:
            weight_TK, expert_TK = logits_TX.softmax(-1).topk(self._top_k, dim=-1)
            return weight_TK, expert_TK
        logits_TK, expert_TK = logits_TX.topk(self._top_k, dim=-1)
        return logits_TK.softmax(-1), expert_TK


def _run(expert: GatedMlp, x_TD: Tensor, token_M: Tensor) -> Tensor:
    """Returns the expert's [M, D], in as many rows as oneDNN has kernels for (see rows.py)."""
    num_rows = len(token_M)
    if x_TD.device.type == "cpu":
        token_M = F.pad(token_M, (0, round_up(num_rows) - num_rows))
    return expert(x_TD[token_M])[:num_rows]
