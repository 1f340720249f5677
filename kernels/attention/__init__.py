"""Attention over a packed batch. Each sequence attends to its own tokens only.

Projections, rotary positions and models are outside this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ..backends import FLOAT_DTYPES, can_run_triton_products, check_cu_seqlens, check_softcap, describe
from ._torch import attention_paged_sdpa, attention_sdpa, attention_varlen, bias_block, supports_varlen

Backend = Literal["sdpa", "varlen", "triton"]
PagedBackend = Literal["sdpa", "triton"]

__all__ = ["MAX_HEAD_SIZE", "Backend", "PagedBackend", "PagedLengths", "attention", "attention_paged", "bias_block"]

# Largest head size of the triton kernel.
MAX_HEAD_SIZE = 256


@dataclass(frozen=True, slots=True, eq=False)
class PagedLengths:
    """Lengths of a batch of chunks, checked once for all layers. Created by `of`.

    Attributes:
        seq_lens: Rows of each of the N chunks.
        context_lens: Tokens before each chunk.
        num_rows: Sum of `seq_lens`.
        longest: Rows of the longest chunk; 0 without chunks.
        longest_sequence: Largest context length plus chunk length; 0 without chunks.
    """

    seq_lens: Sequence[int]
    context_lens: Sequence[int]
    num_rows: int
    longest: int
    longest_sequence: int

    @classmethod
    def of(cls, seq_lens: Sequence[int], context_lens: Sequence[int]) -> PagedLengths:
        """Checks and summarises the lengths for `attention_paged`.

        Raises:
            ValueError: The lists differ in length, or a number is negative.
        """
        num_seqs = len(seq_lens)
        if len(context_lens) != num_seqs or min(context_lens, default=0) < 0 or min(seq_lens, default=0) < 0:
            raise ValueError(
                f"seq_lens and context_lens must be {num_seqs} numbers of at least 0 each, "
                f"got {list(seq_lens)} and {list(context_lens)}"
            )
        ends = map(int.__add__, seq_lens, context_lens)
        return cls(seq_lens, context_lens, sum(seq_lens), max(seq_lens, default=0), max(ends, default=0))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Sequence[int],
    *,
    max_seqlen: int,
    scale: float,
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
    relative_bias: Tensor | None = None,
    softcap: float | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Computes softmax(scale * q k^T + relative_bias) v within each sequence of a packed batch. Inference only.

    Token i of a sequence attends to the tokens j of the same sequence with i - window[0] <= j <= i + window[1], and
    j <= i if causal. A NaN in one sequence does not affect another. In float32 the rows of a sequence differ by at most
    1e-6 between batches. Tests allow a difference to the float32 reference of 1e-5 (float32) or 3e-2 (bfloat16,
    float16) of the largest absolute value of `v`.

    Args:
        q: [T, H, K], float32/bfloat16/float16. Rows may be strided. Not modified.
        k: [T, Hkv, K]. H must be a multiple of Hkv; query head h uses key head h // (H / Hkv). Not modified.
        v: [T, Hkv, K]. Not modified.
        cu_seqlens: [N+1], int32, same device.
        seq_lens: N lengths on the host, equal to the differences of `cu_seqlens`; they sum to T. A length may be 0.
            On a CPU, neighbours of equal length share a call.
        max_seqlen: At least the largest of `seq_lens`.
        scale: Factor of the scores.
        is_causal: Whether a token attends only to itself and earlier tokens.
        window: (left, right) sizes of the local attention window in tokens; negative: unlimited. None is (-1, -1).
        relative_bias: [H, 2 * R + 1], added to the scaled scores by distance: column R + j - i for query i and key j;
            R + 1 >= max_seqlen. The last axis is contiguous. Fastest in the dtype of q.
        softcap: c > 0: the scaled scores s become c * tanh(s / c), before the bias (Gemma 2). None: no cap.
        backend: None chooses by device and dtype. CPU: "sdpa". CUDA: "varlen" (flash attention) for 16-bit dtypes
            without bias and cap; else "triton"; "sdpa" without triton, before Ampere or for head sizes above 256.
            "triton" needs a positive scale. "varlen" supports neither a cap nor a bias.

    Returns:
        [T, H, K], dtype and device of q, contiguous.

    Raises:
        ValueError: Shapes, dtypes or lengths do not match; the message gives expected and actual values.
    """
    longest = max(seq_lens, default=0)
    _check(q, k, v, cu_seqlens, seq_lens, longest, max_seqlen, relative_bias)
    check_softcap(softcap)
    reach = _reach(window, is_causal, longest)
    if backend is None:
        backend = _choose(q, relative_bias, softcap)
    if q.shape[0] == 0:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if backend == "sdpa":
        return attention_sdpa(q, k, v, seq_lens, scale, reach, relative_bias, softcap)
    if backend == "varlen":
        if softcap is not None or relative_bias is not None:
            raise ValueError("the varlen backend supports neither softcap nor relative_bias")
        return attention_varlen(q, k, v, cu_seqlens, max_seqlen, scale, reach)
    if backend == "triton":
        if scale <= 0:
            raise ValueError(f"the triton backend needs a positive scale, got {scale}")
        from ._triton import attention_triton

        return attention_triton(q, k, v, cu_seqlens, longest, scale, reach, softcap, relative_bias)
    raise ValueError(f"backend must be one of {get_args(Backend)}, got {backend!r}")


