"""Models with one vector per token against sentence-transformers' MultiVectorEncoder, on folders of three libraries."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from penstock.engine.async_engine import AsyncEngine, RequestOptions
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.protocol import errors
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.multi_vector import MultiVector, QueryExpansion
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingTask

pytestmark = pytest.mark.asyncio(loop_scope="module")

PARAMS = PoolingParams()
WIDTH = 12
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]"]
WORDS = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"), *".,!?-[]", "dam", "gate"]
QUERIES = ["what dam", "a gate, or a dam?"]
DOCUMENTS = [
    "the dam holds.",
    "a gate - opens! and shuts.",
    "...",
    "song",
    "dam gate dam gate what is it, a dam or a gate",
]
TEXTS = [*QUERIES, *DOCUMENTS[:2]]
IDENTITY = "torch.nn.modules.linear.Identity"


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def write_backbone(folder: Path, class_name: str = "BertModel", **config: Any) -> None:
    """A tiny random encoder and a tokenizer for it."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(vocabulary),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    model_class = getattr(transformers, class_name)
    model = model_class(model_class.config_class(**sizes | config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)


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
    kinds = [
        (f"{base}.transformer.Transformer", ""),
        (f"{base}.dense.Dense", "1_Dense"),
        (f"{own}.multi_vector_mask.MultiVectorMask", "2_MultiVectorMask"),
        ("sentence_transformers.sentence_transformer.modules.normalize.Normalize", "3_Normalize"),
    ]
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(kinds)]
    write_json(folder / "modules.json", modules)
    prompts = {"query": "gate: ", "document": "dam: "}
    settings = {"model_type": "MultiVectorEncoder", "prompts": prompts, "similarity_fn_name": "maxsim"}
    write_json(folder / "config_sentence_transformers.json", settings)
    return folder


def write_pylate(folder: Path) -> Path:
    write_backbone(folder)
    write_dense(folder / "1_Dense", activation_function=IDENTITY)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 15, "do_lower_case": False})
    kinds = [("sentence_transformers.models.Transformer", ""), ("pylate.models.Dense.Dense", "1_Dense")]
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(kinds)]
    write_json(folder / "modules.json", modules)
    settings = {
        "model_type": "ColBERT",
        "query_prefix": "[unused0]",
        "document_prefix": "[unused1]",
        "query_length": 16,
        "document_length": 24,
        "attend_to_expansion_tokens": True,
        "skiplist_words": [".", "!"],
        "prompts": {},
    }
    write_json(folder / "config_sentence_transformers.json", settings)
    return folder


def write_stanford(folder: Path) -> Path:
    write_backbone(folder)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"architectures": ["HF_ColBERT"]})
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
    settings = {"device": request.param, "in_process": True, "num_threads": 1, "dtype": "float32"}
    engine = await AsyncEngine.start(EngineConfig(model=str(folder), **settings))
    yield engine
    await engine.close()


def assert_rows(expected: list[Any], actual: list[np.ndarray]) -> None:
    assert [row.shape for row in actual] == [tuple(row.shape) for row in expected]
    for own, other in zip(actual, expected, strict=True):
        assert np.abs(own - np.asarray(other)).max(initial=0.0) < 1e-5


async def test_vectors_of_queries_and_documents(engine: AsyncEngine, peer: Any) -> None:
    assert engine.info.tasks == (PoolingTask.TOKEN_EMBED, PoolingTask.SCORE)
    params = PARAMS.clone(truncate_prompt_tokens=-1)
    documents = await engine.token_embed(DOCUMENTS, params)
    queries = await engine.token_embed(QUERIES, params, RequestOptions(is_query=True))
    assert_rows(peer.encode_document(DOCUMENTS, convert_to_numpy=True), documents.rows)
    assert_rows(peer.encode_query(QUERIES, convert_to_numpy=True), queries.rows)
    assert [len(ids) for ids in documents.token_ids] == [len(rows) for rows in documents.rows]


async def test_queries_and_documents_in_one_batch_give_what_they_give_alone(engine: AsyncEngine) -> None:
    asks = [
        engine.token_embed([text], PARAMS.clone(truncate_prompt_tokens=-1), RequestOptions(is_query=is_query))
        for text in TEXTS
        for is_query in (True, False)
    ]
    together = await asyncio.gather(*asks)
    for i, text in enumerate(TEXTS):
        for place, is_query in enumerate((True, False)):
            options = RequestOptions(prompt_name="query" if is_query else "document")
            if options.prompt_name not in engine.info.prompts:
                continue
            alone = await engine.token_embed([text], PARAMS.clone(truncate_prompt_tokens=-1), options)
            assert_rows(alone.rows, together[2 * i + place].rows)


