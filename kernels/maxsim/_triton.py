"""MaxSim on CUDA: one program per document and block of query tokens. Similarities stay in registers."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..backends import on_device, upload

# tl.dot needs at least 16 rows and columns.
MIN_BLOCK_Q = 16
# Larger blocks (64 rows or query tokens) spill registers in float32.
MAX_BLOCK_Q = 32
BLOCK_R = 32
BLOCK_D = 32


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["bounds_ptr", "num_columns"])
def _maxsim_kernel(
    queries_ptr,
    documents_ptr,
    bounds_ptr,
    out_ptr,
    stride_query,
    stride_document,
    width,
    num_columns,
    BLOCK_Q: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[n, i] = max_j q_i . d_j. bounds[n]: first row and length of the query, then of the document."""
    n = tl.program_id(0).to(tl.int64)
    first_query = tl.load(bounds_ptr + 4 * n)
    query_len = tl.load(bounds_ptr + 4 * n + 1)
    first_document = tl.load(bounds_ptr + 4 * n + 2)
    document_len = tl.load(bounds_ptr + 4 * n + 3)
    i = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    is_query = i < query_len
    query_ptr = queries_ptr + (first_query + i.to(tl.int64)) * stride_query
    best = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    for start in range(0, document_len, BLOCK_R):
        j = start + tl.arange(0, BLOCK_R)
        is_document = j < document_len
        document_ptr = documents_ptr + (first_document + j.to(tl.int64)) * stride_document
        similarities = tl.zeros((BLOCK_Q, BLOCK_R), tl.float32)
        for column in range(0, width, BLOCK_D):
            d = column + tl.arange(0, BLOCK_D)
            is_column = d < width
            q = tl.load(query_ptr[:, None] + d[None, :], mask=is_query[:, None] & is_column[None, :], other=0.0)
            k = tl.load(document_ptr[None, :] + d[:, None], mask=is_document[None, :] & is_column[:, None], other=0.0)
            similarities = tl.dot(q.to(tl.float32), k.to(tl.float32), similarities, input_precision="ieee")
        similarities = tl.where(is_document[None, :], similarities, float("-inf"))
        best = _largest(best, tl.reduce(similarities, 1, _largest))
    best = tl.where(is_query & (document_len > 0), best, 0.0)
    tl.store(out_ptr + n * num_columns + i, best, mask=i < num_columns)


def maxsim_triton(
    queries: Tensor, documents: Tensor, query_lens: Sequence[int], document_lens: Sequence[int], query_of: Sequence[int]
) -> Tensor:
    """Same as `maxsim`."""
    query_N = np.asarray(query_of)
    query_lens_M, document_lens_N = np.asarray(query_lens, np.int64), np.asarray(document_lens, np.int64)
    first_query_M, first_document_N = (lengths.cumsum() - lengths for lengths in (query_lens_M, document_lens_N))
    bounds = np.stack([first_query_M[query_N], query_lens_M[query_N], first_document_N, document_lens_N], axis=1)
    num_columns = max(query_lens)
    out = torch.empty(len(document_lens), num_columns, dtype=torch.float32, device=queries.device)
    block_q = min(max(triton.next_power_of_2(num_columns), MIN_BLOCK_Q), MAX_BLOCK_Q)
    queries, documents = (x if x.stride(1) == 1 else x.contiguous() for x in (queries, documents))
    with on_device(queries):
        _maxsim_kernel[(len(document_lens), triton.cdiv(num_columns, block_q))](
            queries,
            documents,
            upload(torch.from_numpy(bounds), queries.device),
            out,
            queries.stride(0),
            documents.stride(0),
            queries.shape[1],
            num_columns,
            BLOCK_Q=block_q,
            BLOCK_R=BLOCK_R,
            BLOCK_D=BLOCK_D,
            num_warps=4,
        )
    return out
