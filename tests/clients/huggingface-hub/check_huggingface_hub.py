"""huggingface_hub's InferenceClient against TEI's routes."""

import asyncio

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from plain_http import (
    CLASSIFIER_URL,
    DOCUMENTS,
    KEY,
    LABELS,
    MANY,
    PROTECTED_URL,
    QUERY,
    TEXTS,
    TOO_LONG,
    URL,
    WIDTH,
    assert_close,
    embed,
    post,
)


@pytest.fixture(params=["", "/", "/embed"])
def client(request):
    return InferenceClient(model=URL + request.param, token="any")


def test_feature_extraction(client):
    assert_close(client.feature_extraction(TEXTS), embed(TEXTS))
    assert_close(client.feature_extraction(TEXTS[0]), embed(TEXTS[:1]))


def test_feature_extraction_options(client):
    vectors = client.feature_extraction(
        TOO_LONG, normalize=True, truncate=True, truncation_direction="left", dimensions=WIDTH
    )
    assert_close(vectors, embed([TOO_LONG], truncate_prompt_tokens=-1, truncation_side="left"))


def test_many_texts():
    assert_close(InferenceClient(model=URL).feature_extraction(MANY[:1024]), embed(MANY[:1024]))


def test_async_client():
    assert_close(asyncio.run(AsyncInferenceClient(model=URL).feature_extraction(TEXTS)), embed(TEXTS))


@pytest.mark.parametrize("path", ["", "/similarity"])
def test_sentence_similarity(path):
    found = InferenceClient(model=URL + path, token="any").sentence_similarity(QUERY, DOCUMENTS)
    assert_close(found, [row["score"] for row in post("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS})["data"]])


def test_text_classification():
    client = InferenceClient(model=CLASSIFIER_URL, token="any")
    (expected,) = post("/predict", {"inputs": [[TEXTS[0]]]}, CLASSIFIER_URL)
    found = client.text_classification(TEXTS[0])
    assert {row.label for row in found} == LABELS
    assert [row.label for row in found] == [row["label"] for row in expected]
    assert_close([row.score for row in found], [row["score"] for row in expected])
    assert_close([row.score for row in client.text_classification(TEXTS[0], top_k=1)], [expected[0]["score"]])


def test_endpoint_info_and_health():
    client = InferenceClient(model=URL, provider="hf-inference")
    info = client.get_endpoint_info()
    assert (info["model_type"], info["max_input_length"]) == ({"embedding": {"pooling": "mean"}}, 256)
    assert client.health_check()


def test_errors(client):
    with pytest.raises(HfHubHTTPError, match=r"maximum context length is 256 tokens") as caught:
        client.feature_extraction(TOO_LONG, truncate=False)
    assert caught.value.response.status_code == 422
    with pytest.raises(HfHubHTTPError, match="prompt_name is 'x'"):
        client.feature_extraction("a", prompt_name="x")
    with pytest.raises(HfHubHTTPError, match="does not support the task"):
        InferenceClient(model=f"{CLASSIFIER_URL}/embed").feature_extraction("a")


def test_api_key():
    with pytest.raises(HfHubHTTPError, match="key") as caught:
        InferenceClient(model=PROTECTED_URL, token="wrong").feature_extraction("a")
    assert caught.value.response.status_code == 401
    assert_close(InferenceClient(model=PROTECTED_URL, token=KEY).feature_extraction("a"), embed(["a"]))