def _reach(window: tuple[int, int] | None, is_causal: bool, longest: int) -> tuple[int, int]:
    """Window including the causal limit: (left, right), -1 for a side that masks no key in `longest` tokens."""
    left, right = window or (-1, -1)
    if is_causal:
        right = 0
    return left if 0 <= left < longest - 1 else -1, right if 0 <= right < longest - 1 else -1


def _choose(q: Tensor, relative_bias: Tensor | None, softcap: float | None) -> Backend:
    if softcap is None and supports_varlen(q, relative_bias):
        return "varlen"
    return "triton" if _supports_triton(q) else "sdpa"


def _supports_triton(q: Tensor) -> bool:
    return q.shape[2] <= MAX_HEAD_SIZE and can_run_triton_products(q.device)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Sequence[int],
    longest: int,
    max_seqlen: int,
    relative_bias: Tensor | None,
) -> None:
    """Runs once per layer and takes a few microseconds."""
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q must be [T, H, K], k and v [T, Hkv, K], got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"the number of heads of q must be a multiple of that of k, got {q.shape[1]} and {k.shape[1]}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in FLOAT_DTYPES:
        raise ValueError(f"q, k and v must share float32, bfloat16 or float16, got {q.dtype}, {k.dtype}, {v.dtype}")
    check_cu_seqlens(cu_seqlens, len(seq_lens))
    num_tokens = sum(seq_lens)
    if num_tokens != q.shape[0] or longest > max_seqlen:
        raise ValueError(
            f"seq_lens must sum to the {q.shape[0]} rows of q and not exceed max_seqlen {max_seqlen}, "
            f"got a sum of {num_tokens} and a largest of {longest}"
        )
    if relative_bias is not None:
        shape = list(relative_bias.shape)
        if len(shape) != 2 or shape[0] != q.shape[1] or shape[1] % 2 == 0 or shape[1] // 2 + 1 < max_seqlen:
            raise ValueError(f"relative_bias must be [{q.shape[1]}, 2 * R + 1] with R + 1 >= {max_seqlen}, got {shape}")


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
    context_lens_on_device: Tensor | None = None,
    lengths: PagedLengths | None = None,
    backend: PagedBackend | None = None,
) -> Tensor:
    """Causal attention of chunks of sequences over keys and values in a paged cache. Inference only.

    Row i of chunk n is token context_lens[n] + i of its sequence. It attends to the tokens up to itself, limited by
    window[0]. The caches must already contain the chunk's own keys and values. The chunks of a sequence give the same
    rows as `attention` on the whole sequence, except for the rounding of sums. Other sequences' blocks and the unused
    end of the last block are not read; they may contain NaN. Tests allow a difference to the float32 reference of 1e-5
    (float32) or 3e-2 (bfloat16, float16) of the largest absolute value among the attended rows of `v_cache`.

    Args:
        q: [T, H, K], float32/bfloat16/float16: the rows of the chunks, packed. Rows may be strided. Not modified.
        k_cache: [P, block_size, Hkv, K], dtype and device of q, contiguous. H must be a multiple of Hkv. Not modified.
        v_cache: As `k_cache`.
        block_tables: [N, M], int32, on the CPU or the device of q: block_tables[n, j // block_size] is the block of
            token j of sequence n. Entries after a sequence's last block are not read. Values are not checked.
        cu_seqlens: [N+1], int32, device of q: first row of each chunk, and T.
        seq_lens: Rows of each of the N chunks, on the host, equal to the differences of `cu_seqlens`. May be 0.
        context_lens: Tokens before each chunk, on the host.
        scale: Factor of the scores.
        window: (left, right) sizes of the window in tokens; negative: unlimited. Right is ignored (causal attention).
        softcap: c > 0: the scaled scores s become c * tanh(s / c) (Gemma 2). None: no cap.
        context_lens_on_device: [N], int32, `context_lens` on the device of q. Saves a copy per layer. Only "triton"
            reads it.
        lengths: The result of `PagedLengths.of` for the same `seq_lens` and `context_lens`. Create it once per batch
            and pass it to every layer. If it is None or belongs to other lists, the lengths are checked again.
        backend: None selects "triton" on CUDA if triton is installed, the compute capability is at least 8.0 and
            K <= 256, else "sdpa".

    Returns:
        [T, H, K], dtype and device of q, contiguous.

    Raises:
        ValueError: Shapes, dtypes, devices, strides or lengths do not match; the message gives expected and actual
            values.
    """
    if lengths is None or lengths.seq_lens is not seq_lens or lengths.context_lens is not context_lens:
        lengths = PagedLengths.of(seq_lens, context_lens)
    _check_paged(q, k_cache, v_cache, block_tables, cu_seqlens, lengths, softcap)
    left = -1 if window is None or window[0] < 0 else window[0]
    if backend is None:
        backend = "triton" if _supports_triton(q) else "sdpa"
    if backend == "triton":
        from ._triton import attention_triton

        if lengths.longest == 0:
            return torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if context_lens_on_device is None:
            context_lens_on_device = torch.tensor(context_lens, dtype=torch.int32).to(q.device)
        return attention_triton(
            *(q, k_cache, v_cache, cu_seqlens, lengths.longest, scale, (left, 0), softcap),
            block_tables=block_tables.to(q.device),
            context_lens=context_lens_on_device,
        )
    if backend == "sdpa":
        return attention_paged_sdpa(q, k_cache, v_cache, block_tables, seq_lens, context_lens, scale, left, softcap)
    raise ValueError(f"backend must be one of {get_args(PagedBackend)}, got {backend!r}")


