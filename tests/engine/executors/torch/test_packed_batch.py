"""PackedBatch lays sequences end to end."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.engine.executors.torch.packed_batch import PackedBatch
from penstock.engine.protocol.request import TokenizedInput

CPU = torch.device("cpu")


@pytest.mark.parametrize("lengths", [[1], [3, 5], [1, 1, 7, 63]])
@pytest.mark.parametrize("with_types", [False, True])
def test_packing_lays_sequences_end_to_end(lengths: list[int], with_types: bool) -> None:
    numbers = np.random.default_rng(0)
    inputs = [
        TokenizedInput(numbers.integers(0, 99, n).astype(np.int32), n // 2 if with_types else 0, min(2, n - 1))
        for n in lengths
    ]
    batch = PackedBatch.build(inputs, CPU)
    assert batch.input_ids.tolist() == [t for i in inputs for t in i.token_ids.tolist()]
    assert batch.positions.tolist() == [p for n in lengths for p in range(n)]
    assert batch.cu_seqlens.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert batch.cu_seqlens.dtype == torch.int32
    assert (batch.seq_lens, batch.max_seqlen, batch.num_tokens) == (tuple(lengths), max(lengths), sum(lengths))
    types = [int(0 < i.type_boundary <= p) for i in inputs for p in range(len(i))]
    assert (None if batch.token_type_ids is None else batch.token_type_ids.tolist()) == (types if any(types) else None)
    skips = [i.num_prompt_tokens for i in inputs]
    assert (None if batch.skip_tokens is None else batch.skip_tokens.tolist()) == (skips if any(skips) else None)


def test_hidden_tokens_are_grouped_by_length() -> None:
    lengths, hidden = [4, 3, 4, 6, 4], [2, 1, 0, 0, 3]
    inputs = [TokenizedInput(np.arange(n, dtype=np.int32), num_hidden=h) for n, h in zip(lengths, hidden, strict=True)]
    three, four = PackedBatch.build(inputs, CPU).hidden
    assert three.rows.tolist() == [[4, 5, 6]]
    assert three.is_visible.tolist() == [[True, True, False]]
    assert four.rows.tolist() == [[0, 1, 2, 3], [17, 18, 19, 20]]
    assert four.is_visible.tolist() == [[True, True, False, False], [True, False, False, False]]
    assert not PackedBatch.build(inputs[2:4], CPU).hidden
