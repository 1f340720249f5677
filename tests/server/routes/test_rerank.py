"""The rerank routes as real clients send and read them."""

import httpx
import pytest

from penstock.engine.protocol.errors import InvalidRequestError
from penstock.server.routes.rerank import RerankRequest

DOCUMENTS = ["one red", "one two three red", "blue", "one two red"]
QUERY = "one two three red"
BEST_FIRST = [1, 3, 0, 2]

# (client, path, body): the bodies that were captured on the wire, less query and documents.
CLIENT_BODIES = [
    ("cohere v1", "/v1/rerank", {"model": "alias", "top_n": None, "max_chunks_per_doc": None}),
    ("cohere v2", "/v2/rerank", {"model": "alias", "max_tokens_per_doc": None}),
    ("cohere v2 base with /v1", "/v1/v2/rerank", {"model": "alias", "priority": 0}),
    ("cohere v2, newer fields", "/v2/rerank", {"model": "alias", "relevant_spans": None, "priority": 0}),
    (
        "dify cohere",
        "/v1/rerank",
        {"model": "alias", "top_n": 4, "return_documents": True, "rank_fields": None, "max_chunks_per_doc": None},
    ),
    ("ragflow vllm", "/v1/rerank", {"model": "alias", "top_n": 4, "return_documents": False}),
    ("langchain js", "/v1/rerank", {"model": "alias", "top_n": 3, "max_chunks_per_doc": None}),
    ("langchain", "/v2/rerank", {"model": "alias", "top_n": 3, "max_tokens_per_doc": None}),
    ("top_n above the count", "/rerank", {"model": "alias", "top_n": 100}),
    ("top_n of zero", "/rerank", {"top_n": 0}),
    ("llama_index cohere", "/v2/rerank", {"model": "alias", "top_n": 2}),
    ("llama_index jina", "/rerank", {"model": "alias", "top_n": 2}),
    ("haystack cohere", "/v2/rerank", {"model": "alias", "top_n": 10, "max_tokens_per_doc": 4096}),
    ("ai sdk", "/v2/rerank", {"model": "alias", "top_n": 2, "max_tokens_per_doc": 100, "priority": 1}),
    ("jina ranker", "/rerank", {"model": "alias", "top_n": None}),
    ("litellm", "/rerank", {"model": "alias", "top_n": 2, "return_documents": True}),
    ("litellm cohere", "/v2/rerank", {"model": "alias", "return_documents": True}),
    (
        "litellm hosted_vllm",
        "/v1/rerank",
        {
            "model": "alias",
            "top_n": 2,
            "return_documents": True,
            "truncate_prompt_tokens": 32,
            "truncation_side": "left",
            "max_tokens_per_query": 16,
        },
    ),
    ("litellm jina_ai", "/v1/rerank", {"model": "alias", "top_n": 3, "return_documents": True}),
    ("open webui", "/v1/rerank", {"model": "alias", "top_n": 4}),
    ("dify openai_api_compatible", "/rerank", {"model": "alias", "top_n": 4, "return_documents": True}),
    ("dify jina", "/v1/rerank", {"model": "alias", "top_n": 4, "return_documents": False}),
    ("dify localai", "/rerank", {"model": "alias", "top_n": None}),
    ("rerankers", "/v1/rerank", {"model": "alias", "top_n": 4, "return_documents": True}),
    ("weaviate jina", "/v1/rerank", {"model": "alias", "return_documents": False}),
    ("ragflow xinference", "/rerank", {"model": "alias", "return_documents": "true", "return_len": "true"}),
    ("weaviate cohere", "/v2/rerank", {"model": "alias", "return_documents": False}),
    (
        "elasticsearch",
        "/v1/rerank",
        {"model": "alias", "return_documents": False, "top_n": 2, "max_chunks_per_doc": 1},
    ),
    ("milvus without model", "/rerank", {}),
    (
        "infinity_client",
        "/rerank",
        {"return_documents": False, "raw_scores": False, "model": "default/not-specified", "top_n": None},
    ),
    ("mteb", "/v1/rerank", {"model": "alias"}),
    ("trailing slash", "/rerank/", {}),
]


