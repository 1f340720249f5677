"""Models with one vector per token give the vectors and scores of sentence-transformers' MultiVectorEncoder."""

import string
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.async_engine import AsyncEngine, RequestOptions
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.protocol import errors
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.multi_vector import MultiVector, QueryExpansion
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingTask

from ..tables import cases, table
from .model_folders import DOCUMENTS, QUERIES, change_json, start, write_backbone, write_json, write_modules

pytestmark = pytest.mark.asyncio(loop_scope="module")

PARAMS = PoolingParams()
CUT = PoolingParams(truncate_prompt_tokens=-1)
QUERY = RequestOptions(is_query=True)
WIDTH = 12
IDENTITY = "torch.nn.modules.linear.Identity"


def write_dense(folder: Path, **config: Any) -> None:
    write_json(folder / "config.json", {"in_features": 32, "out_features": WIDTH, "bias": False} | config)
    torch.manual_seed(1)
    save_file({"linear.weight": torch.randn(WIDTH, 32)}, folder / "model.safetensors")


def write_sentence_transformers(folder: Path, class_name: str, expansion: Any, **mask: Any) -> Path:
    write_backbone(folder, class_name)
    token_level = {"module_input_name": "token_embeddings"}
    write_dense(folder / "1_Dense", activation_function=IDENTITY, **token_level)
    transformer = {"max_seq_length": None, "document_length": 20, "query_expansion": expansion}
    if class_name != "BertModel":
        transformer["query_length"] = 10
    write_json(folder / "sentence_bert_config.json", {k: v for k, v in transformer.items() if v is not None})
    write_json(folder / "2_MultiVectorMask" / "config.json", mask)
    write_json(folder / "3_Normalize" / "config.json", token_level)
    base, own = "sentence_transformers.base.modules", "sentence_transformers.multi_vector_encoder.modules"
    write_modules(
        folder,
        (f"{base}.transformer.Transformer", ""),
        (f"{base}.dense.Dense", "1_Dense"),
        (f"{own}.multi_vector_mask.MultiVectorMask", "2_MultiVectorMask"),
        ("sentence_transformers.sentence_transformer.modules.normalize.Normalize", "3_Normalize"),
    )
    prompts = {"query": "gate: ", "document": "dam: "}
    settings = {"model_type": "MultiVectorEncoder", "prompts": prompts, "similarity_fn_name": "maxsim"}
    write_json(folder / "config_sentence_transformers.json", settings)
    return folder


def write_pylate(folder: Path) -> Path:
    write_backbone(folder)
    write_dense(folder / "1_Dense", activation_function=IDENTITY)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 15, "do_lower_case": False})
    write_modules(folder, ("sentence_transformers.models.Transformer", ""), ("pylate.models.Dense.Dense", "1_Dense"))
    settings = table(__file__, "write_pylate")
    write_json(folder / "config_sentence_transformers.json", settings)
    return folder


