"""voyageai: /v1/embeddings, /v1/multimodalembeddings and /v1/rerank."""

import base64
import io

import plain_http as http
import pytest
import voyageai
from PIL import Image
from plain_http import DOCUMENTS, MODEL, PROTECTED_URL, QUERY, TEXTS, TOO_LONG, URL, assert_close, assert_ranks
from voyageai.error import AuthenticationError, InvalidRequestError, VoyageError


def embed(texts, *, url=URL, key="any", model=MODEL, **options):
    return voyageai.Client(api_key=key, base_url=f"{url}/v1").embed(texts, model=model, **options)


def ranks(answer) -> list[tuple[int, float]]:
    return [(result.index, result.relevance_score) for result in answer.results]


@pytest.mark.parametrize(
    ("texts", "input_type"), [(TEXTS, None), (TEXTS, "query"), (TEXTS, "document"), (http.MANY[:1000], None)]
)
def test_embeddings_equal_plain_http(texts, input_type):
    answer = embed(texts, input_type=input_type)
    assert_close(answer.embeddings, http.embed(texts))
    assert answer.total_tokens > 0


@pytest.mark.parametrize("output_dtype", ["float", "int8", "uint8", "binary", "ubinary"])
def test_types_equal_plain_http(output_dtype):
    answer = embed(TEXTS, output_dtype=output_dtype, output_dimension=http.WIDTH)
    assert_close(answer.embeddings, http.embed(TEXTS, encoding_format=output_dtype))


def test_long_text_is_cut():
    assert_close(embed([TOO_LONG]).embeddings, http.embed([TOO_LONG], truncate_prompt_tokens=-1))


def test_multimodal_texts_equal_plain_http():
    client = voyageai.Client(api_key="any", base_url=f"{URL}/v1")
    answer = client.multimodal_embed([[text] for text in TEXTS], model=MODEL, input_type="document")
    assert_close(answer.embeddings, http.embed(TEXTS))
    assert (answer.text_tokens, answer.image_pixels) == (answer.total_tokens, 0)
    with pytest.raises(InvalidRequestError, match=r"inputs\[1\]\.content\[0\]\.image_base64 is an image"):
        client.multimodal_embed([["a text"], [Image.new("RGB", (4, 4))]], model=MODEL)


def test_images_are_sent_unmodified():
    client = voyageai.Client(api_key="any", base_url=f"{http.IMAGES_URL}/v1")
    images = [Image.open(io.BytesIO(base64.b64decode(image))) for image in http.IMAGES]
    expected = http.embed_items([*({"image": image} for image in http.IMAGES), {"text": TEXTS[0]}])
    answer = client.multimodal_embed([[image] for image in images] + [[TEXTS[0]]], model=http.TWO_TOWER)
    assert_close(answer.embeddings, expected)
    assert answer.image_pixels == sum(image.width * image.height for image in images)
    with pytest.raises(InvalidRequestError, match="has an image beside a text"):
        client.multimodal_embed([[TEXTS[0], images[0]]], model=http.TWO_TOWER)


def test_ranks_equal_plain_http():
    client = voyageai.Client(api_key="any", base_url=f"{http.RERANKER_URL}/v1")
    answer = client.rerank(QUERY, DOCUMENTS, model=http.RERANKER)
    assert_ranks(ranks(answer), http.rerank())
    assert [result.document for result in answer.results] == [DOCUMENTS[result.index] for result in answer.results]
    assert answer.total_tokens > 0
    assert_ranks(ranks(client.rerank(QUERY, DOCUMENTS, model=http.RERANKER, top_k=2)), http.rerank()[:2])


@pytest.mark.parametrize(
    ("texts", "options", "error", "part"),
    [
        (TEXTS, {"model": "unknown"}, VoyageError, "'unknown'"),
        (TEXTS, {"output_dimension": 100}, InvalidRequestError, "output_dimension is 100"),
        ([TOO_LONG], {"truncation": False}, InvalidRequestError, "maximum context length is 256 tokens"),
        (TEXTS, {"url": PROTECTED_URL, "key": "wrong"}, AuthenticationError, "key"),
    ],
)
def test_errors_are_typed(texts, options, error, part):
    with pytest.raises(error, match=part):
        embed(texts, **options)


def test_api_key_is_accepted():
    assert_close(embed(TEXTS, url=PROTECTED_URL, key=http.KEY).embeddings, http.embed(TEXTS))
