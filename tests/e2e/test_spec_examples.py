"""The examples of the pooling specification, as its clients send them.

Classifier and reranker are tiny random models: the tests check names, shapes and ranges.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..servers import Server

openai = pytest.importorskip("openai")

BRAZIL, BRASILIA = "What is the capital of Brazil?", "The capital of Brazil is Brasilia."
FRANCE, PARIS = "What is the capital of France?", "The capital of France is Paris"
E5, JINA = "intfloat/e5-small", "jinaai/jina-embeddings-v3"
APEACH = "jason9693/Qwen2.5-1.5B-apeach"
RERANKER = "BAAI/bge-reranker-v2-m3"


@pytest.fixture(scope="module")
def embedder(launch: Any, default_model: Path) -> Server:
    """The default model under the names of the examples, with Matryoshka sizes."""
    names = ("--served-model-name", f"{E5},{JINA}")
    return launch("--dtype", "float32", *names, "--hf-overrides", '{"matryoshka_dimensions": [32, 64]}')


@pytest.fixture(scope="module")
def classifier(launch: Any, random_model: Callable[..., Path]) -> Server:
    folder = random_model("BertForSequenceClassification", num_labels=2)
    return launch(str(folder), "--served-model-name", APEACH)


@pytest.fixture(scope="module")
def reranker(launch: Any, random_model: Callable[..., Path]) -> Server:
    folder = random_model("BertForSequenceClassification", num_labels=1)
    return launch(str(folder), "--served-model-name", RERANKER)


def embed(client: Any, model: str, texts: list[str], **options: Any) -> np.ndarray:
    response = client.embeddings.create(model=model, input=texts, **options)
    return np.array([row.embedding for row in response.data], np.float32)


@pytest.fixture
def client(embedder: Server) -> Any:
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


def test_embeddings_are_normalized_unless_normalize_is_false(client: Any) -> None:
    """The example passes normalize=True, which the openai client sends in extra_body only."""
    texts = ["Hello my name is", "The best thing about vLLM"]
    unit, raw = (embed(client, E5, texts, dimensions=384, extra_body={"normalize": flag}) for flag in (True, False))
    assert unit.shape == (2, 384)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(embed(client, E5, texts), unit, atol=1e-6)
    assert not np.allclose(unit, raw, atol=1e-3)
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), unit, atol=1e-5)


def test_matryoshka_embedding_is_a_normalized_prefix(client: Any) -> None:
    cut, whole = (embed(client, JINA, ["Follow the white rabbit."], dimensions=size) for size in (32, 384))
    assert cut.shape == (1, 32)
    np.testing.assert_allclose(cut, whole[:, :32] / np.linalg.norm(whole[:, :32]), atol=1e-6)
    with pytest.raises(openai.BadRequestError, match="declares 32, 64 and its native 384"):
        embed(client, JINA, ["a"], dimensions=100)


def test_classes_are_softmax_unless_activation_is_off(classifier: Server) -> None:
    body = {"model": APEACH, "input": ["Hello, my name is", "The president of the United States is"]}
    answer = classifier.post("/classify", body).json()
    assert [row["index"] for row in answer["data"]] == [0, 1]
    for row in answer["data"]:
        assert row["num_classes"] == 2
        assert row["label"] == f"LABEL_{int(np.argmax(row['probs']))}"
    raw = classifier.post("/classify", {**body, "use_activation": False}).json()
    powers = np.exp([row["probs"] for row in raw["data"]])
    probs = powers / powers.sum(axis=1, keepdims=True)
    np.testing.assert_allclose([row["probs"] for row in answer["data"]], probs, atol=1e-5)


@pytest.mark.parametrize(
    ("left", "right", "num_scores"),
    [(BRAZIL, BRASILIA, 1), (BRAZIL, [BRASILIA, PARIS], 2), ([BRAZIL, FRANCE], [BRASILIA, PARIS], 2)],
)
def test_scores_of_a_cross_encoder_are_sigmoids(reranker: Server, left: Any, right: Any, num_scores: int) -> None:
    body = {"model": RERANKER, "text_1": left, "text_2": right}
    scores, logits = (
        np.array([row["score"] for row in reranker.post("/score", {**body, **options}).json()["data"]])
        for options in ({}, {"use_activation": False})
    )
    assert len(scores) == num_scores
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-logits)), atol=1e-5)