@pytest.mark.parametrize(
    ("path", "body"), [case[1:] for case in CLIENT_BODIES], ids=[case[0] for case in CLIENT_BODIES]
)
async def test_response_fits_the_parser_of_every_client(client: httpx.AsyncClient, path: str, body: dict) -> None:
    response = await client.post(path, json={"query": QUERY, "documents": DOCUMENTS, **body})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert set(answer) == {"id", "model", "results", "meta", "usage"}  # infinity refuses an `object` of another kind
    assert isinstance(answer["id"], str)
    is_named = body.get("model") not in (None, "default/not-specified")
    assert answer["model"] == (body["model"] if is_named else "fake-model")
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    assert answer["meta"]["api_version"]["version"] == ("2" if "/v2/" in path else "1")
    assert answer["meta"]["billed_units"]["search_units"] == 1
    results = answer["results"]
    assert [row["index"] for row in results] == BEST_FIRST[: body.get("top_n") or 4]
    assert [row["relevance_score"] for row in results] == sorted((r["relevance_score"] for r in results), reverse=True)
    # Where a client does not say, its own server's habit counts: Cohere's and Voyage's is not to return them.
    is_quiet = "/v2/" in path or {"rank_fields", "max_chunks_per_doc", "top_k"} & set(body)
    wants_documents = body.get("return_documents", not is_quiet) in (True, "true")
    keys = {"index", "relevance_score", "document"} if wants_documents else {"index", "relevance_score"}
    assert all(set(row) == keys for row in results)  # Elasticsearch throws on any other key
    if wants_documents:
        assert all(row["document"] == {"text": DOCUMENTS[row["index"]]} for row in results)


async def test_query_and_documents_may_be_objects(client: httpx.AsyncClient) -> None:
    documents = [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:3], {"text": DOCUMENTS[3], "title": "kept"}]
    body = {"query": {"text": QUERY}, "documents": documents, "return_documents": True}
    results = (await client.post("/rerank", json=body)).json()["results"]
    assert [row["index"] for row in results] == BEST_FIRST
    assert results[1]["document"] == {"text": DOCUMENTS[3], "title": "kept"}


@pytest.mark.parametrize("wanted", [{}, {"return_documents": True}])
async def test_documents_come_back_as_they_were_sent(client: httpx.AsyncClient, wanted: dict) -> None:
    document = {"text": DOCUMENTS[0], "title": "kept", "tags": ["a", 1]}
    answer = (await client.post("/rerank", json={"query": QUERY, "documents": [document], **wanted})).json()
    assert answer["results"][0]["document"] == document


async def test_documents_are_cut_to_fit(client: httpx.AsyncClient, engine) -> None:
    response = await client.post("/rerank", json={"query": "a", "documents": ["word " * 500]})
    assert response.status_code == 200
    assert engine.calls[-1][1][2].truncate_prompt_tokens == -1


async def test_max_tokens_per_doc_cuts_only_longer_documents(client: httpx.AsyncClient, engine) -> None:
    body = {"query": "a", "documents": ["w1 w2 w3", "w1 w2"], "max_tokens_per_doc": 2}
    assert (await client.post("/rerank", json=body)).status_code == 200
    _, (_, documents, _, _) = engine.calls[-1]
    assert len(documents[0].split()) == 2
    assert documents[0] != "w1 w2 w3"
    assert documents[1] == "w1 w2"


