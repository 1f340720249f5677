"""The examples of the pooling specification, as its clients send them, against real servers.

Scores are checked where the model is trained (all-MiniLM-L6-v2); random tiny models stand in for the classifiers and
rerankers, which shows names, shapes and ranges.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

openai = pytest.importorskip("openai")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    cohere = pytest.importorskip("cohere")

pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")

PROMPTS = ["Hello, my name is", "The president of the United States is"]
BRAZIL, BRASILIA = "What is the capital of Brazil?", "The capital of Brazil is Brasilia."
FRANCE, PARIS = "What is the capital of France?", "The capital of France is Paris"


def save(folder: Path, default_model: Path, **config: Any) -> Path:
    """Saves a random classifier with the tokenizer of the default model."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = transformers.BertConfig(vocab_size=30522, max_position_embeddings=128, **sizes, **config)
        transformers.BertForSequenceClassification(settings).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((default_model / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def embedder(launch: Any, default_model: Path) -> Any:
    """The default model under the names of the examples, with Matryoshka sizes."""
    overrides = '{"matryoshka_dimensions": [32, 64]}'
    names = ("intfloat/e5-small", "jinaai/jina-embeddings-v3")
    return launch(
        str(default_model), "--dtype", "float32", "--served-model-name", ",".join(names), "--hf-overrides", overrides
    )


@pytest.fixture(scope="module")
def classifier(launch: Any, default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save(tmp_path_factory.mktemp("apeach"), default_model, num_labels=2)
    return launch(str(folder), "--served-model-name", "jason9693/Qwen2.5-1.5B-apeach")


@pytest.fixture(scope="module")
def reranker(launch: Any, default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save(tmp_path_factory.mktemp("reranker"), default_model, num_labels=1)
    return launch(str(folder), "--served-model-name", "BAAI/bge-reranker-v2-m3,BAAI/bge-reranker-base")


def vectors(response: Any) -> np.ndarray:
    return np.array([row.embedding for row in response.data], np.float32)


def test_embeddings_of_the_openai_client(embedder: Any) -> None:
    """The example passes normalize=True, which the client itself refuses: extra_body carries it."""
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="EMPTY", max_retries=0) as client:
        call: dict[str, Any] = {
            "input": ["Hello my name is", "The best thing about vLLM"],
            "model": "intfloat/e5-small",
        }
        with pytest.raises(TypeError, match="normalize"):
            client.embeddings.create(**call, dimensions=384, normalize=True)
        unit = vectors(client.embeddings.create(**call, dimensions=384, extra_body={"normalize": True}))
        raw = vectors(client.embeddings.create(**call, dimensions=384, extra_body={"normalize": False}))
        default = vectors(client.embeddings.create(**call))
    assert unit.shape == (2, 384)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(default, unit, atol=1e-6)
    assert not np.allclose(unit, raw, atol=1e-3)
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), unit, atol=1e-5)


def test_matryoshka_embedding_of_32_dimensions(embedder: Any) -> None:
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="EMPTY", max_retries=0) as client:
        call: dict[str, Any] = {"input": ["Follow the white rabbit."], "model": "jinaai/jina-embeddings-v3"}
        cut, whole = (vectors(client.embeddings.create(**call, dimensions=size)) for size in (32, 384))
        with pytest.raises(openai.BadRequestError, match="declares 32, 64 and its native 384"):
            client.embeddings.create(**call, dimensions=100)
    assert cut.shape == (1, 32)
    np.testing.assert_allclose(cut, whole[:, :32] / np.linalg.norm(whole[:, :32]), atol=1e-6)


def test_classification_over_http(classifier: Any) -> None:
    payload = {"model": "jason9693/Qwen2.5-1.5B-apeach", "input": PROMPTS}
    answer = httpx.post(f"{classifier.url}/classify", json=payload, timeout=60).json()
    assert [row["index"] for row in answer["data"]] == [0, 1]
    for row in answer["data"]:
        assert row["num_classes"] == 2
        assert sum(row["probs"]) == pytest.approx(1, abs=1e-5)  # softmax: one label
        assert row["label"] == f"LABEL_{int(np.argmax(row['probs']))}"
    raw = httpx.post(f"{classifier.url}/classify", json={**payload, "use_activation": False}, timeout=60).json()
    logits = np.array([row["probs"] for row in raw["data"]])
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose([row["probs"] for row in answer["data"]], probs, atol=1e-5)


@pytest.mark.parametrize(
    ("left", "right", "num_scores"),
    [
        (BRAZIL, BRASILIA, 1),
        (BRAZIL, [BRASILIA, PARIS], 2),
        ([BRAZIL, FRANCE], [BRASILIA, PARIS], 2),
        ([BRAZIL, FRANCE, BRAZIL], [BRASILIA, PARIS], None),
    ],
)
def test_scores_of_a_cross_encoder(reranker: Any, left: Any, right: Any, num_scores: int | None) -> None:
    prompt = {"model": "BAAI/bge-reranker-v2-m3", "text_1": left, "text_2": right}
    response = httpx.post(f"{reranker.url}/score", json=prompt, timeout=60)
    if num_scores is None:
        assert response.status_code == 400
        assert "3 texts cannot be paired with 2" in response.text
        return
    scores = [row["score"] for row in response.json()["data"]]
    assert len(scores) == num_scores
    assert all(0 <= score <= 1 for score in scores)  # sigmoid: one class
    raw = httpx.post(f"{reranker.url}/score", json={**prompt, "use_activation": False}, timeout=60).json()
    logits = np.array([row["score"] for row in raw["data"]])
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-logits)), atol=1e-5)


def test_scores_of_an_embedder_rank_the_answer_first(embedder: Any) -> None:
    prompt = {"model": "intfloat/e5-small", "text_1": BRAZIL, "text_2": [PARIS, BRASILIA, "Reranking is fun!"]}
    scores = [row["score"] for row in httpx.post(f"{embedder.url}/score", json=prompt, timeout=60).json()["data"]]
    assert np.argsort(scores)[::-1].tolist() == [1, 0, 2]
    refused = httpx.post(f"{embedder.url}/score", json={**prompt, "use_activation": True}, timeout=60)
    assert refused.status_code == 400
    assert "use_activation" in refused.text


@pytest.mark.parametrize("client_class", ["Client", "ClientV2"])
@pytest.mark.parametrize("kind", ["reranker", "embedder"])
def test_rerank_with_the_cohere_clients(request: pytest.FixtureRequest, kind: str, client_class: str) -> None:
    server = request.getfixturevalue(kind)
    model = "BAAI/bge-reranker-base" if kind == "reranker" else "intfloat/e5-small"
    client = getattr(cohere, client_class)(base_url=server.url, api_key="sk-fake-key")
    answer = client.rerank(model=model, query=FRANCE, documents=["Reranking is fun!", PARIS])
    client._client_wrapper.httpx_client.httpx_client.close()
    scores = {item.index: item.relevance_score for item in answer.results}
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    assert sorted(scores) == [0, 1]
    if kind == "embedder":
        assert scores[1] > 0.5 > scores[0]
