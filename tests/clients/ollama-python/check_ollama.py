"""ollama (PyPI) against /api: embeddings, the list of models, and what there is none of."""

import asyncio

import pytest
from ollama import AsyncClient, Client, ResponseError
from plain_http import KEY, MANY, MODEL, PROTECTED_URL, TEXTS, TOO_LONG, URL, WIDTH, assert_close, embed


@pytest.fixture
def client():
    return Client(host=URL)


def test_embed(client):
    answer = client.embed(model=MODEL, input=TEXTS)
    assert_close([list(row) for row in answer.embeddings], embed(TEXTS))
    assert answer.model == MODEL
    assert answer.prompt_eval_count > 0
    assert answer.total_duration > 0
    one = client.embed(model=f"{MODEL}:latest", input=TEXTS[0], keep_alive="10m", options={"num_ctx": 256})
    assert_close([list(row) for row in one.embeddings], embed(TEXTS[:1]))


def test_dimensions(client):
    assert len(client.embed(model=MODEL, input="a", dimensions=WIDTH).embeddings[0]) == WIDTH
    with pytest.raises(ResponseError, match="dimensions is 100"):
        client.embed(model=MODEL, input="a", dimensions=100)


def test_truncate(client):
    assert len(client.embed(model=MODEL, input=TOO_LONG).embeddings) == 1
    with pytest.raises(ResponseError, match="maximum context length") as caught:
        client.embed(model=MODEL, input=TOO_LONG, truncate=False)
    assert caught.value.status_code == 400


def test_many_texts(client):
    assert_close([list(row) for row in client.embed(model=MODEL, input=MANY[:256]).embeddings], embed(MANY[:256]))


def test_the_older_call(client):
    answer = client.embeddings(model=MODEL, prompt=TEXTS[0])
    length = sum(x * x for x in answer.embedding) ** 0.5
    assert_close([[x / length for x in answer.embedding]], embed(TEXTS[:1]))


def test_models(client):
    (model,) = [model for model in client.list().models if model.model == MODEL]
    assert model.size > 0
    assert model.modified_at.year >= 2020
    assert model.details.family == "bert"
    (loaded,) = client.ps().models
    assert loaded.model.endswith(MODEL)
    shown = client.show(MODEL)
    assert shown.capabilities == ["embedding"]
    assert shown.modelinfo["bert.embedding_length"] == WIDTH
    assert client.pull(MODEL).status == "success"
    assert [step.status for step in client.pull(MODEL, stream=True)] == ["success"]


def test_async():
    answer = asyncio.run(AsyncClient(host=URL).embed(model=MODEL, input=TEXTS))
    assert_close([list(row) for row in answer.embeddings], embed(TEXTS))


def test_errors(client):
    for call in (lambda: client.embed(model="unknown", input="a"), lambda: client.pull("unknown")):
        with pytest.raises(ResponseError, match="'unknown' does not exist") as caught:
            call()
        assert caught.value.status_code == 404
    with pytest.raises(ResponseError, match="writes none"):
        client.generate(model=MODEL, prompt="Why?")
    with pytest.raises(ResponseError, match="writes none"):
        client.chat(model=MODEL, messages=[{"role": "user", "content": "Why?"}])


def test_api_key():
    with pytest.raises(ResponseError) as caught:
        Client(host=PROTECTED_URL).embed(model=MODEL, input="a")
    assert caught.value.status_code == 401
    client = Client(host=PROTECTED_URL, headers={"Authorization": f"Bearer {KEY}"})
    assert len(client.embed(model=MODEL, input="a").embeddings) == 1
