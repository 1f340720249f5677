"""LanceDB: the embedding registry, and a table that uses it."""

import base64
import io

import lancedb
import plain_http as http
import pytest
from lancedb.embeddings import get_registry, jinaai
from lancedb.embeddings.cohere import CohereEmbeddingFunction
from lancedb.pydantic import LanceModel, Vector
from PIL import Image
from plain_http import MODEL, TEXTS, URL, assert_close


@pytest.fixture(autouse=True)
def servers(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    monkeypatch.setenv("COHERE_API_KEY", "any")
    monkeypatch.setenv("CO_API_URL", URL)  # LanceDB has no setting for it
    monkeypatch.setenv("JINA_API_KEY", "any")
    monkeypatch.setattr(jinaai, "API_URL", f"{URL}/v1/embeddings")  # LanceDB has no setting for it


def openai(**options):
    return get_registry().get("openai").create(**{"name": MODEL, "base_url": f"{URL}/v1", "max_retries": 0, **options})


@pytest.mark.parametrize(
    "connect",
    [
        openai,
        lambda: openai(dim=http.WIDTH),
        lambda: get_registry().get("cohere").create(name=MODEL, max_retries=0),
        lambda: get_registry().get("jina").create(name=MODEL, max_retries=0),
        lambda: get_registry().get("ollama").create(name=MODEL, host=URL, max_retries=0),
    ],
    ids=["openai", "openai-dim", "cohere", "jina", "ollama"],
)
def test_embeddings_equal_plain_http(connect):
    function = connect()
    assert_close([list(row) for row in function.compute_source_embeddings(TEXTS)], http.embed(TEXTS))
    assert_close([list(row) for row in function.compute_query_embeddings(TEXTS[1])], http.embed(TEXTS[1:2]))


def test_table_finds_the_nearest_text(tmp_path):
    # OpenAI's function knows the widths of models of OpenAI only.
    function = get_registry().get("ollama").create(name=MODEL, host=URL, max_retries=0)

    class Row(LanceModel):
        text: str = function.SourceField()
        vector: Vector(function.ndims()) = function.VectorField()

    table = lancedb.connect(tmp_path).create_table("texts", schema=Row)
    table.add([{"text": f"text number {i}"} for i in range(300)])
    assert table.search("text number 123").limit(1).to_pydantic(Row)[0].text == "text number 123"


def test_images_are_sent_unmodified(monkeypatch, tmp_path):
    monkeypatch.setattr(jinaai, "API_URL", f"{http.IMAGES_URL}/v1/embeddings")
    function = get_registry().get("jina").create(name=http.TWO_TOWER, max_retries=0)
    content = [base64.b64decode(image) for image in http.IMAGES]
    expected = http.embed_items([{"image": image} for image in http.IMAGES])
    assert_close(function.compute_source_embeddings(content), expected)
    opened = [Image.open(io.BytesIO(each)) for each in content]
    assert_close(function.compute_source_embeddings(opened), expected)
    (tmp_path / "image.png").write_bytes(content[0])
    assert_close(function.compute_query_embeddings(tmp_path / "image.png"), expected[:1])
    mixed = function.compute_source_embeddings([TEXTS[0], content[0]])
    assert_close(mixed, [*http.embed_items([{"text": TEXTS[0]}]), expected[0]])


def test_unknown_model_is_an_error_with_its_message(monkeypatch):
    with pytest.raises(Exception, match="'unknown'"):
        openai(name="unknown").compute_source_embeddings(TEXTS)
    monkeypatch.setattr(CohereEmbeddingFunction, "client", None)
    with pytest.raises(Exception, match="'unknown'"):
        get_registry().get("cohere").create(name="unknown", max_retries=0).compute_source_embeddings(TEXTS)
    with pytest.raises(RuntimeError, match="'unknown'"):
        get_registry().get("jina").create(name="unknown", max_retries=0).compute_source_embeddings(TEXTS)
