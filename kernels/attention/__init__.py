"""Attention over a packed batch: every sequence attends to itself alone.

The only operation that looks at sequence borders before pooling. Knows nothing about projections, rotary positions or
models.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from .._packed import FLOAT_DTYPES, check_cu_seqlens, check_softcap, takes_tensor_cores
from ._sdpa import attention_sdpa
from ._tiles import MAX_HEAD_SIZE
from ._varlen import attention_varlen, takes_varlen
from .paged import PagedBackend, PagedLengths, attention_paged

Backend = Literal["sdpa", "varlen", "triton"]

__all__ = ["Backend", "PagedBackend", "PagedLengths", "attention", "attention_paged"]


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
