"""MaxSim in torch: one product for neighbours that share a query, then a maximum per document. CPU, and no triton."""

from collections.abc import Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor

# Similarities held at once, 4 bytes each.
MAX_SIMILARITIES = 1 << 22


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
    """Cuts neighbours into runs of at most `max_rows` rows; a longer document stands alone."""
    blocks: list[list[int]] = []
    num_rows = 0
    for n in members:
        num_rows += lengths[n]
        if not blocks or num_rows > max_rows:
            blocks.append([])
            num_rows = lengths[n]
        blocks[-1].append(n)
    return blocks
