"""Reference of maxsim: one document and one query token after the other, in float32."""

from collections.abc import Sequence

import torch
from torch import Tensor


def maxsim_reference(
    queries: Tensor, documents: Tensor, query_lens: Sequence[int], document_lens: Sequence[int], query_of: Sequence[int]
) -> Tensor:
    """Same as `maxsim`."""
    query_rows = queries.float().split(list(query_lens))
    out = torch.zeros(len(document_lens), max(query_lens), device=queries.device)
    for n, rows in enumerate(documents.float().split(list(document_lens))):
        for i, query_row in enumerate(query_rows[query_of[n]]):
            if len(rows):
                out[n, i] = (rows * query_row).sum(dim=1).amax()
    return out