async def test_equal_scores_keep_the_order_of_the_documents(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/rerank", json={"query": "x", "documents": ["a", "b", "c"]})).json()
    assert [row["index"] for row in answer["results"]] == [0, 1, 2]


async def test_a_search_unit_is_100_documents(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/v2/rerank", json={"query": "x", "documents": ["a"] * 101})).json()
    assert answer["meta"]["billed_units"]["search_units"] == 2


# (what, body, field, part of the message)
WRONG_BODIES = [
    ("no documents", {"query": "a"}, "documents", "missing"),
    ("no query", {"documents": ["a"]}, "query", "missing"),
    ("empty documents", {"query": "a", "documents": []}, "documents", "empty list"),
    ("documents as text", {"query": "a", "documents": "b"}, "documents", "'b'"),
    ("number among documents", {"query": "a", "documents": ["b", 7]}, "documents", "entry 1 is 7"),
    ("object without text", {"query": "a", "documents": [{"title": "b"}]}, "documents", "entry 0 is an object"),
    ("query as list", {"query": ["a"], "documents": ["b"]}, "query", "['a']"),
    ("negative top_n", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "-1"),
    ("top_n as text", {"query": "a", "documents": ["b"], "top_n": "2"}, "top_n", "'2'"),
    ("odd bool", {"query": "a", "documents": ["b"], "return_documents": "perhaps"}, "return_documents", "'perhaps'"),
]


@pytest.mark.parametrize(
    ("body", "param", "part"), [case[1:] for case in WRONG_BODIES], ids=[case[0] for case in WRONG_BODIES]
)
async def test_wrong_bodies_are_400_and_name_field_and_value(
    client: httpx.AsyncClient, body: dict, param: str, part: str
) -> None:
    response = await client.post("/rerank", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert part in error["message"]


async def test_more_documents_than_the_limit(serving, engine) -> None:
    async with serving(engine, max_inputs_per_request=2) as client:
        response = await client.post("/rerank", json={"query": "a", "documents": ["b"] * 3})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "documents")


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize("instruction", [None, "", "Find the red one."])
async def test_the_instruction_reaches_the_engine(
    client: httpx.AsyncClient, engine, path: str, instruction: str | None
) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS, "instruction": instruction}
    assert (await client.post(path, json=body)).status_code == 200
    assert engine.calls[-1][1][3].instruction == instruction
    answer = await client.post(path, json={**body, "instruct": "Find the blue one."})
    assert answer.status_code == 200
    assert engine.calls[-1][1][3].instruction == (instruction or "Find the blue one.")
    wrong = await client.post(path, json={**body, "instruction": 3})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "instruction")


@pytest.mark.parametrize("name", ["instruction", "instruct"])
async def test_an_error_names_the_instruction_as_the_request_does(client: httpx.AsyncClient, engine, name: str) -> None:
    engine.failure = InvalidRequestError("No instruction, please.", param="instruction")
    response = await client.post("/rerank", json={"query": QUERY, "documents": DOCUMENTS, name: "Find it."})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


async def test_the_query_is_cut_first_where_a_request_says_so(client: httpx.AsyncClient, engine) -> None:
    body = {"query": "one two three", "documents": ["a b c", "d"], "max_tokens_per_query": 2, "max_tokens_per_doc": 1}
    assert (await client.post("/rerank", json=body)).status_code == 200
    (query,), documents = engine.calls[-1][1][:2]
    assert [len(text.split()) for text in (query, *documents)] == [2, 1, 1]


async def test_of_enormous_texts_that_are_to_be_cut_a_part_is_read(client: httpx.AsyncClient, engine) -> None:
    body = {"query": "a " * 200_000, "documents": ["b " * 200_000, "c"]}
    answer = await client.post("/rerank", json={**body, "max_tokens_per_query": 3, "max_tokens_per_doc": 5})
    assert answer.status_code == 200
    _, (queries, documents, *_) = engine.calls[-1]
    assert (len(queries[0].split()), len(documents[0].split()), documents[1]) == (3, 5, "c")
    assert engine.num_chars_read < 150_000


@pytest.mark.parametrize("returns", [False, True])
async def test_other_fields_of_documents_are_freed_unless_sent_back(
    client: httpx.AsyncClient, engine, monkeypatch: pytest.MonkeyPatch, returns: bool
) -> None:
    held: list[object] = []
    texts = RerankRequest.texts
    monkeypatch.setattr(RerankRequest, "texts", lambda body: (held.append(body), texts(body))[1])
    document = {"text": "red gate", "more": [[1]]}
    body = {"query": "red", "documents": [document, "blue"], "return_documents": returns}
    answer = (await client.post("/rerank", json=body)).json()
    assert held[0].documents == [document if returns else "red gate", "blue"]
    assert [row.get("document") for row in answer["results"]][:1] == [document if returns else None]


async def test_document_nested_too_deeply_to_be_returned_is_refused(client: httpx.AsyncClient) -> None:
    nested: list[object] = []
    for _ in range(300):
        nested = [nested]
    body = {"query": "a", "documents": ["b", {"text": "c", "more": nested}]}
    response = await client.post("/v2/rerank", json=body)
    assert response.status_code == 400
    assert "nests values too deeply in entry 1" in response.text
