"""Attention over a packed batch: every sequence attends to itself alone.

The only operation that looks at sequence borders before pooling. Knows nothing about projections, rotary positions or
models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ..backends import FLOAT_DTYPES, check_cu_seqlens, check_softcap, describe, takes_tensor_cores
from ._torch import attention_paged_sdpa, attention_sdpa, attention_varlen, takes_varlen

Backend = Literal["sdpa", "varlen", "triton"]
PagedBackend = Literal["sdpa", "triton"]

__all__ = ["MAX_HEAD_SIZE", "Backend", "PagedBackend", "PagedLengths", "attention", "attention_paged"]

# The largest head that the triton kernel has a tile for.
MAX_HEAD_SIZE = 256


@dataclass(frozen=True, slots=True, eq=False)
class PagedLengths:
    """The lengths of a batch of chunks, checked once for all layers. `of` makes one.

    Attributes:
        seq_lens: N numbers of rows.
        context_lens: N numbers of tokens before the chunk.
        num_rows: Sum of `seq_lens`.
        longest: Largest of `seq_lens`; 0 without any.
        longest_sequence: Largest sum of both numbers of one chunk; 0 without any.
    """

    seq_lens: Sequence[int]
    context_lens: Sequence[int]
    num_rows: int
    longest: int
    longest_sequence: int

    @classmethod
    def of(cls, seq_lens: Sequence[int], context_lens: Sequence[int]) -> PagedLengths:
        """Returns the lengths that `attention_paged` takes.

        Raises:
            ValueError: There are not as many of both, or one is negative.
        """
        num_seqs = len(seq_lens)
        if len(context_lens) != num_seqs or min(context_lens, default=0) < 0 or min(seq_lens, default=0) < 0:
            raise ValueError(
                f"seq_lens and context_lens must be {num_seqs} numbers from 0 on each, "
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
    """softmax(scale * q k^T + relative_bias) v, within each sequence of a packed batch. Inference only.

    Token i of a sequence sees the tokens j of the same sequence with i - window[0] <= j <= i + window[1], and j <= i
    if causal. Nothing else of the batch enters its arithmetic: a NaN in one sequence stays there, and in float32 a
    sequence gives the same rows alone and in any batch within 1e-6. Held to the float32 reference within 1e-5
    (float32) and 3e-2 (bfloat16, float16) of the largest absolute value of `v`.

    Args:
        q: [T, H, K], float32/bfloat16/float16. Rows may be strided. Not modified.
        k: [T, Hkv, K]. H must be a multiple of Hkv; query head h reads key head h // (H / Hkv). Not modified.
        v: [T, Hkv, K]. Not modified.
        cu_seqlens: [N+1], int32, same device.
        seq_lens: N lengths on the host, equal to the differences of `cu_seqlens`; they sum to T. A length may be 0.
            On a CPU, neighbours of equal length share a call.
        max_seqlen: The largest of `seq_lens`.
        scale: Factor of the scores.
        is_causal: Whether a token sees only itself and earlier ones.
        window: (left, right) reach of local attention, in tokens; a negative number is no limit. None is (-1, -1).
        relative_bias: [H, Lb, Lb], added to the scaled scores; Lb >= max_seqlen. A shorter sequence uses its first
            rows and columns, which is right for any bias that depends on (i, j) alone. Fastest in the dtype of q.
        softcap: c > 0: the scaled scores s become c * tanh(s / c), before the bias (Gemma 2). None: they stay.
        backend: None chooses by device and dtype. On CPU: "sdpa". On CUDA: "varlen" (flash attention) for 16 bits
            without bias and cap; else "triton", or without it (or Ampere, or for heads of more than 256) "sdpa".
            "triton" takes positive scales, "varlen" no cap and no bias.

    Returns:
        [T, H, K], dtype and device of q, contiguous.

    Raises:
        ValueError: Shapes, dtypes or lengths do not fit together; the message says which and how.
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
            raise ValueError("the varlen backend knows no softcap and no relative_bias")
        return attention_varlen(q, k, v, cu_seqlens, max_seqlen, scale, reach)
    if backend == "triton":
        if scale <= 0:
            raise ValueError(f"the triton backend takes a positive scale, got {scale}")
        from ._triton import attention_triton

        return attention_triton(q, k, v, cu_seqlens, longest, scale, reach, softcap, relative_bias)
    raise ValueError(f"backend must be one of {get_args(Backend)}, got {backend!r}")


def _reach(window: tuple[int, int] | None, is_causal: bool, longest: int) -> tuple[int, int]:
    """(left, right): the window with the causal limit in it; -1 where it hides nothing of a sequence of `longest`."""
    left, right = window or (-1, -1)
    if is_causal:
        right = 0
    return left if 0 <= left < longest - 1 else -1, right if 0 <= right < longest - 1 else -1