def write_stanford(folder: Path) -> Path:
    write_backbone(folder)
    change_json(folder / "config.json", {"architectures": ["HF_ColBERT"]})
    weights = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    torch.manual_seed(1)
    save_file(weights | {"linear.weight": torch.randn(WIDTH, 32)}, folder / "model.safetensors", {"format": "pt"})
    metadata = {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_maxlen": 12, "doc_maxlen": 18}
    write_json(folder / "artifact.metadata", metadata | {"dim": WIDTH, "mask_punctuation": True})
    return folder


FIXED = {"strategy": "fixed", "length": 14}
FOLDERS: dict[str, Callable[[Path], Path]] = {
    "stanford": write_stanford,
    "pylate": write_pylate,
    "bert": lambda folder: write_sentence_transformers(
        folder, "BertModel", FIXED, skiplist_words=[".", ",", "song"], skiplist_tasks=["query", "document"]
    ),
    "modernbert_min": lambda folder: write_sentence_transformers(
        folder, "ModernBertModel", {"strategy": "min", "length": 8}, skiplist_words=["-"]
    ),
    "mpnet": lambda folder: write_sentence_transformers(folder, "MPNetModel", {"strategy": "fixed", "length": 10}),
    "roberta_plain": lambda folder: write_sentence_transformers(folder, "RobertaModel", None),
}


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FOLDERS[request.param](tmp_path_factory.mktemp("colbert"))


@pytest.fixture(scope="module")
def peer(folder: Path) -> Any:
    from sentence_transformers.multi_vector_encoder import MultiVectorEncoder

    return MultiVectorEncoder(str(folder), device="cpu")


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)
async def engine(folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[AsyncEngine]:
    engine = await start(folder, request.param)
    yield engine
    await engine.close()


def assert_rows(expected: list[Any], actual: list[np.ndarray]) -> None:
    assert [row.shape for row in actual] == [tuple(row.shape) for row in expected]
    for own, other in zip(actual, expected, strict=True):
        assert np.abs(own - np.asarray(other)).max(initial=0.0) < 1e-5


async def test_token_vectors_equal_sentence_transformers(engine: AsyncEngine, peer: Any) -> None:
    assert engine.info.tasks == (PoolingTask.TOKEN_EMBED, PoolingTask.SCORE)
    documents = await engine.token_embed(DOCUMENTS, CUT)
    queries = await engine.token_embed(QUERIES, CUT, QUERY)
    assert_rows(peer.encode_document(DOCUMENTS, convert_to_numpy=True), documents.rows)
    assert_rows(peer.encode_query(QUERIES, convert_to_numpy=True), queries.rows)
    assert [len(ids) for ids in documents.token_ids] == [len(rows) for rows in documents.rows]
    with pytest.raises(errors.UnsupportedTaskError, match="Send the request to /v1/multi-vector"):
        await engine.embed(["dam"], PARAMS)


async def test_scores_equal_maxsim_of_sentence_transformers(engine: AsyncEngine, peer: Any) -> None:
    expected = peer.similarity(peer.encode_query(QUERIES), peer.encode_document(DOCUMENTS)).numpy()
    for query, row in zip(QUERIES, expected, strict=True):
        scores = (await engine.score([query], DOCUMENTS, CUT)).scores
        assert np.abs(scores - row).max() < 1e-4
    paired = await engine.score(QUERIES, DOCUMENTS[:2], CUT)
    assert np.abs(paired.scores - expected[[0, 1], [0, 1]]).max() < 1e-4
    repeated = await engine.score(QUERIES[:1] * 2, DOCUMENTS[:2], CUT)
    assert repeated.num_tokens[0] > repeated.num_tokens[1] - 20
    assert np.abs(repeated.scores - expected[0, :2]).max() < 1e-4


async def test_long_queries_are_cut_and_long_documents_rejected(engine: AsyncEngine) -> None:
    multi_vector = engine.info.multi_vector
    assert multi_vector is not None
    long = "dam " * 60
    if multi_vector.expansion is not None and multi_vector.expansion.is_fixed:
        query = await engine.token_embed([long], PARAMS, QUERY)
        assert query.num_tokens == [multi_vector.expansion.length]
    with pytest.raises(errors.RequestTooLongError, match=f"{multi_vector.document_length} tokens"):
        await engine.token_embed([long], PARAMS)
    ids = await engine.token_embed([[2, 60, 61, 3]], PARAMS, QUERY)
    assert ids.num_tokens == [4]


SETTINGS = "config_sentence_transformers.json"


@cases(__file__, "name", "change", "error", "message")
async def test_wrong_settings_are_rejected(
    tmp_path: Path, name: str, change: dict[str, Any], error: str, message: str
) -> None:
    folder = write_pylate(tmp_path)
    change_json(folder / SETTINGS, {"attend_to_expansion_tokens": name == SETTINGS})
    change_json(folder / name, change)
    with pytest.raises(getattr(errors, error), match=message):
        resolve_model(EngineConfig(model=str(folder)))


PYLATE = MultiVector(
    query_length=16,
    document_length=24,
    expansion=QueryExpansion(length=16, attends=True),
    skip_words=(".", "!"),
    markers=("[unused0]", "[unused1]"),
)
STANFORD = replace(PYLATE, query_length=None, document_length=18, expansion=QueryExpansion(length=12))
STANFORD = replace(STANFORD, skip_words=tuple(string.punctuation))
WITHOUT_QUERY_PREFIX = replace(PYLATE, skip_words=STANFORD.skip_words, markers=("[unused1]",))
MASKED = MultiVector(document_length=20, expansion=QueryExpansion(length=14), skip_words=(".", ",", "song"))
BASES = {"pylate": PYLATE, "stanford": STANFORD, "masked": MASKED, "without query prefix": WITHOUT_QUERY_PREFIX}


@cases(__file__, "library", "name", "change", "base", "expected")
async def test_settings_of_each_library_are_read(
    tmp_path: Path, library: str, name: str, change: dict[str, Any], base: str, expected: dict[str, Any]
) -> None:
    folder = FOLDERS[library](tmp_path)
    change_json(folder / name, change)
    info = resolve_model(EngineConfig(model=str(folder)))
    changes = {field: tuple(value) if isinstance(value, list) else value for field, value in expected.items()}
    if expansion := expected.get("expansion"):
        changes["expansion"] = QueryExpansion(**expansion)
    multi_vector = replace(BASES[base], **changes)
    assert info.multi_vector == multi_vector
    assert library == "bert" or [info.prompts.get(side, "").strip() for side in ("query", "document")] == [
        marker if marker in multi_vector.markers else "" for marker in PYLATE.markers
    ]
    longest = max(multi_vector.document_length or 0, multi_vector.max_num_tokens(is_query=True) or 0)
    assert (folder / "modules.json").exists() or not any("modules" in source for source in info.sources.values())
    assert info.max_model_len == longest if multi_vector.document_length else info.max_model_len >= 15


async def test_list_of_kept_tokens_is_rejected(tmp_path: Path) -> None:
    folder = FOLDERS["modernbert_min"](tmp_path)
    (mask,) = (path for path in folder.glob("*/config.json") if "skiplist_words" in path.read_text())
    change_json(mask, {"keep_only_token_ids": [5]})
    with pytest.raises(errors.UnsupportedModelError, match="has keep_only_token_ids, which penstock does not support"):
        resolve_model(EngineConfig(model=str(folder)))
