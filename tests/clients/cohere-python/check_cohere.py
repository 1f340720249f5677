"""cohere (Python), versions 1 and 2 of its API."""

import base64
import struct

import cohere
import plain_http as http
import pytest
from plain_http import DOCUMENTS, KEY, MODEL, PROTECTED_URL, QUERY, TEXTS, TOO_LONG, URL, assert_close, assert_ranks

CLIENTS = pytest.mark.parametrize("kind", [cohere.Client, cohere.ClientV2], ids=["v1", "v2"])
EMBEDDING = {"texts": TEXTS, "model": MODEL, "input_type": "search_document", "embedding_types": ["float"]}
RERANKING = {"model": http.RERANKER, "query": QUERY, "documents": DOCUMENTS}
v1 = cohere.Client(base_url=URL, api_key="any")
v2 = cohere.ClientV2(base_url=URL, api_key="any")


def ranks(answer) -> list[tuple[int, float]]:
    return [(item.index, item.relevance_score) for item in answer.results]


@CLIENTS
@pytest.mark.parametrize(("status", "num_sent"), [(429, 3), (503, 3), (400, 1)])
def test_requests_are_sent_as_often_as_the_status_allows(kind, status, num_sent):
    server = http.Rejecting(status, 9, "cohere")
    with pytest.raises(cohere.core.ApiError) as caught:
        kind(base_url=server.url, api_key="any").embed(**EMBEDDING)
    assert (caught.value.status_code, server.num_sent()) == (status, num_sent)


@CLIENTS
@pytest.mark.parametrize("status", [429, 503])
def test_third_attempt_after_two_rejections_succeeds(kind, status):
    server = http.Rejecting(status, 2, "cohere")
    answer = kind(base_url=server.url, api_key="any").embed(**EMBEDDING)
    assert_close(answer.embeddings.float_, http.embed(TEXTS))
    assert server.num_sent() == 3


def test_v1_embeddings_equal_plain_http():
    answer = v1.embed(texts=TEXTS, model=MODEL, input_type="search_document")
    assert_close(answer.embeddings, http.embed(TEXTS))
    assert answer.texts == TEXTS
    assert answer.meta.billed_units.input_tokens > 0
    many = v1.embed(texts=http.MANY[:250], model=MODEL, input_type="search_document", embedding_types=["float"])
    assert_close(many.embeddings.float_, http.embed(http.MANY[:250]))  # in batches of 96


def test_v2_embeddings_equal_plain_http():
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    answer = v2.embed(texts=TEXTS, model=MODEL, input_type="search_document", embedding_types=types).embeddings
    assert_close(answer.float_, http.embed(TEXTS))
    for name in ("int8", "uint8", "binary", "ubinary"):
        assert getattr(answer, name) == http.embed(TEXTS, encoding_format=name)
    raw = [base64.b64decode(row) for row in answer.base64]
    assert_close([struct.unpack(f"<{http.WIDTH}f", row) for row in raw], http.embed(TEXTS))
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    answer = v2.embed(inputs=inputs, model=MODEL, input_type="search_document", output_dimension=http.WIDTH)
    assert_close(answer.embeddings.float_, http.embed(TEXTS))


def test_images_are_sent_unmodified():
    client = cohere.ClientV2(base_url=http.IMAGES_URL, api_key="any")
    uris = [f"data:image/png;base64,{image}" for image in http.IMAGES]
    expected = http.embed_items([{"image": image} for image in http.IMAGES])
    arguments = {"model": http.TWO_TOWER, "embedding_types": ["float"]}
    answer = client.embed(images=uris, input_type="image", **arguments)  # one request for each image
    assert_close(answer.embeddings.float_, expected)
    parts = [{"type": "image_url", "image_url": {"url": uri}} for uri in uris]
    parts.append({"type": "text", "text": TEXTS[0]})
    answer = client.embed(inputs=[{"content": [part]} for part in parts], input_type="search_document", **arguments)
    assert_close(answer.embeddings.float_, [*expected, *http.embed_items([{"text": TEXTS[0]}])])
    one = cohere.Client(base_url=http.IMAGES_URL, api_key="any").embed(images=uris[:1], input_type="image", **arguments)
    assert_close(one.embeddings.float_, expected[:1])


