"""Times kernels/norm and kernels/gated beside the same operations one by one, at models' shapes. Best microseconds.

.venv/bin/python benchmarks/kernels/bench_fused.py --dtype bfloat16 --output benchmarks/results/fused.json

On a CPU, where models do not take these kernels, both sides are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from measure import alternate, parse_arguments, report, require_green_tests
from torch import Tensor

from penstock.kernels.gated import gated
from penstock.kernels.norm import Embeddings, Norm, add_norm, embed_norm

VOCABULARY, POSITIONS = 30_522, 512
# Width and inner width of the MLP. Decoders and ModernBERT have a gate, and go on with the sum.
POST_NORM = {"MiniLM": (384, 1536), "bge-base": (768, 3072), "bge-large": (1024, 4096)}
PRE_NORM = {"modernbert-base": (768, 1152), "Qwen3-0.6B": (1024, 3072)}


@dataclass(frozen=True)
class Work:
    """One piece of elementwise work, both ways, on inputs of its own.

    Attributes:
        name: Operation and model.
        num_bytes: Read and written by the fused kernel.
        apart: Torch's operations one by one, as a model without fusion runs them.
        fused: The kernel.
        reference: Its truth.
    """

    name: str
    num_bytes: int
    apart: Callable[[], Any]
    fused: Callable[[], Any]
    reference: Callable[[], Any]


def make_works(num_tokens: int, dtype: torch.dtype, device: str, *, seed: int = 0) -> Iterator[Work]:
    """Yields the inputs of every model. Another `seed` gives other memory, so that no input is in a CPU cache."""
    torch.manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()

    def rows(width: int) -> Tensor:
        return torch.randn(num_tokens, width, device=device).to(dtype)

    def norm_of(kind: str, width: int) -> Norm:
        weight, bias = (torch.randn(width, device=device).to(dtype) for _ in range(2))
        return Norm(kind, weight, bias if kind == "layer" else None, 1e-6)

    for model, (width, _) in POST_NORM.items():
        norm, x, residual = norm_of("layer", width), rows(width), rows(width)
        run = partial(add_norm, x, norm, residual=residual)
        apart = partial(_add_then_norm, x, residual, norm)
        yield _work(f"add + LayerNorm, {model}", 3 * x.numel() * size, apart, run)
    for model, (width, _) in PRE_NORM.items():
        kind = "rms" if model.startswith("Qwen") else "layer"
        norm, x, residual = norm_of(kind, width), rows(width), rows(width)
        run = partial(add_norm, x, norm, residual=residual, return_sum=True)
        apart = partial(_add_then_norm, x, residual, norm)
        yield _work(f"add + {kind} norm + sum, {model}", 4 * x.numel() * size, apart, run)
    for model, (width, _) in POST_NORM.items():
        norm = norm_of("layer", width)._replace(weight=torch.ones(width, device=device), bias=None)
        tables = Embeddings(
            torch.randn(VOCABULARY, width, device=device).to(dtype),
            torch.randn(2 * POSITIONS, width, device=device),
            POSITIONS,
        )
        ids, places = (torch.randint(0, limit, (num_tokens,), device=device) for limit in (VOCABULARY, POSITIONS))
        types = torch.zeros_like(ids)
        run = partial(embed_norm, ids, tables, norm, positions=places, token_type_ids=types, out_dtype=dtype)
        apart = partial(_embed_then_norm, ids, places, types, tables, norm)
        yield _work(f"embeddings + LayerNorm, {model}", num_tokens * (2 * width * size + 24), apart, run)
    for model, (_, inner) in PRE_NORM.items():
        both = rows(2 * inner)
        activation = "silu" if model.startswith("Qwen") else "gelu"
        run = partial(gated, both, activation)
        apart = partial(_activate_then_multiply, both, F.silu if activation == "silu" else F.gelu)
        yield _work(f"{activation}(gate) * up, {model}", 3 * num_tokens * inner * size, apart, run)


def _work(name: str, num_bytes: int, apart: Callable[[], Any], run: Callable[..., Any]) -> Work:
    return Work(name, num_bytes, apart, run, partial(run, backend="torch"))


def _add_then_norm(x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    sum_ = x + residual
    if norm.kind == "layer":
        return F.layer_norm(sum_, norm.weight.shape, norm.weight, norm.bias, norm.eps), sum_
    return F.rms_norm(sum_, norm.weight.shape, norm.weight, norm.eps), sum_


def _embed_then_norm(ids: Tensor, positions: Tensor, types: Tensor, tables: Embeddings, norm: Norm) -> Tensor:
    assert tables.position is not None
    places = positions + types * tables.num_positions
    sum_ = F.embedding(places, tables.position).add_(F.embedding(ids, tables.word))
    return F.layer_norm(sum_, norm.weight.shape, norm.weight, norm.bias, norm.eps).to(tables.word.dtype)


def _activate_then_multiply(both: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return activation(gate) * up


def main() -> None:
    """Measures everything in every dtype asked for, at 1,024 tokens and at 16,384."""
    args = parse_arguments(__doc__)
    require_green_tests("test_norm.py", "test_gated.py")
    table = []
    for dtype in args.dtype:
        for num_tokens in (1_024, 16_384):
            for work in make_works(num_tokens, getattr(torch, dtype), args.device):
                times_us = alternate({"apart": work.apart, "fused": work.fused}, args.seconds, args.device)
                table.append(
                    {
                        "work": work.name,
                        "tokens": num_tokens,
                        "dtype": dtype,
                        "apart_us": times_us["apart"],
                        "fused_us": times_us["fused"],
                        "times_faster": times_us["apart"] / times_us["fused"],
                        "gb_per_s": work.num_bytes / times_us["fused"] / 1e3,
                    }
                )
    report(table, args)


if __name__ == "__main__":
    main()
