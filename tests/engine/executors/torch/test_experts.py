"""Sorted experts with grouped products, as on CUDA, give the results of a loop over experts."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from penstock.engine.executors.torch.layers.experts import Experts, ExpertStack, OneByOneExperts, SortedExperts

NUM_EXPERTS, SIZE, INNER = 5, 16, 24
ROUTINGS = {
    "random": lambda numbers: torch.rand(21, NUM_EXPERTS, generator=numbers).topk(2).indices,
    "unused_experts": lambda numbers: torch.tensor([[0, 3], [3, 0], [3, 2]]),
    "one_expert_per_token": lambda numbers: torch.randint(0, NUM_EXPERTS, (13, 1), generator=numbers),
}
# float32: sums in another order. bfloat16: each expert's result and the sum are rounded.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def one_by_one(experts: Iterable[tuple[Tensor, Tensor]]) -> Experts:
    return OneByOneExperts(experts, "silu")


def all_sorted(experts: Iterable[tuple[Tensor, Tensor]]) -> Experts:
    return SortedExperts(ExpertStack.of(experts, NUM_EXPERTS), "silu")


def sum_of(kind: Callable[[Iterable[tuple[Tensor, Tensor]]], Experts], routing: str, dtype: torch.dtype) -> Tensor:
    numbers = torch.Generator().manual_seed(3)
    experts = [
        (torch.randn(2 * INNER, SIZE, generator=numbers) / 4, torch.randn(SIZE, INNER, generator=numbers) / 4)
        for _ in range(NUM_EXPERTS)
    ]
    expert_TK = ROUTINGS[routing](numbers)
    x_TD = torch.randn(len(expert_TK), SIZE, generator=numbers).to(dtype)
    weight_TK = torch.rand(expert_TK.shape, generator=numbers)
    sum_TD = torch.zeros(len(expert_TK), SIZE)
    layer = kind(((both.to(dtype), down.to(dtype)) for both, down in experts))
    layer.add_to(sum_TD, x_TD, expert_TK, weight_TK)
    return sum_TD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_sorted_experts_equal_loop_over_experts(routing: str, dtype: torch.dtype) -> None:
    actual = sum_of(all_sorted, routing, dtype)
    expected = sum_of(one_by_one, routing, dtype)
    assert expected.abs().amin(dim=1).max() > 0
    assert (actual - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
