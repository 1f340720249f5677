"""MaxSim of ColBERT: for each token of a query, the largest dot product with a document's tokens.

Source: Khattab and Zaharia, ColBERT (arXiv 2004.12832), equation 3.
"""

from collections.abc import Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor

from ..backends import FLOAT_DTYPES, Backend, choose, describe

__all__ = ["Backend", "maxsim"]

# Maximum number of similarities in memory, 4 bytes each.
MAX_SIMILARITIES = 1 << 22


def maxsim(
    queries: Tensor,
    documents: Tensor,
    *,
    query_lens: Sequence[int],
    document_lens: Sequence[int],
    query_of: Sequence[int],
    backend: Backend | None = None,
) -> Tensor:
    """Returns out[n, i] = max_j q_i . d_j over the rows d_j of document n and the rows q_i of its query.

    The sum of a row is the MaxSim score of the pair. For a document in several parts, take the maximum of their rows by
    column, then the sum. Columns past the length of the query are 0; the row of a document without rows is 0. A NaN or
    an infinity in one document or query does not affect other pairs.

    Products and sums are float32 (no TF32). Tests allow a difference to the reference of 2e-6 times the product of the
    largest norms.

    Args:
        queries: [S, D], float32/bfloat16/float16: the rows of M queries end to end. Not modified.
        documents: [R, D], dtype and device of `queries`: the rows of N documents end to end. Not modified.
        query_lens: M lengths; they sum to S.
        document_lens: N lengths, which may be 0; they sum to R.
        query_of: Query number of each document, 0 to M-1.
        backend: None selects "triton" if it is installed and the compute capability is at least 8.0, else "torch".

    Returns:
        [N, max(query_lens)] float32.

    Raises:
        ValueError: Shapes, dtypes, devices or lengths do not match; the message names the argument.
    """
    for name, rows, lengths in (("queries", queries, query_lens), ("documents", documents, document_lens)):
        if rows.dim() != 2 or rows.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name} must be [rows, D] float32, bfloat16 or float16, got {describe(rows)}")
        if sum(lengths) != rows.shape[0] or min(lengths, default=0) < 0:
            raise ValueError(f"the lengths of {name} sum to {sum(lengths)}, but there are {rows.shape[0]} rows")
    if (queries.shape[1], queries.dtype, queries.device) != (documents.shape[1], documents.dtype, documents.device):
        raise ValueError(
            "queries and documents must share width, dtype and device, got "
            f"{queries.shape[1]} {queries.dtype} {queries.device} and "
            f"{documents.shape[1]} {documents.dtype} {documents.device}"
        )
    if len(query_of) != len(document_lens):
        raise ValueError(f"query_of has {len(query_of)} values for {len(document_lens)} documents")
    if query_of and not 0 <= min(query_of) <= max(query_of) < len(query_lens):
        raise ValueError(f"query_of must be from 0 to {len(query_lens) - 1}, got {min(query_of)} to {max(query_of)}")

    width = max(query_lens, default=0)
    if not document_lens or not width:
        return queries.new_zeros((len(document_lens), width), dtype=torch.float32)
    backend = choose(backend, queries, has_products=True)
    if backend == "triton":
        from ._triton import maxsim_triton

        return maxsim_triton(queries, documents, query_lens, document_lens, query_of)
    return maxsim_torch(queries, documents, query_lens, document_lens, query_of)


def maxsim_torch(
    queries: Tensor, documents: Tensor, query_lens: Sequence[int], document_lens: Sequence[int], query_of: Sequence[int]
) -> Tensor:
    """Same as `maxsim`."""
    query_rows = queries.float().split(list(query_lens))
    ends = list(accumulate(document_lens))
    out = torch.zeros(len(document_lens), max(query_lens), device=queries.device)
    for query_id, run in groupby(range(len(document_lens)), key=query_of.__getitem__):
        query_QD = query_rows[query_id]
        num_columns = len(query_QD)
        for members in _blocks(list(run), document_lens, MAX_SIMILARITIES // max(num_columns, 1)):
            first = ends[members[0]] - document_lens[members[0]]
            similarities_RQ = documents[first : ends[members[-1]]].float() @ query_QD.t()
            for n in members:
                if document_lens[n]:
                    last = ends[n] - first
                    out[n, :num_columns] = similarities_RQ[last - document_lens[n] : last].amax(dim=0)
    return out


def _blocks(members: list[int], lengths: Sequence[int], max_rows: int) -> list[list[int]]:
    """Splits consecutive documents into blocks of at most `max_rows` rows; a longer document is its own block."""
    blocks: list[list[int]] = []
    num_rows = 0
    for n in members:
        num_rows += lengths[n]
        if not blocks or num_rows > max_rows:
            blocks.append([])
            num_rows = lengths[n]
        blocks[-1].append(n)
    return blocks
