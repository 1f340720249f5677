"""Documents that are objects: their text, their fields named in rank_fields, and how they come back."""

import httpx
import pytest

QUERY = "red green"
TITLED = {"title": "red", "body": "green", "text": "blue", "year": 1907}

# (what, document, rank_fields, the text that is ranked)
DOCUMENTS = [
    ("text", "plain", None, "plain"),
    ("object with text", TITLED, None, "blue"),
    ("one field", TITLED, ["title"], "red"),
    ("the order is that of rank_fields", TITLED, ["body", "title"], "green\nred"),
    ("a missing field", TITLED, ["title", "author"], "red"),
    ("a number", TITLED, ["title", "year"], "red\n1907"),
    ("a nested value", {"tags": ["a", "b"]}, ["tags"], '["a","b"]'),
    ("rank_fields do not touch texts", "plain", ["title"], "plain"),
    ("no rank_fields", TITLED, [], "blue"),
    ("contents", {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, None, "a\nb"),
    ("content as text", {"content": "a"}, None, "a"),
]


@pytest.mark.parametrize(
    ("document", "fields", "text"), [case[1:] for case in DOCUMENTS], ids=[case[0] for case in DOCUMENTS]
)
@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
async def test_ranked_text_of_a_document(
    client: httpx.AsyncClient, engine, path: str, document: object, fields: list[str] | None, text: str
) -> None:
    body = {"query": QUERY, "documents": [document], "rank_fields": fields, "return_documents": True}
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert engine.calls[-1][1][1] == [text]
    returned = response.json()["results"][0]["document"]
    assert returned == ({"text": text} | document if isinstance(document, dict) else {"text": text})


# (what, document, rank_fields, part of the message)
WRONG = [
    ("no text", {"title": "a", "body": "b"}, None, "title, body. Send the text as text, or name the fields"),
    ("empty object", {}, None, "it has nothing"),
    ("no such field", {"title": "a"}, ["author", "name"], "without any of the rank_fields author, name; it has title"),
    ("field of null", {"title": None}, ["title"], "rank_fields title"),
    ("text is a number", {"text": 7}, None, "entry 1"),
    ("image", {"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}, None, "entry 1 holds an image"),
    ("empty content", {"content": []}, None, "has no content"),
    ("odd content", {"content": [{"type": "video"}]}, None, "no {"),
]


@pytest.mark.parametrize(("document", "fields", "part"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
async def test_documents_without_a_text_are_400(
    client: httpx.AsyncClient, document: dict, fields: list[str] | None, part: str
) -> None:
    body = {"query": QUERY, "documents": ["fine", document], "rank_fields": fields}
    response = await client.post("/v1/rerank", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "documents")
    assert "entry 1" in error["message"]
    assert part in error["message"]


async def test_a_text_that_is_no_string_does_not_come_back_as_text(client: httpx.AsyncClient) -> None:
    body = {"query": "a", "documents": [{"text": 7, "title": "a"}], "rank_fields": ["title"], "return_documents": True}
    results = (await client.post("/v1/rerank", json=body)).json()["results"]
    assert results[0]["document"] == {"text": "a", "title": "a"}


@pytest.mark.parametrize("priority", [None, 0, 7])
async def test_the_priority_reaches_the_engine(client: httpx.AsyncClient, engine, priority: int | None) -> None:
    body = {"query": "a", "documents": ["b"], "priority": priority}
    assert (await client.post("/v2/rerank", json=body)).status_code == 200
    assert engine.calls[-1][1][3].priority == (priority or 0)
    wrong = await client.post("/v2/rerank", json={**body, "priority": 1000})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "priority")


# What the client sends, and the pieces that the engine may make of a document.
CHUNKS = [(None, 1), (0, 1), (1, 1), (10, 10)]


@pytest.mark.parametrize(("max_chunks", "max_passages"), CHUNKS)
async def test_max_chunks_per_doc_is_pieces_of_the_engine(
    client: httpx.AsyncClient, engine, max_chunks: int | None, max_passages: int
) -> None:
    body = {"query": "a", "documents": ["b"], "max_chunks_per_doc": max_chunks}
    assert (await client.post("/v1/rerank", json=body)).status_code == 200
    assert engine.calls[-1][1][3].max_passages == max_passages
    wrong = await client.post("/v1/rerank", json={**body, "max_chunks_per_doc": "many"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "max_chunks_per_doc")


@pytest.mark.parametrize("options", [{"return_documents": True}, {"rank_fields": ["deep"]}])
async def test_documents_that_cannot_be_written_back_are_400(client: httpx.AsyncClient, options: dict) -> None:
    deep: object = []
    for _ in range(300):
        deep = [deep]
    response = await client.post(
        "/rerank", json={"query": QUERY, "documents": [{"text": "a", "deep": deep}], **options}
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "documents")
    assert "too deeply in entry 0" in response.json()["message"]


@pytest.mark.parametrize("depth", range(247, 256))
@pytest.mark.parametrize("filling", ["", "x" * 7_000_000], ids=["small", "large"])
async def test_accepted_documents_are_written_back_at_any_depth(
    client: httpx.AsyncClient, depth: int, filling: str
) -> None:
    deep = b"[" * depth + b"]" * depth
    body = b'{"query": "a", "documents": [{"text": "a", "filling": "%b", "deep": %b}]}' % (filling.encode(), deep)
    response = await client.post("/rerank", content=body)
    assert response.status_code in (200, 400)
    assert response.status_code == 400 or deep in response.content
