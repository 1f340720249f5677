"""Token vectors: skip words, MaxSim with a query, and several outputs of a sequence."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.engine.executors.torch.packed_batch import ModelOutput
from penstock.engine.pooling import ChunkedPoolingManager, ModelPooler, TokenHeads
from penstock.engine.pooling.row_ops import RowOps
from penstock.engine.pooling.tensor_ops import TensorOps
from penstock.engine.protocol.multi_vector import MultiVector, maxsim_score
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingTask

from .conftest import HIDDEN_SIZE, LENGTHS, TinyModel, make_info, make_metadata

SKIP_IDS = (3, 5)
NUM_SEQS = len(LENGTHS)


@pytest.fixture
def token_ids() -> Tensor:
    ids = torch.randint(0, 8, (sum(LENGTHS),), generator=torch.Generator().manual_seed(2))
    ids[0] = SKIP_IDS[0]  # the first document has no vector
    return ids


def make_pooler(
    *, skips_queries: bool = False, skip_ids: tuple[int, ...] = SKIP_IDS, ops: RowOps[Any] | None = None
) -> tuple[ModelPooler[Any], PoolingParams]:
    multi_vector = MultiVector(skip_words=("x",), skips_queries=skips_queries)
    info = make_info(sequence_pooling=(), multi_vector=multi_vector, embedding_size=HIDDEN_SIZE, normalize=True)
    params = PoolingParams().resolved(PoolingTask.TOKEN_EMBED, info)
    model = TinyModel()
    token_heads: TokenHeads[Any] = TokenHeads(skip_ids=skip_ids)
    return ModelPooler(info, ops or TensorOps(), model.sequence_head, model.token_head, token_heads=token_heads), params


def vectors_without(hidden_states: Tensor, token_ids: Tensor, skip_ids: tuple[int, ...]) -> list[Tensor]:
    """Returns the vectors of each sequence, those of `skip_ids` left out."""
    return [
        torch.nn.functional.normalize(rows[~torch.isin(ids, torch.tensor(skip_ids))], dim=1)
        for rows, ids in zip(hidden_states.split(LENGTHS), token_ids.split(LENGTHS), strict=True)
    ]


@pytest.mark.parametrize("cuts", [(), (10,), (4, 5, 30)], ids=str)
def test_chunked_documents_score_like_whole_ones(
    hidden_states: Tensor, token_ids: Tensor, cuts: tuple[int, ...], ops: RowOps[Any]
) -> None:
    pooler, params = make_pooler(ops=ops)
    params = params.clone(is_compared=True)
    generator = torch.Generator().manual_seed(5)
    queries = [torch.randn(n, HIDDEN_SIZE, generator=generator).numpy() for n in (4, 9)]
    own = [queries[i % 2] for i in range(NUM_SEQS)]
    rows, ids = hidden_states.split(LENGTHS), token_ids.split(LENGTHS)
    parts: list[list[np.ndarray]] = [[] for _ in LENGTHS]
    manager = ChunkedPoolingManager(HIDDEN_SIZE, strategy="all", ops=ops)
    for start, end in zip((0, *cuts), (*cuts, max(LENGTHS)), strict=True):
        members = [i for i, length in enumerate(LENGTHS) if length > start]
        ends = [min(end, LENGTHS[i]) for i in members]
        metadata = make_metadata(
            [LENGTHS[i] for i in members],
            [params] * len(members),
            chunk_sizes=[last - start for last in ends],
            chunk_starts=[start] * len(members),
            seq_ids=members,
            token_ids=torch.cat([ids[i][start:last] for i, last in zip(members, ends, strict=True)]),
        )
        metadata = manager.with_cursors(replace(metadata, queries=[own[i] for i in members]))
        packed = torch.cat([rows[i][start:last] for i, last in zip(members, ends, strict=True)])
        output = pooler.pool(ModelOutput(hidden_states=ops.rows_of(packed)), metadata, manager)
        manager.commit(metadata, output.states)
        for place, i in enumerate(members):
            parts[i].append(output.to_numpy()[place]["similarities"])
    for i, vectors in enumerate(vectors_without(hidden_states, token_ids, SKIP_IDS)):
        similarities = np.concatenate(parts[i])
        assert similarities.shape[1] == len(own[i])
        expected = float((torch.from_numpy(own[i]) @ vectors.T).amax(1).sum()) if len(vectors) else 0.0
        assert abs(maxsim_score(similarities, len(own[i]), averages=False) - expected) < 1e-4
        assert abs(maxsim_score(similarities, len(own[i]), averages=True) - expected / len(own[i])) < 1e-4


def test_compared_documents_share_a_batch_with_others(hidden_states: Tensor, token_ids: Tensor) -> None:
    pooler, params = make_pooler()
    mixed = [params.clone(is_compared=True), params] * (NUM_SEQS // 2)
    metadata = make_metadata(LENGTHS, mixed, token_ids=token_ids)
    query = np.ones((2, HIDDEN_SIZE), np.float32)
    metadata = replace(metadata, queries=[query, None] * (NUM_SEQS // 2))
    arrays = pooler.pool(ModelOutput(hidden_states=hidden_states), metadata).to_numpy()
    names = [sorted(own) for own in arrays]
    assert names == [["similarities"], ["token_embeddings"]] * (NUM_SEQS // 2)
    assert [arrays[i]["similarities"].shape for i in (0, 2)] == [(0, 2), (1, 2)]


def test_document_without_its_query_is_an_error(hidden_states: Tensor, token_ids: Tensor) -> None:
    pooler, params = make_pooler()
    metadata = make_metadata(LENGTHS, [params.clone(is_compared=True)] * NUM_SEQS, token_ids=token_ids)
    metadata = replace(metadata, queries=[None] * NUM_SEQS)
    with pytest.raises(ValueError, match="needs the vectors of its query"):
        pooler.pool(ModelOutput(hidden_states=hidden_states), metadata)


@pytest.mark.parametrize("skips_queries", [False, True])
def test_skip_words_of_documents_have_no_vector(hidden_states: Tensor, token_ids: Tensor, skips_queries: bool) -> None:
    pooler, document = make_pooler(skips_queries=skips_queries, skip_ids=(3,))
    params = [document, document.clone(is_query=True)] * (NUM_SEQS // 2)
    metadata = make_metadata(LENGTHS, params, token_ids=token_ids)
    arrays = pooler.pool(ModelOutput(hidden_states=hidden_states), metadata).to_numpy()
    filtered, unfiltered = (vectors_without(hidden_states, token_ids, ids) for ids in ((3,), ()))
    for i, own in enumerate(arrays):
        is_filtered = skips_queries or not params[i].is_query
        np.testing.assert_allclose(own["token_embeddings"], (filtered if is_filtered else unfiltered)[i], atol=1e-6)
    with pytest.raises(ValueError, match="needs the token ids of the batch"):
        pooler.pool(ModelOutput(hidden_states=hidden_states), make_metadata(LENGTHS, [document] * NUM_SEQS))
