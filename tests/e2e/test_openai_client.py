"""Embeddings of the openai client."""

import numpy as np
import pytest

openai = pytest.importorskip("openai")

TEXTS = [
    "A gate holds the water.",
    "short",
    "",
    "naïve café 東京 😀",
    "A longer text that goes on about pipes, gates, dams and the people who look after them. " * 6,
]
MODEL = "all-MiniLM-L6-v2"


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def vectors(response) -> np.ndarray:
    assert [row.index for row in response.data] == list(range(len(response.data)))
    return np.array([row.embedding for row in response.data], np.float32)


def embed(client, texts, **options) -> np.ndarray:
    return vectors(client.embeddings.create(model=MODEL, input=texts, **options))


def test_embeddings_equal_sentence_transformers(client, truth) -> None:
    answer = client.embeddings.create(model=MODEL, input=TEXTS)  # requests base64
    for found in (vectors(answer), embed(client, TEXTS, encoding_format="float")):
        np.testing.assert_allclose(found, truth(TEXTS), atol=1e-5)
    assert answer.model == MODEL
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)
