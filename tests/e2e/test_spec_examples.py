"""The examples of the pooling specification, as its clients send them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..servers import Server

openai = pytest.importorskip("openai")

E5, JINA = "intfloat/e5-small", "jinaai/jina-embeddings-v3"


@pytest.fixture(scope="module")
def embedder(launch: Any, default_model: Path) -> Server:
    """The default model under the names of the examples, with Matryoshka sizes."""
    names = ("--served-model-name", f"{E5},{JINA}")
    return launch("--dtype", "float32", *names, "--hf-overrides", '{"matryoshka_dimensions": [32, 64]}')


def embed(client: Any, model: str, texts: list[str], **options: Any) -> np.ndarray:
    response = client.embeddings.create(model=model, input=texts, **options)
    return np.array([row.embedding for row in response.data], np.float32)


@pytest.fixture
def client(embedder: Server) -> Any:
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


def test_embeddings_are_normalized_unless_rejected(client: Any) -> None:
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