def _choose(q: Tensor, relative_bias: Tensor | None, softcap: float | None) -> Backend:
    if softcap is None and takes_varlen(q, relative_bias):
        return "varlen"
    return "triton" if q.shape[2] <= MAX_HEAD_SIZE and takes_tensor_cores(q.device) else "sdpa"


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
    """Checks shapes, types and lengths. Runs once a layer and takes a few microseconds."""
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q must be [T, H, K], k and v [T, Hkv, K], got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"the heads of q must be a multiple of those of k, got {q.shape[1]} and {k.shape[1]}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in FLOAT_DTYPES:
        raise ValueError(f"q, k and v must share float32, bfloat16 or float16, got {q.dtype}, {k.dtype}, {v.dtype}")
    check_cu_seqlens(cu_seqlens, len(seq_lens))
    num_tokens = sum(seq_lens)
    if num_tokens != q.shape[0] or longest > max_seqlen:
        raise ValueError(
            f"seq_lens must sum to the {q.shape[0]} rows of q and not pass max_seqlen {max_seqlen}, "
            f"got a sum of {num_tokens} and a largest of {longest}"
        )
    if relative_bias is not None:
        heads, rows, columns = relative_bias.shape
        if heads != q.shape[1] or rows != columns or rows < max_seqlen:
            raise ValueError(
                f"relative_bias must be [{q.shape[1]}, Lb, Lb] with Lb >= {max_seqlen}, got {list(relative_bias.shape)}"
            )


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
    """Causal softmax(scale * q k^T) v of chunks of sequences. Keys and values lie in blocks. Inference only.

    Row i of chunk n is token context_lens[n] + i of its sequence. It sees the tokens up to itself (and from its
    position - window[0] on), all of which must be in the caches: store the chunk before. Chunks of one
    sequence give the rows that `attention` gives for the whole of it, to the rounding of sums. Nothing is read that
    the chunks do not see but the rest of a token's own sequence: other blocks, and the end of the last block, may hold
    anything, NaN included. Held to the float32 reference within 1e-5 (float32) and 3e-2 (bfloat16, float16) of the
    largest absolute value of `v_cache` that is seen.

    Args:
        q: [T, H, K], float32/bfloat16/float16: the rows of the chunks, packed. Rows may be strided. Not modified.
        k_cache: [P, block_size, Hkv, K], dtype and device of q, contiguous. H must be a multiple of Hkv. Not modified.
        v_cache: As `k_cache`.
        block_tables: [N, M], int32, on the CPU or the device of q: block_tables[n, j // block_size] is the block of
            token j of sequence n. Entries after a sequence's last block are not read. Values
            are not checked.
        cu_seqlens: [N+1], int32, device of q: first row of each chunk, and T.
        seq_lens: N numbers of rows on the host, equal to the differences of `cu_seqlens`. A chunk may be empty.
        context_lens: N numbers of tokens before the chunk, on the host.
        scale: Factor of the scores.
        window: (left, right) reach in tokens; a negative number is no limit. Right is none in any case: it is causal.
        softcap: c > 0: the scaled scores s become c * tanh(s / c) (Gemma 2). None: they stay.
        context_lens_on_device: [N], int32, `context_lens` on the device of q, so that not every layer copies them.
            Read by "triton" alone.
        lengths: The result of `PagedLengths.of` for the same `seq_lens` and `context_lens`. Make it once per batch and
            pass it in every layer; None, or one of other lists, checks them anew.
        backend: None takes "triton" on CUDA if that is installed, the device has compute capability 8.0 or later and
            K <= 256, else "sdpa".

    Returns:
        [T, H, K], dtype and device of q, contiguous.

    Raises:
        ValueError: Shapes, dtypes, devices, strides or lengths do not fit together; the message says which and how.
    """
    if lengths is None or lengths.seq_lens is not seq_lens or lengths.context_lens is not context_lens:
        lengths = PagedLengths.of(seq_lens, context_lens)
    _check_paged(q, k_cache, v_cache, block_tables, cu_seqlens, lengths, softcap)
    left = -1 if window is None or window[0] < 0 else window[0]
    if backend is None:
        backend = _choose_paged(q)
    if backend == "triton":
        from ._triton import attention_triton

        if lengths.longest == 0:
            return torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if context_lens_on_device is None:
            context_lens_on_device = torch.tensor(context_lens, dtype=torch.int32).to(q.device)
        tables = block_tables.to(q.device)
        return attention_triton(
            q,
            k_cache,
            v_cache,
            cu_seqlens,
            lengths.longest,
            scale,
            (left, 0),
            softcap,
            None,
            tables,
            context_lens_on_device,
        )
    if backend == "sdpa":
        return attention_paged_sdpa(q, k_cache, v_cache, block_tables, seq_lens, context_lens, scale, left, softcap)
    raise ValueError(f"backend must be one of {get_args(PagedBackend)}, got {backend!r}")


def _choose_paged(q: Tensor) -> PagedBackend:
    return "triton" if q.shape[2] <= MAX_HEAD_SIZE and takes_tensor_cores(q.device) else "sdpa"


def _check_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    lengths: PagedLengths,
    softcap: float | None,
) -> None:
    """Checks shapes, types, devices and lengths. Runs once a layer and takes a few microseconds."""
    if q.dim() != 3 or k_cache.dim() != 4 or k_cache.shape != v_cache.shape or q.shape[2] != k_cache.shape[3]:
        raise ValueError(
            f"q must be [T, H, K], the caches [P, block_size, Hkv, K], "
            f"got {list(q.shape)}, {list(k_cache.shape)}, {list(v_cache.shape)}"
        )
    if q.shape[1] % k_cache.shape[2]:
        raise ValueError(
            f"the heads of q must be a multiple of those of k_cache, got {q.shape[1]} and {k_cache.shape[2]}"
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
