"""A sparse mixture of experts: several MLPs; each token uses a few MLPs.

Source: Shazeer et al., Outrageously Large Neural Networks (arXiv 1701.06538); Fedus et al., Switch Transformers (arXiv
2101.03961).
Shape letters: T packed tokens, D model width, I inner width, X experts, K experts of a token, A pairs
of a token and one of its experts: T * K, M rows of one expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from penstock.kernels.grouped_linear import grouped_linear

from ....families.spec import ExpertsSpec
from ....protocol.errors import ModelLoadError
from .linear import Gate, GatedLinear, Linear, Mlp
from .weights import Fusion, Weights


@dataclass(frozen=True, slots=True, eq=False)
class ExpertStack:
    """The stacked weights of all experts. Iterates over the weights of each expert, as views.

    Attributes:
        both: Gate and up projections, [X, 2 * I, D].
        down: Down projections, [X, D, I].
    """

    both: Tensor
    down: Tensor

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.both, self.down, strict=True)

    @classmethod
    def of(cls, experts: Iterable[tuple[Tensor, Tensor]], num_experts: int) -> Self:
        """Copies experts into a stack one by one, so that only one expert is in memory twice.

        Raises:
            ValueError: `experts` does not have `num_experts` entries.
        """
        stacks: list[Tensor] = []
        for index, tensors in zip(range(num_experts), experts, strict=True):
            if not stacks:
                stacks = [tensor.new_empty(num_experts, *tensor.shape) for tensor in tensors]
            for stack, tensor in zip(stacks, tensors, strict=True):
                stack[index].copy_(tensor)
        return cls(*stacks)


class Experts(Protocol):
    """X MLPs, and the weighted sum of each token's MLPs."""

    def add_to(self, sum_TD: Tensor, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> None:
        """Adds the weighted sum of each token's K experts.

        Args:
            sum_TD: [T, D] float32. Written in place.
            x_TD: [T, D].
            expert_TK: [T, K] int64, indices of the token's experts, all different.
            weight_TK: [T, K] float32.
        """


class SparseExperts:
    """The sum of a token's K best experts, weighted by the router's softmax. No token is dropped.

    Router, weights and sum are float32 in models of every dtype.

    Args:
        router_XD: [X, D] float32.
        experts: Weights of each expert: gate and up [2 * I, D], and down [D, I]. On a GPU an ExpertStack is used
            without a copy.
        activation: Activation of the gate, name as in config.json.
        top_k: K, the experts that run for each token.
        renormalise: Whether the weights of a token's K experts sum to 1. Otherwise the weights of all X experts do.
        mlp: A shared MLP. Its output is added to that of the experts; None: no shared MLP.
        fusion: Fusion of the gates on a GPU.

    Raises:
        ModelLoadError: There are fewer than K experts.
    """

    def __init__(
        self,
        router_XD: Tensor,
        experts: Iterable[tuple[Tensor, Tensor]],
        activation: str,
        top_k: int,
        *,
        renormalise: bool,
        mlp: Mlp | None = None,
        fusion: Fusion = Fusion.NONE,
    ) -> None:
        num_experts = router_XD.shape[0]
        if not 1 <= top_k <= num_experts:
            raise ModelLoadError(f"config.json: num_experts_per_tok is {top_k}, but there are {num_experts} experts.")
        self._router = Linear(router_XD, None, is_head=True)
        self._experts: Experts
        if router_XD.device.type == "cpu":
            self._experts = OneByOneExperts(experts, activation)
        else:
            stack = experts if isinstance(experts, ExpertStack) else ExpertStack.of(experts, num_experts)
            self._experts = SortedExperts(stack, activation, fusion=fusion)
        self._top_k = top_k
        self._renormalise = renormalise
        self._mlp = mlp

    @classmethod
    def load(cls, weights: Weights, spec: ExpertsSpec, mlp: Mlp | None) -> Self:
        """Reads router and experts of a layer. `weights`: view of the layer; `mlp`: see the class."""
        X, D, I = spec.num_experts, spec.up.in_features, spec.down.in_features  # noqa: E741
        assert spec.up.activation is not None
        router_XD = weights.tensor(f"{spec.router}.weight", X, D, dtype=torch.float32)
        scope = weights.scope(spec.prefix)
        experts: Iterable[tuple[Tensor, Tensor]]
        if spec.is_stacked:
            (up,), (down,) = spec.up.names, spec.down.names
            experts = ExpertStack(scope.tensor(f"{up}.weight", X, 2 * I, D), scope.tensor(f"{down}.weight", X, D, I))
        else:
            scopes = (scope.scope(str(index)) for index in range(X))
            experts = ((scope.linear(spec.up)[0], scope.linear(spec.down)[0]) for scope in scopes)
        activation = spec.up.activation
        top_k = spec.top_k
        return cls(router_XD, experts, activation, top_k, renormalise=spec.renormalise, mlp=mlp, fusion=weights.fusion)

    def __call__(self, x_TD: Tensor, *, add: Tensor | None = None) -> Tensor:
        """Returns [T, D]. `add`: a residual of the same shape and dtype, added to the result."""
        weight_TK, expert_TK = self._route(x_TD)
        sum_TD = torch.zeros(x_TD.shape, device=x_TD.device)
        self._experts.add_to(sum_TD, x_TD, expert_TK, weight_TK)
        mixed_TD = sum_TD.to(x_TD.dtype)
        if self._mlp is not None:
            mixed_TD = self._mlp(x_TD, add=mixed_TD)
        return mixed_TD if add is None else mixed_TD.add_(add)

    def _route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns weights and indices of each token's experts, [T, K] each."""
        logits_TX = self._router(x_TD.float())
        if not self._renormalise:
            weight_TK, expert_TK = logits_TX.softmax(-1).topk(self._top_k, dim=-1)
            return weight_TK, expert_TK
        logits_TK, expert_TK = logits_TX.topk(self._top_k, dim=-1)
        return logits_TK.softmax(-1), expert_TK


class OneByOneExperts:
    """Runs experts one after another over their rows, for a CPU. See SparseExperts."""

    def __init__(self, experts: Iterable[tuple[Tensor, Tensor]], activation: str) -> None:
        self._experts = [
            Mlp(GatedLinear(both_2ID, None, activation), Linear(down_DI, None)) for both_2ID, down_DI in experts
        ]

    def add_to(self, sum_TD: Tensor, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> None:
        """Runs the experts one after the other."""
        order_A = expert_TK.flatten().argsort(stable=True)
        token_A = order_A // expert_TK.shape[1]
        weight_A1 = weight_TK.flatten()[order_A, None]
        counts = torch.bincount(expert_TK.flatten(), minlength=len(self._experts)).tolist()
        parts = zip(self._experts, token_A.split(counts), weight_A1.split(counts), strict=True)
        for expert, token_M, weight_M1 in parts:
            if len(token_M):
                sum_TD.index_add_(0, token_M, expert(x_TD[token_M]).float() * weight_M1)


class SortedExperts:
    """Runs all experts in two grouped products over rows sorted by expert. The host does not wait for the counts.

    A token's sum is computed in the order of its experts, without atomic additions, so that it does not depend on the
    batch. See SparseExperts.
    """

    def __init__(self, stack: ExpertStack, activation: str, *, fusion: Fusion = Fusion.NONE) -> None:
        self._both_X2ID = stack.both
        self._down_XDI = stack.down
        self._gate = Gate(activation, fusion)

    def add_to(self, sum_TD: Tensor, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> None:
        """Runs all experts in two grouped products."""
        expert_A, order_A = expert_TK.flatten().sort(stable=True)
        indices_X = torch.arange(len(self._both_X2ID), device=x_TD.device)
        ends_X = torch.searchsorted(expert_A, indices_X, right=True, out_int32=True)
        both_A2I = grouped_linear(x_TD[order_A // expert_TK.shape[1]], self._both_X2ID, ends_X)
        out_AD = grouped_linear(self._gate(both_A2I), self._down_XDI, ends_X)
        row_TK = order_A.argsort().view(expert_TK.shape)
        for row_T, weight_T in zip(row_TK.unbind(1), weight_TK.unbind(1), strict=True):
            sum_TD.addcmul_(out_AD[row_T].float(), weight_T[:, None])
