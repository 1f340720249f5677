"""mistralai, whose model of the answer is strict, against /v1/embeddings."""

import asyncio

import pytest
from mistralai.client import Mistral
from mistralai.client.errors import SDKError
from plain_http import KEY, MANY, MODEL, PROTECTED_URL, TEXTS, URL, WIDTH, assert_close, embed


@pytest.fixture
def client():
    return Mistral(api_key="any", server_url=URL)


def vectors(answer) -> list[list[float]]:
    assert [row.index for row in answer.data] == list(range(len(answer.data)))
    return [row.embedding for row in answer.data]


def test_embeddings(client):
    answer = client.embeddings.create(model=MODEL, inputs=TEXTS)
    assert_close(vectors(answer), embed(TEXTS))
    assert answer.usage.total_tokens > 0
    assert_close(vectors(client.embeddings.create(model=MODEL, inputs=TEXTS[0])), embed(TEXTS[:1]))


@pytest.mark.parametrize("output_dtype", ["float", "int8", "uint8", "binary", "ubinary"])
def test_output_dtype_and_dimension(client, output_dtype):
    answer = client.embeddings.create(
        model=MODEL, inputs=TEXTS, output_dtype=output_dtype, output_dimension=WIDTH, encoding_format="float"
    )
    assert_close(vectors(answer), embed(TEXTS, encoding_format=output_dtype))


def test_many_texts(client):
    assert_close(vectors(client.embeddings.create(model=MODEL, inputs=MANY[:256])), embed(MANY[:256]))


def test_async(client):
    assert_close(vectors(asyncio.run(client.embeddings.create_async(model=MODEL, inputs=TEXTS))), embed(TEXTS))


def test_errors(client):
    with pytest.raises(SDKError, match="'unknown'") as caught:
        client.embeddings.create(model="unknown", inputs=TEXTS)
    assert caught.value.status_code == 404


def test_api_key():
    with pytest.raises(SDKError) as caught:
        Mistral(api_key="wrong", server_url=PROTECTED_URL).embeddings.create(model=MODEL, inputs=TEXTS)
    assert caught.value.status_code == 401
    answer = Mistral(api_key=KEY, server_url=PROTECTED_URL).embeddings.create(model=MODEL, inputs=TEXTS)
    assert_close(vectors(answer), embed(TEXTS))
