"""The unmodified openai client against a real server."""

import asyncio

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


def test_embeddings_equal_sentence_transformers(client, truth) -> None:
    expected = truth(TEXTS)
    by_default = client.embeddings.create(model=MODEL, input=TEXTS)  # asks for base64
    as_floats = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    np.testing.assert_allclose(vectors(by_default), expected, atol=1e-5)
    np.testing.assert_allclose(vectors(as_floats), expected, atol=1e-5)
    assert by_default.model == MODEL
    assert by_default.usage.prompt_tokens == by_default.usage.total_tokens > len(TEXTS)


def test_a_text_alone_in_a_batch_and_as_token_ids_is_one_vector(client) -> None:
    in_batch = vectors(client.embeddings.create(model=MODEL, input=TEXTS))
    alone = np.concatenate([vectors(client.embeddings.create(model=MODEL, input=text)) for text in TEXTS])
    np.testing.assert_allclose(alone, in_batch, atol=1e-6)
    ids = [[101, 2460, 102], [101, 102]]  # [CLS] short [SEP], and the empty text
    by_ids = vectors(client.embeddings.create(model=MODEL, input=ids))
    np.testing.assert_allclose(by_ids, in_batch[[1, 2]], atol=1e-6)
    flat = vectors(client.embeddings.create(model=MODEL, input=ids[0]))
    np.testing.assert_allclose(flat, in_batch[[1]], atol=1e-6)


def test_extra_body_reaches_the_server(client) -> None:
    answer = client.embeddings.create(model=MODEL, input="a b c " * 200, extra_body={"truncate_prompt_tokens": 10})
    assert answer.usage.prompt_tokens == 10


def test_integers_and_bits_arrive_as_they_are(client, truth) -> None:
    expected = truth(TEXTS)
    integers = vectors(client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="int8"))
    cosines = (integers * expected).sum(axis=1) / np.linalg.norm(integers, axis=1)
    assert cosines.min() > 0.999
    by_jinas_name = client.embeddings.create(model=MODEL, input=TEXTS, extra_body={"embedding_type": "ubinary"})
    bits = np.unpackbits(np.array([row.embedding for row in by_jinas_name.data], np.uint8), axis=1)
    assert (bits == (expected > 0)).mean() > 0.999


def test_half_precision_in_bytes(client, truth) -> None:
    raw = client.embeddings.with_raw_response.create(
        model=MODEL, input=TEXTS, encoding_format="bytes", extra_body={"embed_dtype": "float16"}
    )
    rows = np.frombuffer(raw.content, "<f2").reshape(len(TEXTS), -1)
    np.testing.assert_allclose(rows, truth(TEXTS), atol=1e-3)
    assert f'"shape":[{rows.shape[1]}]' in raw.headers["metadata"]


async def test_many_requests_at_once(server, client) -> None:
    texts = [f"text number {i} of many" for i in range(64)]
    expected = vectors(client.embeddings.create(model=MODEL, input=texts))
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as many:
        answers = await asyncio.gather(*(many.embeddings.create(model=MODEL, input=text) for text in texts))
    np.testing.assert_allclose(np.concatenate([vectors(answer) for answer in answers]), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "part"),
    [
        ({"model": "unknown", "input": "a"}, "NotFoundError", "'unknown'"),
        ({"model": MODEL, "input": [[99999]]}, "BadRequestError", "out of vocabulary"),
        ({"model": MODEL, "input": "word " * 1000}, "BadRequestError", "maximum context length is 256 tokens"),
    ],
)
def test_errors_arrive_typed_and_with_their_message(client, arguments: dict, error: str, part: str) -> None:
    with pytest.raises(getattr(openai, error)) as caught:
        client.embeddings.create(**arguments)
    assert part in str(caught.value)
    assert caught.value.request_id
    assert caught.value.type == "invalid_request_error"
