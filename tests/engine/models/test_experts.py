"""The mixture of experts, sorted and in grouped products as on CUDA, gives what expert after expert gives."""

from collections.abc import Callable, Iterable, Iterator
from weakref import ref

import pytest
import torch
from torch import Tensor

from penstock.engine.layers.experts import Experts, OneByOneExperts, SortedExperts

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


def one_by_one(experts: Iterable[tuple[Tensor, Tensor]]) -> Experts:
    return OneByOneExperts(experts, "silu")


def all_sorted(experts: Iterable[tuple[Tensor, Tensor]]) -> Experts:
    return SortedExperts(experts, NUM_EXPERTS, "silu")


def sum_of(
    kind: Callable[[Iterable[tuple[Tensor, Tensor]]], Experts], routing: str, dtype: torch.dtype
) -> tuple[Tensor, int]:
    numbers = torch.Generator().manual_seed(3)
    experts = [
        (torch.randn(2 * INNER, SIZE, generator=numbers) / 4, torch.randn(SIZE, INNER, generator=numbers) / 4)
        for _ in range(NUM_EXPERTS)
    ]
    expert_TK = ROUTINGS[routing](numbers)
    x_TD = torch.randn(len(expert_TK), SIZE, generator=numbers).to(dtype)
    weight_TK = torch.rand(expert_TK.shape, generator=numbers)
    sum_RD = torch.zeros(len(expert_TK) + 3, SIZE)
    layer = kind(((both.to(dtype), down.to(dtype)) for both, down in experts))
    layer.add_to(sum_RD, x_TD, expert_TK, weight_TK)
    return sum_RD, len(expert_TK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_sorted_experts_equal_one_after_the_other(routing: str, dtype: torch.dtype) -> None:
    actual, num_tokens = sum_of(all_sorted, routing, dtype)
    expected, _ = sum_of(one_by_one, routing, dtype)
    assert expected[:num_tokens].abs().amin(dim=1).max() > 0
    assert (actual - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    assert not actual[num_tokens:].any()


def test_experts_are_let_go_while_the_next_are_loaded() -> None:
    alive: list[ref[Tensor]] = []
    most = 0

    def loaded() -> Iterator[tuple[Tensor, Tensor]]:
        nonlocal most
        for _ in range(NUM_EXPERTS):
            pair = torch.randn(2 * INNER, SIZE), torch.randn(SIZE, INNER)
            alive.extend(map(ref, pair))
            most = max(most, sum(tensor() is not None for tensor in alive))
            yield pair
            del pair

    SortedExperts(loaded(), NUM_EXPERTS, "silu")
    assert most <= 2 * 2, "more than two experts are held beside the layer"


@pytest.mark.parametrize("num_experts", [NUM_EXPERTS - 1, NUM_EXPERTS + 1])
def test_another_number_of_experts_than_promised(num_experts: int) -> None:
    pairs = [(torch.ones(2 * INNER, SIZE), torch.ones(SIZE, INNER))] * num_experts
    with pytest.raises(ValueError, match="zip"):
        SortedExperts(pairs, NUM_EXPERTS, "silu")