async def test_scores_are_maxsim(engine: AsyncEngine, peer: Any) -> None:
    params = PARAMS.clone(truncate_prompt_tokens=-1)
    expected = peer.similarity(peer.encode_query(QUERIES), peer.encode_document(DOCUMENTS)).numpy()
    for query, row in zip(QUERIES, expected, strict=True):
        scores = (await engine.score([query], DOCUMENTS, params)).scores
        assert np.abs(scores - row).max() < 1e-4
    paired = await engine.score(QUERIES, DOCUMENTS[:2], params)
    assert np.abs(paired.scores - expected[[0, 1], [0, 1]]).max() < 1e-4
    repeated = await engine.score(QUERIES[:1] * 2, DOCUMENTS[:2], params)
    assert repeated.num_tokens[0] > repeated.num_tokens[1] - 20
    assert np.abs(repeated.scores - expected[0, :2]).max() < 1e-4


async def test_lengths(engine: AsyncEngine) -> None:
    recipe = engine.info.multi_vector
    assert recipe is not None
    long = "dam " * 60
    if recipe.expansion is not None and recipe.expansion.is_fixed:
        query = await engine.token_embed([long], PARAMS, RequestOptions(is_query=True))
        assert query.num_tokens == [recipe.expansion.length]
    with pytest.raises(errors.RequestTooLongError, match=f"{recipe.document_length} tokens"):
        await engine.token_embed([long], PARAMS)
    with pytest.raises(errors.UnsupportedTaskError):
        await engine.embed(["dam"], PARAMS)


async def test_a_document_in_pieces_counts_by_its_best(engine: AsyncEngine) -> None:
    text = " ".join(["a song"] * 20 + ["what dam"])
    options = RequestOptions(max_passages=8)
    (cut,) = (await engine.score(["what dam"], [text], PARAMS.clone(truncate_prompt_tokens=-1))).scores
    (best,) = (await engine.score(["what dam"], [text], PARAMS.clone(truncate_prompt_tokens=-1), options)).scores
    assert best >= cut - 1e-5


async def test_token_ids_are_taken_as_they_are(engine: AsyncEngine) -> None:
    result = await engine.token_embed([[2, 60, 61, 3]], PARAMS, RequestOptions(is_query=True))
    assert result.num_tokens == [4]


async def test_half_precision_is_near(engine: AsyncEngine, folder: Path) -> None:
    half = await AsyncEngine.start(EngineConfig(model=str(folder), in_process=True, num_threads=1, dtype="bfloat16"))
    options = RequestOptions(is_query=True)
    params = PARAMS.clone(truncate_prompt_tokens=-1)
    expected, actual = [await e.token_embed(QUERIES, params, options) for e in (engine, half)]
    await half.close()
    for own, other in zip(actual.rows, expected.rows, strict=True):
        assert np.abs(own - other).max() < 0.1


async def test_recipes_and_their_sources(tmp_path: Path) -> None:
    stanford = resolve_model(EngineConfig(model=str(write_stanford(tmp_path / "a"))))
    assert stanford.multi_vector is not None
    assert stanford.multi_vector.expansion == QueryExpansion(length=12)
    assert stanford.sources["multi_vector"] == "artifact.metadata"
    assert (stanford.max_model_len, stanford.embedding_size, stanford.normalize) == (18, WIDTH, True)
    assert stanford.prompts == {"query": "[unused0] ", "document": "[unused1] "}
    pylate = resolve_model(EngineConfig(model=str(write_pylate(tmp_path / "b"))))
    assert pylate.multi_vector == MultiVector(
        query_length=16,
        document_length=24,
        expansion=QueryExpansion(length=16, attends=True),
        skip_words=(".", "!"),
        markers=("[unused0]", "[unused1]"),
    )
    assert pylate.max_model_len == 24
    config = tmp_path / "b" / "config.json"  # a folder of Stanford's that PyLate has saved
    write_json(config, json.loads(config.read_text()) | {"architectures": ["HF_ColBERT"]})
    assert resolve_model(EngineConfig(model=str(tmp_path / "b"))).multi_vector == pylate.multi_vector


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("config_sentence_transformers.json", {"query_length": 0}, errors.ModelLoadError, "query_length is 0"),
        (
            "config_sentence_transformers.json",
            {"document_length": "x"},
            errors.ModelLoadError,
            "document_length is 'x'",
        ),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "odd"}}, errors.ModelLoadError, "'fixed' or"),
        (
            "config.json",
            {"model_type": "gpt2"},
            errors.UnsupportedModelError,
            "must not attend to, for which penstock has code in these families: bert",
        ),
    ],
)
async def test_settings_without_a_meaning(
    tmp_path: Path, name: str, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    folder = write_pylate(tmp_path)
    settings = folder / "config_sentence_transformers.json"
    write_json(settings, json.loads(settings.read_text()) | {"attend_to_expansion_tokens": False})
    write_json(folder / name, json.loads((folder / name).read_text()) | change)
    with pytest.raises(error, match=message):
        resolve_model(EngineConfig(model=str(folder)))


async def test_filling_up_beyond_the_longest_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.ModelLoadError, match="fills queries up to 16 tokens"):
        resolve_model(EngineConfig(model=str(write_pylate(tmp_path)), max_model_len=10))
