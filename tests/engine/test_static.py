"""Static embeddings and Routers equal sentence-transformers; model2vec's folders equal a plain reference."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Router
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, StaticEmbedding, Transformer
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from penstock.engine import AsyncEngine, EngineConfig, PoolingParams
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.model_files.sentence_transformers_files import read_routes
from penstock.engine.protocol.errors import (
    InvalidRequestError,
    MachineError,
    RequestTooLongError,
    UnsupportedModelError,
)
from penstock.engine.protocol.params import RequestOptions
from penstock.engine.protocol.tasks import PoolingTask

from ..tables import cases
from .engines import running

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("three_lane_library")]
TEXTS = ["hello world", "", "  ", "The [SEP] naïve café — 東京 🚀", "word " * 37, "a"]
PARAMS = PoolingParams()
QUERY, DOCUMENT = RequestOptions(is_query=True), RequestOptions(is_query=False)
SPLADE = SpladePooling(pooling_strategy="max", activation_function="log1p_relu")


@pytest.fixture(scope="module")
def backend(minilm_folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    tokenizer.no_truncation()
    return tokenizer


def static(backend: Tokenizer, width: int) -> StaticEmbedding:
    torch.manual_seed(1)
    return StaticEmbedding(backend, embedding_dim=width)


def router(save_bert: Callable[..., Path], queries: Sequence[Any], *, default: str = "document") -> Router:
    documents = [Transformer(str(save_bert())), Pooling(32)]
    return Router.for_query_document(list(queries), documents, default_route=default)


def close(actual: np.ndarray, expected: Any, tolerance: float = 1e-6) -> bool:
    return bool(np.abs(actual - np.asarray(expected)).max() <= tolerance)


# StaticEmbedding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 33, 64])
async def test_static_embeddings_equal_sentence_transformers(backend: Tokenizer, tmp_path: Path, width: int) -> None:
    model = SentenceTransformer(modules=[static(backend, width), Dense(width, 7), Normalize()], device="cpu")
    model.save(str(tmp_path))
    async with running(tmp_path, device="cuda", dtype="bfloat16") as engine:  # runs on the CPU in float32
        result = await engine.embed(TEXTS, PARAMS)
        assert close(result.embeddings, model.encode(TEXTS))
        singles = [(await engine.embed([text], PARAMS)).embeddings[0] for text in TEXTS]
        assert (np.stack(singles) == result.embeddings).all()
        assert (engine.info.max_model_len, engine.info.device, engine.info.dtype) == (8192, "cpu", "float32")
        assert await engine.tokenize(["hello world"]) == [backend.encode("hello world", add_special_tokens=False).ids]
        with pytest.raises(InvalidRequestError, match="out of vocabulary"):
            await engine.embed([[engine.info.vocab_size]], PARAMS)


async def test_static_texts_above_the_limit_are_rejected(backend: Tokenizer, tmp_path: Path) -> None:
    SentenceTransformer(modules=[static(backend, 8)], device="cpu").save(str(tmp_path))
    async with running(tmp_path, max_model_len=5) as engine:
        assert (await engine.embed(["a b c d e"], PARAMS)).num_tokens == [5]
        with pytest.raises(RequestTooLongError, match="has 6 tokens"):
            await engine.embed(["a b c d e f"], PARAMS)
    with pytest.raises(MachineError, match="static embedding, which needs the C library"):
        async with running(tmp_path, cpu_kernels="torch"):
            pass


# model2vec ------------------------------------------------------------------------------------------------------------


def model2vec_vector(
    text: str, backend: Tokenizer, tensors: dict[str, Any], *, max_length: int, normalize: bool, unknown: int
) -> np.ndarray:
    """The mean of weighted rows in float64."""
    median = int(np.median([len(token) for token in backend.get_vocab()]))
    ids = backend.encode(text[: max_length * median], add_special_tokens=False).ids[:max_length]
    ids = [i for i in ids if i != unknown]
    rows, weights = tensors["embeddings"].astype(np.float64), tensors.get("weights", np.ones(len(backend.get_vocab())))
    mapping = tensors.get("mapping", np.arange(len(rows)))
    if not ids:
        return np.zeros(rows.shape[1])
    vector = (rows[mapping[ids]] * weights[ids][:, None]).mean(0)
    return vector / (np.linalg.norm(vector) + 1e-32) if normalize else vector


def words_tokenizer() -> Tokenizer:
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2, "the": 3, "word": 4}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def pieces_tokenizer() -> Tokenizer:
    pieces = [("▁hello", -1.0), ("<unk>", 0.0), ("▁world", -2.0), ("▁the", -1.0), ("word", -3.0)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=1))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return backend


@pytest.mark.parametrize(("make", "unknown"), [(words_tokenizer, 0), (pieces_tokenizer, 1)])
@pytest.mark.parametrize("case", ["float32", "float16", "int8", "quantized"])
async def test_model2vec_folders_equal_the_reference(
    make: Callable[[], Tokenizer], unknown: int, case: str, tmp_path: Path
) -> None:
    backend, numbers = make(), np.random.default_rng(2)
    is_quantized = case == "quantized"
    rows = numbers.normal(size=(3 if is_quantized else 5, 17)) * 20
    tensors = {"embeddings": rows.astype(case if case in ("float16", "int8") else "float32")}
    if is_quantized:
        tensors |= {"mapping": np.array([2, 0, 1, 2, 0]), "weights": numbers.random(5)}
    save_file(tensors, tmp_path / "model.safetensors")
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"model_type": "model2vec", "normalize": is_quantized, "max_length": 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if is_quantized:  # model2vec writes this file for sentence-transformers
        modules = [{"type": "sentence_transformers.models.StaticEmbedding", "path": "."}]
        (tmp_path / "modules.json").write_text(json.dumps(modules))
    texts = [*TEXTS, "hello zzz world", "zzz", "hello the " * 9, "x" * 23 + " word the", "the hello world word the the"]
    async with running(tmp_path, auto_truncate=True) as engine:
        result = await engine.embed(texts, PARAMS)
        options = {"normalize": is_quantized, "unknown": unknown}
        expected = [model2vec_vector(text, backend, tensors, max_length=6, **options) for text in texts]
        assert close(result.embeddings, expected, 1e-6 if is_quantized else 1e-5)  # rows of up to 50: relative 1e-6
        cut = await engine.embed(texts, PoolingParams(truncate_prompt_tokens=3))
        expected = [model2vec_vector(text, backend, tensors, max_length=3, **options) for text in texts]
        assert close(cut.embeddings, expected, 1e-6 if is_quantized else 1e-5)


async def test_long_text_without_truncation_is_rejected_not_cut(tmp_path: Path) -> None:
    backend = words_tokenizer()
    save_file({"embeddings": np.eye(5, dtype=np.float32)}, tmp_path / "model.safetensors")
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "model2vec"}')
    async with running(tmp_path) as engine:
        assert engine.info.max_model_len == 512
        (vector,) = (await engine.embed(["x" * 5_000 + " the"], PARAMS)).embeddings
        assert vector.tolist() == [0, 0, 0, 1, 0]  # model2vec reads no more than 512 * 5 characters
        truncated: list[int] = []
        options = RequestOptions(on_truncated=truncated.append)
        await engine.embed(["the", "the" + " " * 5_000 + "the"], PoolingParams(truncate_prompt_tokens=-1), options)
        assert truncated == [1]
        with pytest.raises(RequestTooLongError, match="has 513 tokens"):
            await engine.embed(["the " * 513], PARAMS)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"embeddings": np.eye(3), "mapping": np.array([0, 3])}, "'mapping' has rows outside the table"),
        ({"table": np.eye(3)}, "needs embedding.weight or embeddings"),
        (None, "has no model.safetensors"),
    ],
)
async def test_damaged_static_weights_are_named(tmp_path: Path, tensors: dict[str, Any] | None, message: str) -> None:
    if tensors is not None:
        save_file(tensors, tmp_path / "model.safetensors")
    words_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "model2vec"}')
    with pytest.raises(Exception, match=message):
        async with running(tmp_path):
            pass


# Routers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("default", ["document", "query"])
async def test_router_runs_queries_and_documents_like_its_library(
    backend: Tokenizer, save_bert: Callable[..., Path], tmp_path: Path, default: str
) -> None:
    modules = [router(save_bert, [static(backend, 32)], default=default), Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu")
    model.save(str(tmp_path))
    queries, documents = model.encode_query(TEXTS), model.encode_document(TEXTS)
    async with running(tmp_path, in_process=default == "query") as engine:
        assert engine.info.tasks == (PoolingTask.EMBED, PoolingTask.SCORE)
        assert close((await engine.embed(TEXTS, PARAMS, QUERY)).embeddings, queries, 2e-6)
        assert close((await engine.embed(TEXTS, PARAMS, DOCUMENT)).embeddings, documents, 1e-5)
        assert close((await engine.embed(TEXTS, PARAMS)).embeddings, model.encode(TEXTS), 1e-5)
        scores = (await engine.score(TEXTS[:1], TEXTS, PARAMS)).scores
        assert close(scores, model.similarity(queries[:1], documents)[0], 1e-5)
        with pytest.raises(InvalidRequestError, match="queries have their own model"):
            await engine.embed_late(["a", "b"], PARAMS)


async def test_sparse_router_equals_sentence_transformers(save_bert: Callable[..., Path], tmp_path: Path) -> None:
    folder = str(save_bert("BertForMaskedLM"))
    weight = torch.randn(30_522, generator=torch.Generator().manual_seed(5))  # some are negative
    query = SparseStaticEmbedding(AutoTokenizer.from_pretrained(folder), weight=weight)
    documents = [Transformer(folder, transformer_task="fill-mask"), SPLADE]
    model = SparseEncoder(modules=[Router.for_query_document([query], documents)], device="cpu")
    model.save(str(tmp_path / "router"))
    SparseEncoder(modules=[query], device="cpu").save(str(tmp_path / "alone"))
    queries, documents_ = model.encode_query(TEXTS).to_dense().numpy(), model.encode_document(TEXTS).to_dense().numpy()

    async def vectors(engine: AsyncEngine, options: RequestOptions) -> np.ndarray:
        result = await engine.sparse_embed(TEXTS, PARAMS, options)
        dense = np.zeros((len(TEXTS), 30_522), np.float32)
        for row, vector in zip(dense, result.vectors, strict=True):
            row[vector.indices] = vector.values
        return dense

    async with running(tmp_path / "router") as engine:
        assert (await vectors(engine, QUERY) == queries).all()
        assert close(await vectors(engine, DOCUMENT), documents_)
        scores = (await engine.score(TEXTS[:1], TEXTS, PARAMS)).scores
        assert close(scores, queries[0] @ documents_.T, 1e-5)
    async with running(tmp_path / "alone") as engine:
        assert (await vectors(engine, RequestOptions()) == queries).all()


@cases(__file__, "change", "query", "document", "default_is_query")
async def test_routes_are_chosen_like_those_of_the_library(
    change: dict[str, Any], query: str, document: str, default_is_query: bool, tmp_path: Path
) -> None:
    config = {"types": {"q": "Q", "d": "D"}, "structure": {"query": ["q"], "document": ["d"]}} | change
    (tmp_path / "router_config.json").write_text(json.dumps(config))
    routes = read_routes(tmp_path, "")
    assert [(each[0]["type"], each[0]["path"]) for each in routes[:2]] == [
        (name, name.lower()) for name in (query, document)
    ]
    assert routes.default_is_query is default_is_query


@cases(__file__, "change", "message")
async def test_unsupported_routes_are_rejected_with_their_reason(
    backend: Tokenizer, save_bert: Callable[..., Path], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    SentenceTransformer(modules=[router(save_bert, [static(backend, 32)])], device="cpu").save(str(tmp_path))
    path = tmp_path / "router_config.json"
    config = json.loads(path.read_text())
    if "query" in change.get("structure", {}):
        change = {"structure": config["structure"] | change["structure"]}
    path.write_text(json.dumps(config | change))
    with pytest.raises(UnsupportedModelError if "types" not in change else Exception, match=message):
        resolve_model(EngineConfig(model=str(tmp_path)))


async def test_router_with_two_widths_is_rejected(
    backend: Tokenizer, save_bert: Callable[..., Path], tmp_path: Path
) -> None:
    SentenceTransformer(modules=[router(save_bert, [static(backend, 16)])], device="cpu").save(str(tmp_path))
    with pytest.raises(UnsupportedModelError, match=r"of width 16, and .* of width 32"):
        resolve_model(EngineConfig(model=str(tmp_path)))
