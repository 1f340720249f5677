"""The mixture of experts, sorted and in grouped products as on CUDA, gives what expert after expert gives."""

import pytest
import torch
from torch import Tensor

from penstock.engine.layers.experts import OneByOneExperts, SortedExperts

NUM_EXPERTS, SIZE, INNER = 5, 16, 24
ROUTINGS = {
    "any": lambda numbers: torch.rand(21, NUM_EXPERTS, generator=numbers).topk(2).indices,
    "all_to_two": lambda numbers: torch.tensor([[4, 1]]).expand(9, 2),
    "some_unused": lambda numbers: torch.tensor([[0, 3], [3, 0], [3, 2]]),
    "one_token": lambda numbers: torch.tensor([[2, 0]]),
    "one_expert_each": lambda numbers: torch.randint(0, NUM_EXPERTS, (13, 1), generator=numbers),
    "all_of_them": lambda numbers: torch.rand(7, NUM_EXPERTS, generator=numbers).argsort(),
}
# float32: sums in another order. bfloat16: an expert's result is rounded, and the sum once more.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def sum_of(kind: type[OneByOneExperts] | type[SortedExperts], routing: str, dtype: torch.dtype) -> tuple[Tensor, int]:
    numbers = torch.Generator().manual_seed(3)
    experts = [
        (torch.randn(2 * INNER, SIZE, generator=numbers) / 4, torch.randn(SIZE, INNER, generator=numbers) / 4)
        for _ in range(NUM_EXPERTS)
    ]
    expert_TK = ROUTINGS[routing](numbers)
    x_TD = torch.randn(len(expert_TK), SIZE, generator=numbers).to(dtype)
    weight_TK = torch.rand(expert_TK.shape, generator=numbers)
    sum_RD = torch.zeros(len(expert_TK) + 3, SIZE)
    layer = kind(((both.to(dtype), down.to(dtype)) for both, down in experts), "silu")
    layer.add_to(sum_RD, x_TD, expert_TK, weight_TK)
    return sum_RD, len(expert_TK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_sorted_experts_equal_one_after_the_other(routing: str, dtype: torch.dtype) -> None:
    actual, num_tokens = sum_of(SortedExperts, routing, dtype)
    expected, _ = sum_of(OneByOneExperts, routing, dtype)
    assert expected[:num_tokens].abs().amin(dim=1).max() > 0
    assert (actual - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    assert not actual[num_tokens:].any()
