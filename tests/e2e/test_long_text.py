"""Long text and late chunking with the openai client."""

import json

import numpy as np
import pytest

openai = pytest.importorskip("openai")

MAX_MODEL_LEN = 64
# One token each.
SENTENCE = "the water of a long river runs through gate and pipe down to the city and its old mill"
WORDS = SENTENCE.split() * 10


def vectors(response) -> np.ndarray:
    return np.array([row.embedding for row in response.data], np.float32)


@pytest.fixture(scope="module")
def client(launch, default_model):
    pooler = {"enable_chunked_processing": True, "max_embed_len": 500}
    flags = ("--max-model-len", str(MAX_MODEL_LEN), "--pooler-config", json.dumps(pooler))
    server = launch("--dtype", "float32", *flags)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_long_text_is_the_weighted_mean_of_its_windows(client, truth) -> None:
    size = MAX_MODEL_LEN - 2
    windows = [WORDS[i : i + size] for i in range(0, len(WORDS), size)]
    expected = np.average(truth([" ".join(w) for w in windows]), axis=0, weights=[len(w) for w in windows])
    expected /= np.linalg.norm(expected)
    text = " ".join(WORDS)
    answer = client.embeddings.create(model="", input=["short", text])
    np.testing.assert_allclose(vectors(answer), [truth(["short"])[0], expected], atol=1e-5)
    assert answer.usage.prompt_tokens == 3 + len(WORDS) + 2
    with pytest.raises(openai.BadRequestError, match=r"500 tokens \(max_embed_len\), but input 0 has 502") as caught:
        client.embeddings.create(model="", input="water " * 500)
    assert caught.value.code == "context_length_exceeded"


def test_mean_of_late_chunks_is_the_vector_of_the_text(client) -> None:
    chunks = [" ".join(WORDS[:20]), " ".join(WORDS[20:25]), " ".join(WORDS[25:50])]
    raw = {"normalize": False}
    late = client.embeddings.create(model="", input=chunks, extra_body={**raw, "late_chunking": True})
    whole = client.embeddings.create(model="", input=" ".join(chunks), extra_body=raw)
    mean = np.average(vectors(late), axis=0, weights=[21, 5, 26])
    np.testing.assert_allclose(mean, vectors(whole)[0], atol=1e-5)
    assert late.usage.prompt_tokens == whole.usage.prompt_tokens == 52
    alone = client.embeddings.create(model="", input=chunks[1], extra_body=raw)
    assert np.abs(vectors(late)[1] - vectors(alone)[0]).max() > 0.05
    with pytest.raises(openai.BadRequestError, match="the inputs have 72 tokens together"):
        client.embeddings.create(model="", input=["water " * 35] * 2, extra_body={"late_chunking": True})
