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


def test_embeddings_equal_sentence_transformers(server, truth) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        for options in ({}, {"encoding_format": "float"}):  # by default the client requests base64
            answer = client.embeddings.create(model=MODEL, input=TEXTS, **options)
            assert [row.index for row in answer.data] == list(range(len(TEXTS)))
            np.testing.assert_allclose([row.embedding for row in answer.data], truth(TEXTS), atol=1e-5)
            assert answer.model == MODEL
            assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)
