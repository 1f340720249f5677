"""SPLADE models equal sentence-transformers, and the three outputs of bge-m3 equal plain torch."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
import torch.nn.functional as F
import transformers

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.protocol import errors
from penstock.engine.protocol.multi_vector import SparseKind, SparseVector
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingTask

from ..tables import table
from .model_folders import DOCUMENTS, QUERIES, start, write_m3, write_splade

pytestmark = pytest.mark.asyncio(loop_scope="module")

PARAMS = PoolingParams()
TEXTS = [*QUERIES, *DOCUMENTS, "dam " * 40]
ALL = (PoolingTask.EMBED, PoolingTask.SPARSE_EMBED, PoolingTask.TOKEN_EMBED)


SPLADE = table(__file__, "splade_models")


@pytest.fixture(scope="module", params=SPLADE)
def splade(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    class_name, settings, pooling = SPLADE[request.param]
    return write_splade(tmp_path_factory.mktemp("splade"), class_name, settings, **pooling)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=DEVICES)
async def engine(splade: Path, request: pytest.FixtureRequest) -> AsyncIterator[AsyncEngine]:
    engine = await start(splade, request.param)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=DEVICES)
async def m3(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> AsyncIterator[AsyncEngine]:
    engine = await start(write_m3(tmp_path_factory.mktemp("m3")), request.param)
    yield engine
    await engine.close()


def dense(vector: SparseVector, size: int) -> np.ndarray:
    row = np.zeros(size, np.float32)
    row[vector.indices] = vector.values
    return row


@pytest.fixture(scope="module")
def peer(splade: Path) -> Any:
    from sentence_transformers import SparseEncoder

    return SparseEncoder(str(splade), device="cpu")


async def test_splade_equals_sentence_transformers(engine: AsyncEngine, peer: Any) -> None:
    expected = peer.encode(TEXTS, convert_to_sparse_tensor=False).numpy()
    result = await engine.sparse_embed(TEXTS, PARAMS)
    actual = np.stack([dense(vector, engine.info.vocab_size) for vector in result.vectors])
    assert 0 < (actual > 0).mean() < 1
    assert np.abs(actual - expected).max() < 1e-5
    assert all((np.diff(vector.indices) > 0).all() and (vector.values > 0).all() for vector in result.vectors)


async def test_scores_equal_the_similarity_of_sentence_transformers(engine: AsyncEngine, peer: Any) -> None:
    vectors = [peer.encode(texts, convert_to_sparse_tensor=False) for texts in (QUERIES, DOCUMENTS)]
    expected = peer.similarity(*vectors).numpy()
    assert np.abs((await engine.score(QUERIES[:1], DOCUMENTS, PARAMS)).scores - expected[0]).max() < 1e-4
    paired = await engine.score(QUERIES, DOCUMENTS[:2], PARAMS)
    assert np.abs(paired.scores - expected.diagonal()[:2]).max() < 1e-4


async def test_splade_has_no_dense_vectors_and_does_not_normalize(engine: AsyncEngine) -> None:
    assert engine.info.tasks == (PoolingTask.SPARSE_EMBED, PoolingTask.SCORE)
    with pytest.raises(errors.UnsupportedTaskError):
        await engine.embed(TEXTS, PARAMS)
    with pytest.raises(errors.InvalidRequestError, match="does not take normalize"):
        await engine.sparse_embed(TEXTS, PoolingParams(normalize=True))


def m3_outputs(folder: str, text: str) -> tuple[torch.Tensor, dict[int, float], torch.Tensor]:
    """Returns the outputs of FlagEmbedding's M3Embedder: CLS, token weights by id, and vectors without CLS."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    heads = {name: torch.load(Path(folder) / f"{name}.pt") for name in ("sparse_linear", "colbert_linear")}
    inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=64)
    with torch.no_grad():
        rows = model(**{name: inputs[name] for name in ("input_ids", "attention_mask")}).last_hidden_state[0]
    weights = F.relu(F.linear(rows, **heads["sparse_linear"]))[:, 0].tolist()
    unused = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    lexical: dict[int, float] = {}
    for token_id, weight in zip(inputs["input_ids"][0].tolist(), weights, strict=True):
        if token_id not in unused and weight > lexical.get(token_id, 0.0):
            lexical[token_id] = weight
    vectors = F.normalize(F.linear(rows[1:], **heads["colbert_linear"]), dim=-1)
    return F.normalize(rows[0], dim=-1), lexical, vectors


async def test_m3_gives_three_outputs_of_one_forward(m3: AsyncEngine) -> None:
    assert m3.info.sparse is not None
    assert m3.info.sparse.kind is SparseKind.TOKEN_WEIGHTS
    before = m3.stats().num_batched_tokens_total
    result: Any = await m3.embed_combined(TEXTS, ALL, PARAMS)
    assert m3.stats().num_batched_tokens_total - before == sum(result.num_tokens)
    for i, text in enumerate(TEXTS):
        embedding, lexical, vectors = m3_outputs(m3.info.path, text)
        assert np.abs(result.embeddings[i] - embedding.numpy()).max() < 1e-5
        assert result.sparse[i].indices.tolist() == sorted(lexical)
        expected = np.array([lexical[token_id] for token_id in sorted(lexical)], np.float32)
        assert np.abs(result.sparse[i].values - expected).max(initial=0.0) < 1e-5
        assert result.vectors[i].shape == tuple(vectors.shape)
        assert np.abs(result.vectors[i] - vectors.numpy()).max() < 1e-5
        assert len(result.token_ids[i]) == len(vectors)


async def test_model_without_a_classifier_does_not_classify(m3: AsyncEngine) -> None:
    with pytest.raises(errors.InvalidRequestError, match="does not support the task 'classify'"):
        await m3.classify(["a"], PARAMS)


async def test_splade_checkpoint_without_its_head_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(errors.ModelLoadError, match="has no head of a masked language model"):
        await start(write_splade(tmp_path, "BertModel"))


@pytest.mark.parametrize(("is_cosine", "expected"), [(False, 6.0), (True, 6.0 / (5**0.5 * 13**0.5))])
async def test_similarity_of_sparse_vectors_is_dot_or_cosine(is_cosine: bool, expected: float) -> None:
    first = SparseVector.of(np.array([[1, 1], [7, 2]], np.float32))
    second = SparseVector.of(np.array([[2, 2], [7, 3]], np.float32))
    assert abs(first.similarity(second, is_cosine=is_cosine) - expected) < 1e-6
    none = SparseVector.of(np.empty((0, 2), np.float32))
    assert first.similarity(none, is_cosine=is_cosine) == 0.0
