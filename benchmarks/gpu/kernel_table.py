"""Every kernel with inputs to try it on: a new one is a function here and a line in KERNELS.

Sizes come in pairs: what a kernel is compared with its reference on, and what it is timed on, where the reference would
take too long or too much memory. Shape letters: T rows, D width, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.attention import attention, attention_paged
from penstock.kernels.causal_conv1d import causal_conv1d
from penstock.kernels.gated import GateActivation, gated
from penstock.kernels.grouped_linear import grouped_linear
from penstock.kernels.kv_store import kv_store
from penstock.kernels.maxsim import maxsim
from penstock.kernels.norm import Embeddings, Norm, NormKind, add_norm, embed_norm
from penstock.kernels.pooling import pool
from penstock.kernels.selective_scan import selective_scan
from penstock.kernels.ssd import ssd

Result = Tensor | tuple[Tensor | None, ...] | None


@dataclass(frozen=True, slots=True)
class Work:
    """One call of a kernel, with its inputs.

    Attributes:
        call: Takes `backend`; without it the kernel chooses, as in a server.
        moved_bytes: That have to be read and written at least.
        operations: Floating-point, of matrix products; 0 where memory is what counts.
        written: What is written in place, where nothing is returned.
    """

    call: Callable[..., Result]
    moved_bytes: int
    operations: int = 0
    written: tuple[Tensor, ...] = ()

    def results(self, **options: Any) -> list[Tensor]:
        """Runs it; returns all that it gives."""
        result = self.call(**options)
        tensors = self.written or (result if isinstance(result, tuple) else (result,))
        return [tensor.clone() for tensor in tensors if isinstance(tensor, Tensor)]


class Inputs:
    """Random tensors of one device, the same at every call."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self._numbers = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers, of the kernel's type unless another is named."""
        return torch.randn(shape, generator=self._numbers, device=self.device).to(dtype or self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        """Numbers from 0 to 1, float32."""
        return torch.rand(shape, generator=self._numbers, device=self.device)

    def borders(self, lengths: tuple[int, ...]) -> Tensor:
        """cu_seqlens of these lengths."""
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device)


Make = Callable[[Inputs, Any], Work]


class Kernel(NamedTuple):
    """A line of the table.

    Attributes:
        make: Makes inputs of a size, and the call.
        compared: The size at which it is compared with its reference.
        timed: The size at which it is timed.
        tiny: The size that stands for both where only the code is tried.
        tolerance: Largest error in bfloat16, of the largest value of the reference.
    """

    make: Make
    compared: Any
    timed: Any
    tiny: Any
    tolerance: float = 1e-2


class Packed(NamedTuple):
    """Rows of sequences."""

    lengths: tuple[int, ...]
    width: int


class Heads(NamedTuple):
    """Queries and keys of sequences; `past` is the number of tokens before each."""

    lengths: tuple[int, ...]
    heads: int = 12
    kv_heads: int = 12
    size: int = 64
    past: int = 0


class Groups(NamedTuple):
    """Rows of groups, each with a matrix of its own."""

    lengths: tuple[int, ...]
    inputs: int
    outputs: int


class States(NamedTuple):
    """Sizes of a state space layer."""

    lengths: tuple[int, ...]
    heads: int
    size: int
    state: int


ODD: Final = (1, 300, 3, 257, 64, 65, 0, 130)


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


def packed_attention(softcap: float | None, inputs: Inputs, size: Heads) -> Work:
    """Attends within sequences, two ways."""
    tokens = sum(size.lengths)
    both = size.heads + 2 * size.kv_heads
    qkv = inputs.normal(tokens, both, size.size)
    q, k, v = qkv.split([size.heads, size.kv_heads, size.kv_heads], dim=1)
    call = partial(
        attention,
        *(q, k, v, inputs.borders(size.lengths), size.lengths),
        max_seqlen=max(size.lengths),
        scale=size.size**-0.5,
        softcap=softcap,
    )
    operations = 4 * size.heads * size.size * sum(length**2 for length in size.lengths)
    return Work(call, qkv.nbytes + q.numel() * q.itemsize, operations)


