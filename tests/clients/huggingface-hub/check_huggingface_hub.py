"""huggingface_hub's InferenceClient and the routes of TEI."""

import plain_http as http
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from plain_http import CLASSIFIER_URL, KEY, PROTECTED_URL, QUERY, TEXTS, TOO_LONG, URL, assert_close


@pytest.fixture(params=["", "/", "/embed"])
def client(request):
    return InferenceClient(model=URL + request.param, token="any")


def test_embeddings_equal_plain_http(client):
    assert_close(client.feature_extraction(TEXTS), http.embed(TEXTS))
    assert_close(client.feature_extraction(TEXTS[0]), http.embed(TEXTS[:1]))
    options = {"normalize": True, "truncate": True, "truncation_direction": "left", "dimensions": http.WIDTH}
    expected = http.embed([TOO_LONG], truncate_prompt_tokens=-1, truncation_side="left")
    assert_close(client.feature_extraction(TOO_LONG, **options), expected)
    assert_close(client.feature_extraction(http.MANY[:1024]), http.embed(http.MANY[:1024]))


@pytest.mark.parametrize("path", ["", "/similarity"])
def test_similarities_equal_plain_http(path):
    found = InferenceClient(model=URL + path, token="any").sentence_similarity(QUERY, http.DOCUMENTS)
    assert_close(found, http.score())


def test_classes_equal_plain_http():
    client = InferenceClient(model=CLASSIFIER_URL, token="any")
    (expected,) = http.classify(TEXTS[:1])
    found = client.text_classification(TEXTS[0])
    assert {row.label for row in found} == http.LABELS
    assert [row.label for row in found] == [row["label"] for row in expected]
    assert_close([row.score for row in found], [row["score"] for row in expected])
    assert_close([row.score for row in client.text_classification(TEXTS[0], top_k=1)], [expected[0]["score"]])


def test_endpoint_info_describes_the_model():
    client = InferenceClient(model=URL, provider="hf-inference")
    info = client.get_endpoint_info()
    assert (info["model_type"], info["max_input_length"]) == ({"embedding": {"pooling": "mean"}}, 256)
    assert client.health_check()


@pytest.mark.parametrize(
    ("url", "token", "text", "options", "status", "part"),
    [
        (URL, "any", TOO_LONG, {"truncate": False}, 422, "maximum context length is 256 tokens"),
        (URL, "any", "a", {"prompt_name": "x"}, 422, "prompt_name is 'x'"),
        (f"{CLASSIFIER_URL}/embed", "any", "a", {}, 424, "does not support the task"),
        (PROTECTED_URL, "wrong", "a", {}, 401, "key"),
    ],
)
def test_errors_have_status_and_message(url, token, text, options, status, part):
    with pytest.raises(HfHubHTTPError, match=part) as caught:
        InferenceClient(model=url, token=token).feature_extraction(text, **options)
    assert caught.value.response.status_code == status


def test_api_key_is_accepted():
    assert_close(InferenceClient(model=PROTECTED_URL, token=KEY).feature_extraction("a"), http.embed(["a"]))
