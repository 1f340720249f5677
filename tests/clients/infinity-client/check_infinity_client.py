"""infinity_client, which is generated and strict: /embeddings, /rerank and /classify."""

import plain_http as http
import pytest
from infinity_client import AuthenticatedClient, Client
from infinity_client.api.default import classify, embeddings, rerank
from infinity_client.errors import UnexpectedStatus
from infinity_client.models import ClassifyInput, OpenAIEmbeddingInputImage, OpenAIEmbeddingInputText, RerankInput
from infinity_client.models.embedding_encoding_format import EmbeddingEncodingFormat
from plain_http import DOCUMENTS, MODEL, PROTECTED_URL, QUERY, TEXTS, URL, assert_close, assert_ranks


def connect(url: str) -> Client:
    return Client(base_url=url, raise_on_unexpected_status=True, timeout=60)


@pytest.mark.parametrize(
    "options", [{}, {"dimensions": http.WIDTH, "encoding_format": EmbeddingEncodingFormat.FLOAT, "model": MODEL}]
)
def test_embeddings_equal_plain_http(options):
    answer = embeddings.sync(client=connect(URL), body=OpenAIEmbeddingInputText(input_=TEXTS, **options))
    assert_close([row.embedding for row in answer.data], http.embed(TEXTS))
    assert answer.model.rpartition("/")[2] == MODEL
    assert answer.usage.total_tokens > 0


@pytest.mark.parametrize("num_images", [1, 3])
def test_images_are_sent_unmodified(num_images):
    images = http.IMAGES[:num_images]
    uris = [f"data:image/png;base64,{image}" for image in images]
    body = OpenAIEmbeddingInputImage(input_=uris if num_images > 1 else uris[0], model=http.TWO_TOWER)
    answer = embeddings.sync(client=connect(http.IMAGES_URL), body=body)
    expected = http.embed_items([{"image": image} for image in images])
    assert_close([row.embedding for row in answer.data], expected)
    texts = OpenAIEmbeddingInputText(input_=TEXTS[:3], model=http.TWO_TOWER)
    answer = embeddings.sync(client=connect(http.IMAGES_URL), body=texts)
    assert_close([row.embedding for row in answer.data], http.embed_items([{"text": text} for text in TEXTS[:3]]))


@pytest.mark.parametrize(("options", "num_ranks"), [({}, 4), ({"top_n": 2}, 2)])
def test_ranks_equal_plain_http(options, num_ranks):
    body = RerankInput(query=QUERY, documents=DOCUMENTS, **options)
    answer = rerank.sync(client=connect(http.RERANKER_URL), body=body)
    assert_ranks([(row.index, row.relevance_score) for row in answer.results], http.rerank()[:num_ranks])


def test_classes_equal_plain_http():
    answer = classify.sync(client=connect(http.CLASSIFIER_URL), body=ClassifyInput(input_=TEXTS))
    for row, expected in zip(answer.data, http.classify(TEXTS), strict=True):
        assert [entry.label for entry in row] == [entry["label"] for entry in expected]
        assert_close([entry.score for entry in row], [entry["score"] for entry in expected])


@pytest.mark.parametrize(("url", "options", "status"), [(URL, {"model": "x"}, "404"), (PROTECTED_URL, {}, "401")])
def test_errors_have_a_status(url, options, status):
    with pytest.raises(UnexpectedStatus, match=status):
        embeddings.sync(client=connect(url), body=OpenAIEmbeddingInputText(input_=TEXTS, **options))


def test_api_key_is_accepted():
    client = AuthenticatedClient(base_url=PROTECTED_URL, token=http.KEY, timeout=60)
    answer = embeddings.sync(client=client, body=OpenAIEmbeddingInputText(input_=TEXTS))
    assert_close([row.embedding for row in answer.data], http.embed(TEXTS))