def paged_attention(inputs: Inputs, size: Heads) -> Work:
    """Attends to a past in blocks of 16 tokens."""
    block = 16
    counts = [-(-(size.past + length) // block) for length in size.lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int()
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, part in zip(tables, order.split(counts), strict=True):
        row[: len(part)] = part
    caches = [inputs.normal(sum(counts), block, size.kv_heads, size.size) for _ in range(2)]
    q = inputs.normal(sum(size.lengths), size.heads, size.size)
    call = partial(
        attention_paged,
        *(q, *caches, tables.to(inputs.device), inputs.borders(size.lengths), size.lengths),
        (size.past,) * len(size.lengths),
        scale=size.size**-0.5,
    )
    seen = sum(length * (size.past + (length + 1) / 2) for length in size.lengths)
    return Work(call, 2 * q.nbytes + 2 * caches[0].nbytes, int(4 * size.heads * size.size * seen))


def storing(inputs: Inputs, size: Heads) -> Work:
    """Puts keys and values into their blocks."""
    tokens, block = sum(size.lengths), 16
    k, v = inputs.normal(tokens, 2 * size.kv_heads, size.size).chunk(2, dim=1)
    num_blocks = 2 * -(-tokens // block)
    caches = tuple(
        torch.zeros(num_blocks, block, size.kv_heads, size.size, dtype=k.dtype, device=k.device) for _ in "kv"
    )
    slots = torch.randperm(num_blocks * block, generator=torch.Generator().manual_seed(0))[:tokens].to(inputs.device)
    call = partial(kv_store, k, v, *caches, rows=None, slots=slots)
    return Work(call, 4 * k.numel() * k.itemsize + slots.nbytes, written=caches)


def convolution(inputs: Inputs, size: Packed) -> Work:
    """Convolves along time."""
    x, weight, bias = (
        inputs.normal(sum(size.lengths), size.width),
        inputs.normal(size.width, 4),
        inputs.normal(size.width),
    )
    call = partial(causal_conv1d, x, weight, bias, inputs.borders(size.lengths), size.lengths, activation="silu")
    return Work(call, 2 * x.nbytes)


def mamba_scan(inputs: Inputs, size: Packed) -> Work:
    """Runs the recurrence of Mamba, with 16 states a channel."""
    tokens, states = sum(size.lengths), 16
    x, (b, c) = inputs.normal(tokens, size.width), inputs.normal(tokens, 2 * states).chunk(2, dim=1)
    dt, a = 0.1 * inputs.uniform(tokens, size.width), -16 * inputs.uniform(size.width, states)
    call = partial(selective_scan, x, dt, a, b, c, inputs.borders(size.lengths), size.lengths)
    return Work(call, 2 * x.nbytes + dt.nbytes + 2 * tokens * states * x.itemsize)


def duality(inputs: Inputs, size: States) -> Work:
    """Runs the recurrence of Mamba-2, with one group."""
    tokens, inner = sum(size.lengths), size.heads * size.size
    xbc = inputs.normal(tokens, inner + 2 * size.state)
    x, b, c = xbc.split([inner, size.state, size.state], dim=1)
    dt, a = 0.1 * inputs.uniform(tokens, size.heads), -16 * inputs.uniform(size.heads)
    borders = inputs.borders(size.lengths)
    call = partial(ssd, x.unflatten(1, (size.heads, size.size)), dt, a, b[:, None], c[:, None], borders, size.lengths)
    return Work(call, xbc.nbytes + tokens * inner * x.itemsize + dt.nbytes)


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
        place=inputs.normal(places, size.width, dtype=torch.float32),
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


_WIDE: Final = Packed((512,) * 128, 1024)
"""64k tokens of bge-large: the size that the goal of bandwidth is stated for."""

KERNELS: Final = {
    "pooling mean": Kernel(partial(pooling, "mean"), Packed(ODD, 1000), _WIDE, Packed((3, 9), 8)),
    "pooling max": Kernel(partial(pooling, "max"), Packed(ODD, 1000), _WIDE, Packed((3, 9), 8)),
    "pooling mean, short": Kernel(
        partial(pooling, "mean"), Packed((7,) * 99, 384), Packed((16,) * 4096, 384), Packed((3, 9), 8)
    ),
    "pooling mean, one long": Kernel(
        partial(pooling, "mean"), Packed((5000,), 1024), Packed((65_536,), 1024), Packed((300,), 8)
    ),
    "pooling cls": Kernel(partial(pooling, "cls"), Packed(ODD, 1000), _WIDE, Packed((3, 9), 8)),
    "sum and layer norm": Kernel(partial(sum_and_norm, "layer"), Packed(ODD, 1000), _WIDE, Packed((3, 9), 8)),
    "sum and RMS norm": Kernel(partial(sum_and_norm, "rms"), Packed(ODD, 1000), _WIDE, Packed((3, 9), 8)),
    "embedding": Kernel(embedding, Packed(ODD, 1000), _WIDE, Packed((3, 9), 8)),
    "gate, silu": Kernel(partial(gate, "silu"), Packed(ODD, 1000), Packed((512,) * 32, 3072), Packed((3, 9), 8)),
    "gate, gelu": Kernel(partial(gate, "gelu"), Packed(ODD, 1000), Packed((512,) * 32, 1152), Packed((3, 9), 8)),
    "attention": Kernel(partial(packed_attention, None), Heads(ODD), Heads((512,) * 32), Heads((3, 9), 2, 2, 16), 3e-2),
    "attention, grouped heads": Kernel(
        partial(packed_attention, None),
        Heads(ODD, 8, 2, 128),
        Heads((512,) * 32, 16, 8, 128),
        Heads((9,), 4, 2, 16),
        3e-2,
    ),
    "attention, capped": Kernel(
        partial(packed_attention, 50.0), Heads(ODD, 8, 4), Heads((512,) * 32, 8, 4, 128), Heads((9,), 4, 2, 16), 3e-2
    ),
    "attention, paged": Kernel(
        paged_attention,
        Heads((70, 1, 130), 8, 2, 128, 300),
        Heads((512,) * 4, 16, 8, 128, 8192),
        Heads((3, 9), 4, 2, 16, 20),
        3e-2,
    ),
    "kv_store": Kernel(storing, Heads(ODD, 8, 2, 128), Heads((512,) * 32, 16, 8, 128), Heads((3, 9), 4, 2, 16), 0.0),
    "causal_conv1d": Kernel(convolution, Packed(ODD, 1000), Packed((512,) * 32, 3328), Packed((3, 9), 8)),
    "selective_scan": Kernel(mamba_scan, Packed(ODD, 200), Packed((512,) * 32, 1536), Packed((3, 9), 8)),
    "ssd": Kernel(duality, States(ODD, 6, 64, 128), States((512,) * 32, 24, 64, 128), States((3, 9), 2, 16, 16)),
    "grouped_linear": Kernel(
        experts, Groups(ODD, 200, 312), Groups((1024,) * 16, 1024, 4096), Groups((3, 0, 9), 16, 24)
    ),
    "maxsim": Kernel(late_interaction, Packed(ODD, 128), Packed((180,) * 1000, 128), Packed((3, 9), 16), 1e-5),
}