def _check_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    lengths: PagedLengths,
    softcap: float | None,
) -> None:
    """Runs once per layer and takes a few microseconds."""
    if q.dim() != 3 or k_cache.dim() != 4 or k_cache.shape != v_cache.shape or q.shape[2] != k_cache.shape[3]:
        raise ValueError(
            f"q must be [T, H, K], the caches [P, block_size, Hkv, K], "
            f"got {list(q.shape)}, {list(k_cache.shape)}, {list(v_cache.shape)}"
        )
    if q.shape[1] % k_cache.shape[2]:
        raise ValueError(
            f"the number of heads of q must be a multiple of that of k_cache, got {q.shape[1]} and {k_cache.shape[2]}"
        )
    if not q.dtype == k_cache.dtype == v_cache.dtype or q.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"q and the caches must share float32, bfloat16 or float16, got {q.dtype}, {k_cache.dtype}, {v_cache.dtype}"
        )
    if not q.device == k_cache.device == v_cache.device == cu_seqlens.device:
        raise ValueError(f"the caches and cu_seqlens must be on {q.device} like q")
    if not k_cache.is_contiguous() or not v_cache.is_contiguous():
        raise ValueError("k_cache and v_cache must be contiguous")
    num_seqs = len(lengths.seq_lens)
    check_cu_seqlens(cu_seqlens, num_seqs)
    if lengths.num_rows != q.shape[0]:
        raise ValueError(f"seq_lens must sum to the {q.shape[0]} rows of q, got a sum of {lengths.num_rows}")
    if block_tables.dim() != 2 or block_tables.shape[0] != num_seqs or block_tables.dtype != torch.int32:
        raise ValueError(f"block_tables must be int32 [{num_seqs}, M], got {describe(block_tables)}")
    if lengths.longest_sequence > block_tables.shape[1] * k_cache.shape[1]:
        raise ValueError(
            f"block_tables hold {block_tables.shape[1]} blocks of {k_cache.shape[1]} tokens, "
            f"too few for {lengths.longest_sequence}"
        )
    check_softcap(softcap)
