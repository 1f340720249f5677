"""Kernels that see rows: pooling, norms, gates, grouped products, late interaction."""

from __future__ import annotations

from functools import partial

import torch

from penstock.kernels.gated import GateActivation, gated, gated_norm
from penstock.kernels.grouped_linear import grouped_linear
from penstock.kernels.maxsim import maxsim
from penstock.kernels.norm import Embeddings, Norm, NormKind, add_norm, embed_norm
from penstock.kernels.pooling import pool

from .work import Groups, Inputs, Packed, Work


def pooling(kind: str, inputs: Inputs, size: Packed) -> Work:
    """Pools, normalises."""
    hidden = inputs.normal(sum(size.lengths), size.width)
    call = partial(
        pool,
        hidden,
        inputs.borders(size.lengths),
        kind,
        normalize=True,
        max_seqlen=max(size.lengths),  # type: ignore[arg-type]
    )
    read = hidden.nbytes if kind != "cls" else len(size.lengths) * size.width * hidden.itemsize
    return Work(call, read + 4 * len(size.lengths) * size.width)


def sum_and_norm(kind: NormKind, inputs: Inputs, size: Packed) -> Work:
    """Adds and normalises; before a decoder's layer the sum is wanted too."""
    x, residual = (inputs.normal(sum(size.lengths), size.width) for _ in range(2))
    norm = Norm(kind, inputs.normal(size.width), inputs.normal(size.width) if kind == "layer" else None, 1e-6)
    call = partial(add_norm, x, norm, residual=residual, return_sum=kind == "rms")
    return Work(call, (4 if kind == "rms" else 3) * x.nbytes)


def embedding(inputs: Inputs, size: Packed) -> Work:
    """Looks up words and places, adds and normalises."""
    tokens, words, places = sum(size.lengths), 30_522, 1024
    tables = Embeddings(
        word=inputs.normal(words, size.width),
        position=inputs.normal(places, size.width, dtype=torch.float32),
        num_positions=512,
    )
    norm = Norm(
        "layer", inputs.normal(size.width, dtype=torch.float32), inputs.normal(size.width, dtype=torch.float32), 1e-6
    )
    ids, positions = (
        torch.randint(0, rows, (tokens,), generator=torch.Generator().manual_seed(0)).to(inputs.device)
        for rows in (words, 512)
    )
    call = partial(embed_norm, ids, tables, norm, positions=positions, out_dtype=inputs.dtype)
    # Places are read from the cache.
    return Work(call, tokens * (2 * size.width * tables.word.itemsize + 2 * ids.itemsize))


def gate(activation: GateActivation, inputs: Inputs, size: Packed) -> Work:
    """Multiplies one half with the activation of the other; `width` is that of the result."""
    both = inputs.normal(sum(size.lengths), 2 * size.width)
    return Work(partial(gated, both, activation), both.nbytes * 3 // 2)


def gate_and_norm(num_groups: int, inputs: Inputs, size: Packed) -> Work:
    """Multiplies with the gate of Mamba-2 and normalises groups of columns; the gate is part of a wider product."""
    x = inputs.normal(sum(size.lengths), size.width)
    gate = inputs.normal(len(x), 2 * size.width)[:, : size.width]
    weight = inputs.normal(size.width, dtype=torch.float32)
    return Work(partial(gated_norm, x, gate, weight, num_groups, 1e-6), 3 * x.nbytes)


def experts(inputs: Inputs, size: Groups) -> Work:
    """Multiplies the rows of each group with its own matrix."""
    x = inputs.normal(sum(size.lengths), size.inputs)
    weight = inputs.normal(len(size.lengths), size.outputs, size.inputs)
    ends = inputs.borders(size.lengths)[1:].contiguous()
    moved = x.nbytes + weight.nbytes + len(x) * size.outputs * x.itemsize
    return Work(partial(grouped_linear, x, weight, ends), moved, 2 * len(x) * size.inputs * size.outputs)


def late_interaction(inputs: Inputs, size: Packed) -> Work:
    """Compares one query of 32 tokens with documents."""
    query = torch.nn.functional.normalize(inputs.normal(32, size.width), dim=1)
    documents = torch.nn.functional.normalize(inputs.normal(sum(size.lengths), size.width), dim=1)
    lengths = {"query_lens": (32,), "document_lens": size.lengths, "query_of": (0,) * len(size.lengths)}
    operations = 2 * 32 * documents.numel()
    return Work(partial(maxsim, query, documents, **lengths), documents.nbytes, operations)
