"""Chroma: embedding functions that call a server, and a collection that uses one."""

import base64
import io

import chromadb
import cohere
import numpy as np
import plain_http as http
import pytest
from chromadb.utils import embedding_functions as functions
from PIL import Image
from plain_http import MODEL, PROTECTED_URL, TEXTS, URL, assert_close

IMAGES = [np.array(Image.open(io.BytesIO(base64.b64decode(image)))) for image in http.IMAGES]


def embed_with_cohere(model=MODEL, url=URL):
    function = functions.CohereEmbeddingFunction(api_key="any", model_name=model)
    function.client = cohere.Client(base_url=url, api_key="any")  # Chroma has no setting for the URL
    return function


def jina(url=URL, model=MODEL, **options):
    function = functions.JinaEmbeddingFunction(api_key="any", model_name=model, **options)
    function._api_url = f"{url}/v1/embeddings"  # Chroma has no setting for it
    return function


def openai(url=URL, key="any", model=MODEL):
    return functions.OpenAIEmbeddingFunction(api_key=key, model_name=model, api_base=f"{url}/v1")


@pytest.mark.parametrize(
    "connect",
    [
        openai,
        embed_with_cohere,
        lambda: functions.HuggingFaceEmbeddingServer(url=f"{URL}/embed"),
        jina,
        lambda: jina(
            task="retrieval.passage",
            truncate=True,
            dimensions=http.WIDTH,
            embedding_type="float",
            normalized=True,
            late_chunking=False,
        ),
        lambda: functions.OllamaEmbeddingFunction(url=URL, model_name=MODEL),
    ],
    ids=["openai", "cohere", "huggingface", "jina", "jina-options", "ollama"],
)
def test_embeddings_equal_plain_http(connect):
    function = connect()
    assert_close([row.tolist() for row in function(TEXTS)], http.embed(TEXTS))
    assert_close([row.tolist() for row in function.embed_query(TEXTS[:1])], http.embed(TEXTS[:1]))


def test_collection_finds_the_nearest_text():
    collection = chromadb.EphemeralClient().create_collection("texts", embedding_function=openai())
    texts = [f"text number {i}" for i in range(300)]
    collection.add(ids=texts, documents=texts)
    assert collection.query(query_texts=["text number 123"], n_results=1)["ids"] == [["text number 123"]]


def test_images_are_sent_unmodified():
    expected = http.embed_items([{"image": image} for image in http.IMAGES])
    for function in (embed_with_cohere(http.TWO_TOWER, http.IMAGES_URL), jina(http.IMAGES_URL, http.TWO_TOWER)):
        assert_close([row.tolist() for row in function(IMAGES)], expected)
    mixed = jina(http.IMAGES_URL, http.TWO_TOWER)([IMAGES[0], TEXTS[0]])
    assert_close([row.tolist() for row in mixed], [expected[0], *http.embed_items([{"text": TEXTS[0]}])])


@pytest.mark.parametrize(
    ("connect", "part"),
    [
        (lambda: openai(model="unknown"), "'unknown'"),
        (lambda: openai(PROTECTED_URL, "wrong"), "key"),
        (lambda: embed_with_cohere("unknown"), "'unknown'"),
        (lambda: jina(model="unknown"), "'unknown'"),
        (lambda: functions.OllamaEmbeddingFunction(url=URL, model_name="unknown"), "'unknown'"),
    ],
    ids=["openai-model", "openai-key", "cohere-model", "jina-model", "ollama-model"],
)
def test_errors_have_the_message(connect, part):
    with pytest.raises(Exception, match=part):
        connect()(TEXTS)
