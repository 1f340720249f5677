"""Attention of slices over a paged cache: the public function, its checks, the choice of backend."""

from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor

from ._paged_cpu import attention_paged_cpu
from ._paged_reference import attention_paged_reference

PagedBackend = Literal["cpu", "triton", "reference"]


def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    scale: float,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    backend: PagedBackend | None = None,
) -> Tensor:
    """Causal attention of slices of sequences whose keys and values lie in blocks of a cache. Inference only."""
    del cu_seqlens
    left = window[0] if window is not None else -1
    if backend not in (None, *get_args(PagedBackend)):
        raise ValueError(f"backend must be one of {get_args(PagedBackend)}, got {backend!r}")
    run = attention_paged_reference if backend == "reference" else attention_paged_cpu
    return run(q, k_cache, v_cache, block_tables, seq_lens, context_lens, scale, left, softcap)