@CLIENTS
def test_ranks_equal_plain_http(kind):
    client = kind(base_url=http.RERANKER_URL, api_key="any")
    assert_ranks(ranks(client.rerank(**RERANKING)), http.rerank())
    assert_ranks(ranks(client.rerank(**RERANKING, top_n=2)), http.rerank()[:2])
    assert len(client.rerank(**RERANKING, top_n=99).results) == len(DOCUMENTS)
    embedder = kind(base_url=f"{URL}/v1", api_key="any")
    assert_ranks(ranks(embedder.rerank(**RERANKING | {"model": MODEL})), http.rerank(url=URL))


def test_v1_documents_are_returned_and_fields_are_ranked():
    client = cohere.Client(base_url=http.RERANKER_URL, api_key="any")
    documents = RERANKING | {"documents": [{"text": text, "title": "x"} for text in DOCUMENTS]}
    answer = client.rerank(**documents, return_documents=True)
    assert_ranks(ranks(answer), http.rerank())
    assert [item.document.text for item in answer.results] == [DOCUMENTS[item.index] for item in answer.results]
    assert_ranks(ranks(client.rerank(**documents, rank_fields=["title"])), http.rerank(["x"] * len(DOCUMENTS)))


def test_classify_uses_examples():
    examples = [("Where is my parcel?", "shipping"), ("When does it arrive?", "shipping")]
    examples = [{"text": text, "label": label} for text, label in [*examples, *http.REFUNDS]]
    inputs = ["The delivery is late.", "Give me a refund."]
    answer = v1.classify(model=MODEL, inputs=inputs, examples=[cohere.ClassifyExample(**each) for each in examples])
    expected = http.post("/v1/classify", {"inputs": inputs, "examples": examples})["classifications"]
    assert [item.prediction for item in answer.classifications] == ["shipping", "refund"]
    assert_close([i.confidence for i in answer.classifications], [i["confidence"] for i in expected])


@CLIENTS
def test_tokens_are_decoded_to_the_text(kind):
    client = kind(base_url=URL, api_key="any")
    answer = client.tokenize(text="penstocks hold water", model=MODEL)
    assert answer.token_strings == ["pens", "##tock", "##s", "hold", "water"]
    assert client.detokenize(tokens=answer.tokens, model=MODEL).text == "penstocks hold water"


def test_models_are_listed():
    assert [model.name.rpartition("/")[2] for model in v1.models.list().models] == [MODEL]
    assert v1.models.get(MODEL).endpoints == ["embed", "rerank", "classify"]


@pytest.mark.parametrize(
    ("call", "error", "part"),
    [
        (lambda: v2.embed(texts=TEXTS, model="x", input_type="search_query"), cohere.NotFoundError, "'x'"),
        (
            lambda: v1.embed(texts=[TOO_LONG], model=MODEL, input_type="search_query", truncate="NONE"),
            cohere.BadRequestError,
            "maximum context length is 256 tokens",
        ),
        (lambda: v2.rerank(model=MODEL, query=QUERY, documents=[]), cohere.BadRequestError, "empty list"),
    ],
)
def test_errors_are_typed(call, error, part):
    with pytest.raises(error) as caught:
        call()
    assert part in caught.value.body["message"]


@CLIENTS
def test_api_key_is_checked(kind):
    with pytest.raises(cohere.UnauthorizedError) as caught:
        kind(base_url=PROTECTED_URL, api_key="wrong").rerank(**RERANKING | {"model": MODEL})
    assert "key" in caught.value.body["message"]
    answer = kind(base_url=PROTECTED_URL, api_key=KEY).rerank(**RERANKING | {"model": MODEL})
    assert_ranks(ranks(answer), http.rerank(url=URL))
