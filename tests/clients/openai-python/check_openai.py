"""openai (Python): embeddings and models."""

import asyncio

import openai
import plain_http as http
import pytest
from plain_http import KEY, MODEL, PROTECTED_URL, TEXTS, TOO_LONG, URL, assert_close


@pytest.fixture
def client():
    with openai.OpenAI(base_url=f"{URL}/v1", api_key="any") as client:
        yield client


def vectors(response) -> list[list[float]]:
    assert [row.index for row in response.data] == list(range(len(response.data)))
    return [row.embedding for row in response.data]


@pytest.mark.parametrize(
    "texts", [TEXTS, TEXTS[0], "", [[101, 2460, 102], [101, 102]], [101, 2460, 102], http.MANY], ids=lambda _: ""
)
def test_embeddings_equal_plain_http(client, texts):
    answer = client.embeddings.create(model=MODEL, input=texts)  # requests base64
    assert_close(vectors(answer), http.embed(texts))
    assert (answer.model, answer.object, answer.data[0].object) == (MODEL, "list", "embedding")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 1


def test_options_are_sent(client):
    options = {"encoding_format": "float", "dimensions": http.WIDTH, "user": "a-user"}
    assert_close(vectors(client.embeddings.create(model=MODEL, input=TEXTS, **options)), http.embed(TEXTS))
    cut = {"truncate_prompt_tokens": 10}
    answer = client.embeddings.create(model=MODEL, input=TOO_LONG, extra_body=cut)
    assert answer.usage.prompt_tokens == 10
    assert_close(vectors(answer), http.embed([TOO_LONG], **cut))
    raw = client.embeddings.with_raw_response.create(model=MODEL, input=TEXTS)
    assert raw.headers["x-request-id"]
    assert_close(vectors(raw.parse()), http.embed(TEXTS))


def test_images_are_sent_unmodified():
    items = [{"text": TEXTS[0]}, *({"image": image} for image in http.IMAGES)]
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{http.IMAGES[0]}"}}
    messages = {"messages": [{"role": "user", "content": [part]}]}
    expected = http.embed_items(items)
    with openai.OpenAI(base_url=f"{http.IMAGES_URL}/v1", api_key="any") as client:
        assert_close(vectors(client.embeddings.create(model=http.TWO_TOWER, input=items)), expected)
        answer = client.post("/embeddings", body=messages, cast_to=openai.types.CreateEmbeddingResponse)
        assert_close(vectors(answer), expected[1:2])


@pytest.mark.parametrize("path", ["/v1", "/v1/", ""])
def test_base_urls_have_models_and_embeddings(path):
    with openai.OpenAI(base_url=URL + path, api_key="any") as client:
        assert MODEL in [name for model in client.models.list() for name in (model.id, *model.aliases)]
        assert client.models.retrieve(MODEL).id == MODEL
        assert_close(vectors(client.embeddings.create(model=MODEL, input=TEXTS)), http.embed(TEXTS))


@pytest.mark.parametrize(
    ("arguments", "error", "param", "code", "part"),
    [
        ({"model": "unknown", "input": "a"}, openai.NotFoundError, "model", "model_not_found", "'unknown'"),
        ({"input": []}, openai.BadRequestError, "input", None, "empty list"),
        ({"input": [[99999]]}, openai.BadRequestError, "input", None, "out of vocabulary"),
        ({"input": TOO_LONG}, openai.BadRequestError, "input", "context_length_exceeded", "256 tokens"),
        ({"input": "a", "dimensions": 100}, openai.BadRequestError, "dimensions", None, "100"),
    ],
)
def test_errors_are_typed(client, arguments, error, param, code, part):
    with pytest.raises(error, match=part) as caught:
        client.embeddings.create(**{"model": MODEL, **arguments})
    assert (caught.value.param, caught.value.code, caught.value.type) == (param, code, "invalid_request_error")
    assert caught.value.request_id


def test_api_key_is_checked():
    with openai.OpenAI(base_url=f"{PROTECTED_URL}/v1", api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError, match="key"):
            client.embeddings.create(model=MODEL, input="a")
        assert client.with_options(api_key=KEY).embeddings.create(model=MODEL, input="a").data


@pytest.mark.parametrize(
    ("status", "num_sent"),
    [(429, 3), (503, 3), (408, 1), (400, 1)],  # 408: the deadline of the request
)
def test_requests_are_sent_as_often_as_the_status_allows(status, num_sent):
    server = http.Rejecting(status, 9, "openai")
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as client,
        pytest.raises(openai.APIStatusError) as caught,
    ):
        client.embeddings.create(model=MODEL, input=TEXTS)
    assert (caught.value.status_code, server.num_sent()) == (status, num_sent)


@pytest.mark.parametrize("status", [429, 503])
def test_third_attempt_after_two_rejections_succeeds(status):
    server = http.Rejecting(status, 2, "openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
        assert_close(vectors(client.embeddings.create(model=MODEL, input=TEXTS)), http.embed(TEXTS))
    assert server.num_sent() == 3


def test_rate_limit_is_retried():
    async def send(num_requests: int, max_retries: int) -> list:
        async with openai.AsyncOpenAI(base_url=f"{PROTECTED_URL}/v1", api_key=KEY, max_retries=max_retries) as client:
            requests = (client.embeddings.create(model=MODEL, input=["word " * 200] * 9) for _ in range(num_requests))
            return await asyncio.gather(*requests, return_exceptions=True)

    answers = asyncio.run(send(6, max_retries=0))
    rejected = [answer for answer in answers if isinstance(answer, Exception)]
    assert 0 < len(rejected) < len(answers)
    assert all(isinstance(error, openai.RateLimitError) for error in rejected)
    assert all(1 <= int(error.response.headers["retry-after"]) <= 60 for error in rejected)
    assert all(len(vectors(answer)) == 9 for answer in asyncio.run(send(3, max_retries=20)))
