"""mistralai, which parses responses strictly: /v1/embeddings."""

import plain_http as http
import pytest
from mistralai.client import Mistral
from mistralai.client.errors import SDKError
from plain_http import MODEL, PROTECTED_URL, TEXTS, URL, assert_close


def embed(inputs, *, url=URL, key="any", model=MODEL, **options):
    return Mistral(api_key=key, server_url=url).embeddings.create(model=model, inputs=inputs, **options)


def vectors(answer) -> list[list[float]]:
    assert [row.index for row in answer.data] == list(range(len(answer.data)))
    return [row.embedding for row in answer.data]


@pytest.mark.parametrize("texts", [TEXTS, TEXTS[0], http.MANY[:256]], ids=["texts", "text", "many"])
def test_embeddings_equal_plain_http(texts):
    answer = embed(texts)
    assert_close(vectors(answer), http.embed(texts))
    assert answer.usage.total_tokens > 0


@pytest.mark.parametrize("output_dtype", ["float", "int8", "uint8", "binary", "ubinary"])
def test_types_equal_plain_http(output_dtype):
    options = {"output_dtype": output_dtype, "output_dimension": http.WIDTH, "encoding_format": "float"}
    assert_close(vectors(embed(TEXTS, **options)), http.embed(TEXTS, encoding_format=output_dtype))


@pytest.mark.parametrize(
    ("options", "status", "part"),
    [({"model": "unknown"}, 404, "'unknown'"), ({"url": PROTECTED_URL, "key": "wrong"}, 401, "key")],
)
def test_errors_have_status_and_message(options, status, part):
    with pytest.raises(SDKError, match=part) as caught:
        embed(TEXTS, **options)
    assert caught.value.status_code == status


def test_api_key_is_accepted():
    assert_close(vectors(embed(TEXTS, url=PROTECTED_URL, key=http.KEY)), http.embed(TEXTS))
