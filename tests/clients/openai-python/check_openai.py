"""openai (Python) against /v1/embeddings and /v1/models."""

import asyncio

import openai
import pytest
from plain_http import KEY, MANY, MODEL, PROTECTED_URL, TEXTS, TOO_LONG, URL, WIDTH, assert_close, embed


@pytest.fixture
def client():
    with openai.OpenAI(base_url=f"{URL}/v1", api_key="any") as client:
        yield client


def vectors(response) -> list[list[float]]:
    assert [row.index for row in response.data] == list(range(len(response.data)))
    return [row.embedding for row in response.data]


def test_default_call(client):
    answer = client.embeddings.create(model=MODEL, input=TEXTS)  # asks for base64
    assert_close(vectors(answer), embed(TEXTS))
    assert (answer.model, answer.object, answer.data[0].object) == (MODEL, "list", "embedding")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > len(TEXTS)


@pytest.mark.parametrize("base", ["/v1/", ""])
def test_base_urls(base):
    with openai.OpenAI(base_url=URL + base, api_key="any") as client:
        assert_close(vectors(client.embeddings.create(model=MODEL, input=TEXTS)), embed(TEXTS))
        assert client.models.retrieve(MODEL).id == MODEL


def test_one_text(client):
    assert_close(vectors(client.embeddings.create(model=MODEL, input=TEXTS[0])), embed(TEXTS[:1]))
    assert len(vectors(client.embeddings.create(model=MODEL, input=""))[0]) == WIDTH


def test_floats(client):
    assert_close(vectors(client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")), embed(TEXTS))


def test_token_ids(client):
    ids = [[101, 2460, 102], [101, 102]]
    assert_close(vectors(client.embeddings.create(model=MODEL, input=ids)), embed(["short", ""]))
    assert_close(vectors(client.embeddings.create(model=MODEL, input=ids[0])), embed(["short"]))


def test_dimensions(client):
    answer = client.embeddings.create(model=MODEL, input=TEXTS, dimensions=WIDTH, user="somebody")
    assert_close(vectors(answer), embed(TEXTS))
    with pytest.raises(openai.BadRequestError, match="100") as caught:
        client.embeddings.create(model=MODEL, input=TEXTS, dimensions=100)
    assert caught.value.param == "dimensions"


def test_2048_texts(client):
    assert_close(vectors(client.embeddings.create(model=MODEL, input=MANY)), embed(MANY))


def test_extra_body(client):
    answer = client.embeddings.create(model=MODEL, input=TOO_LONG, extra_body={"truncate_prompt_tokens": 10})
    assert answer.usage.prompt_tokens == 10
    assert_close(vectors(answer), embed([TOO_LONG], truncate_prompt_tokens=10))


def test_models(client):
    assert MODEL in [name for model in client.models.list() for name in (model.id, *model.aliases)]
    assert client.models.retrieve(MODEL).id == MODEL


def test_raw_response(client):
    raw = client.embeddings.with_raw_response.create(model=MODEL, input=TEXTS)
    assert raw.headers["x-request-id"]
    assert_close(vectors(raw.parse()), embed(TEXTS))


@pytest.mark.parametrize(
    ("arguments", "error", "param", "code", "part"),
    [
        ({"model": "unknown", "input": "a"}, openai.NotFoundError, "model", "model_not_found", "'unknown'"),
        ({"model": MODEL, "input": []}, openai.BadRequestError, "input", None, "empty list"),
        ({"model": MODEL, "input": [[99999]]}, openai.BadRequestError, "input", None, "out of vocabulary"),
        ({"model": MODEL, "input": TOO_LONG}, openai.BadRequestError, "input", "context_length_exceeded", "256 tokens"),
    ],
)
def test_errors(client, arguments, error, param, code, part):
    with pytest.raises(error, match=part) as caught:
        client.embeddings.create(**arguments)
    assert (caught.value.param, caught.value.code, caught.value.type) == (param, code, "invalid_request_error")
    assert caught.value.request_id


def test_api_key():
    with openai.OpenAI(base_url=f"{PROTECTED_URL}/v1", api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError, match="key"):
            client.embeddings.create(model=MODEL, input="a")
        assert client.with_options(api_key=KEY).embeddings.create(model=MODEL, input="a").data


def test_async_client():
    async def ask() -> list:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="any") as client:
            return await asyncio.gather(*(client.embeddings.create(model=MODEL, input=text) for text in MANY[:64]))

    assert_close([vectors(answer)[0] for answer in asyncio.run(ask())], embed(MANY[:64]))


def test_rate_limit_and_retries():
    async def ask(num_requests: int, max_retries: int) -> list:
        async with openai.AsyncOpenAI(base_url=f"{PROTECTED_URL}/v1", api_key=KEY, max_retries=max_retries) as client:
            requests = (client.embeddings.create(model=MODEL, input=["word " * 200] * 9) for _ in range(num_requests))
            return await asyncio.gather(*requests, return_exceptions=True)

    answers = asyncio.run(ask(6, max_retries=0))
    refused = [answer for answer in answers if isinstance(answer, Exception)]
    assert 0 < len(refused) < len(answers)
    assert all(isinstance(error, openai.RateLimitError) for error in refused)
    assert all(1 <= int(error.response.headers["retry-after"]) <= 60 for error in refused)
    patient = asyncio.run(ask(3, max_retries=20))
    assert all(len(vectors(answer)) == 9 for answer in patient)
