"""The rerank and score routes with the bodies of real clients."""

from typing import Any

import httpx
import pytest

from penstock.engine.protocol.errors import InvalidRequestError

from ...tables import cases, table
from ..bodies import client_bodies
from ..fake_engine import FakeEngine

DOCUMENTS = ["one red", "one two three red", "blue", "one two red"]
QUERY = "one two three red"
BEST_FIRST = [1, 3, 0, 2]
BODY = {"query": QUERY, "documents": DOCUMENTS}


async def rerank(client: httpx.AsyncClient, path: str = "/rerank", **body: object) -> dict[str, Any]:
    response = await client.post(path, json={**BODY, **body})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(("path", "body"), **client_bodies("rerank"))
async def test_response_has_the_fields_that_clients_read(client, path: str, body: dict[str, Any]) -> None:
    body = {"model": "alias", **body}
    answer = await rerank(client, path, **body)
    # Cohere's and Voyage's clients do not expect documents that they did not ask for.
    is_quiet = "/v2/" in path or {"rank_fields", "max_chunks_per_doc", "top_k"} & set(body)
    has_documents = body.get("return_documents", not is_quiet) in (True, "true")
    places = BEST_FIRST[: body.get("top_n") or body.get("top_k") or 4]
    scores = [row["relevance_score"] for row in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    num_tokens = answer["usage"]["prompt_tokens"]
    assert num_tokens > 0
    rows = [{"index": i, "relevance_score": score} for i, score in zip(places, scores, strict=True)]
    results = [{**row, "document": {"text": DOCUMENTS[row["index"]]}} for row in rows] if has_documents else rows
    expected = {  # infinity_client rejects an `object` of another kind, Elasticsearch any other key of a result
        "id": answer["id"],
        "model": "alias" if body["model"] == "alias" else "fake-model",
        "results": results,
        "meta": {"api_version": {"version": "2" if "/v2/" in path else "1"}, "billed_units": {"search_units": 1}},
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    if "top_k" in body:
        expected["data"] = [{**row, "document": DOCUMENTS[row["index"]]} for row in rows] if has_documents else rows
    assert answer == expected
    assert answer["id"].startswith("rerank-")


@cases(__file__, "document", "fields", "text")
async def test_rank_fields_choose_the_ranked_text(client, engine, document: Any, fields: Any, text: str) -> None:
    answer = await rerank(client, documents=[document], rank_fields=fields, return_documents=True)
    assert engine.calls[-1][1][1] == [text]
    sent = document if isinstance(document, dict) else {}
    returned = answer["results"][0]["document"]
    assert returned == (sent if isinstance(sent.get("text"), str) else {**sent, "text": text})


async def test_query_may_be_an_object(client: httpx.AsyncClient) -> None:
    assert [row["index"] for row in (await rerank(client, query={"text": QUERY}))["results"]] == BEST_FIRST


async def test_max_tokens_cut_only_longer_texts(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await rerank(client, query="a", documents=["word " * 500])
    assert engine.calls[-1][1][2].truncate_prompt_tokens == -1
    await rerank(
        client, query="q1 q2 q3", documents=["w1 w2 w3", "w1 w2"], max_tokens_per_doc=2, max_tokens_per_query=1
    )
    (query,), (first, second) = engine.calls[-1][1][:2]
    assert (len(query.split()), len(first.split()), second) == (1, 2, "w1 w2")
    assert first != "w1 w2"
    await rerank(client, documents=["word " * 70], max_tokens_per_doc=64)
    assert engine.calls[-1][1][1] == ["word " * 70], "the model truncates it"


async def test_long_words_within_the_limit_of_tokens_are_kept(serving, make_engine) -> None:
    engine, text = make_engine(max_model_len=4000), ("w" * 60 + " ") * 1500
    async with serving(engine) as client:
        answer = await rerank(client, documents=[text], max_tokens_per_doc=2000)
    assert engine.calls[-1][1][1] == [text]
    assert "warnings" not in answer["meta"]


async def test_only_a_part_of_an_enormous_text_is_tokenized(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    texts = {"query": "a " * 200_000, "documents": ["b " * 200_000, "c", "d" + " " * 70_000]}
    answer = await rerank(client, **texts, max_tokens_per_query=3, max_tokens_per_doc=5)
    (query,), (first, second, _) = engine.calls[-1][1][:2]
    assert (len(query.split()), len(first.split()), second) == (3, 5, "c")
    assert engine.num_chars_read < 200_000
    assert answer["meta"]["warnings"] == ["Inputs that were truncated because they are too long: 3."]


async def test_equal_scores_keep_the_order_of_the_documents(client: httpx.AsyncClient) -> None:
    answer = await rerank(client, query="x", documents=["a"] * 101)
    assert [row["index"] for row in answer["results"]] == list(range(101))
    assert answer["meta"]["billed_units"]["search_units"] == 2  # one is 100 documents
    answer = await rerank(client, query="x", documents=["a"] * 100)
    assert answer["meta"]["billed_units"]["search_units"] == 1


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_options_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    for fields, place, name, value in table(__file__, "test_options_reach_the_engine"):
        await rerank(client, path, **fields)
        assert getattr(engine.calls[-1][1][place], name) == value, fields


@pytest.mark.parametrize("name", ["instruction", "instruct"])
async def test_error_names_the_instruction_as_the_request_does(client, engine, name: str) -> None:
    engine.failure = InvalidRequestError("No instruction, please.", param="instruction")
    response = await client.post("/rerank", json={**BODY, name: "Find it."})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("fields", [{"return_documents": True}, {"rank_fields": ["deep"]}])
async def test_document_nested_too_deeply_is_rejected(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    deep: object = []
    for _ in range(300):
        deep = [deep]
    body = {"query": QUERY, "documents": ["b", {"text": "a", "deep": deep}], **fields}
    response = await client.post("/rerank", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "documents")
    assert "nests values too deeply in entry 1" in response.json()["message"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_score_compares_pairs_in_order(client: httpx.AsyncClient, path: str) -> None:
    for body, scores in table(__file__, "test_score_compares_pairs_in_order"):
        response = await client.post(path, json={"model": "alias", **body})
        assert response.status_code == 200, response.text
        answer = response.json()
        rows = [{"index": i, "object": "score", "score": pytest.approx(score)} for i, score in enumerate(scores)]
        assert answer["data"] == rows
        assert (answer["object"], answer["model"], answer["id"][:6]) == ("list", "alias", "score-")
        assert answer["usage"]["total_tokens"] > 0


async def test_score_options_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body: dict[str, Any] = {"queries": "a b", "documents": ["a b", "a b c"], "instruction": "Find the red one."}
    assert (await client.post("/score", json=body)).status_code == 200
    assert engine.calls[-1][1][3].instruction == "Find the red one."
    body |= {"instruction": None, "chat_template_kwargs": {"instruction": "Find the blue one."}, "priority": 4}
    body |= {"max_tokens_per_doc": 1, "max_tokens_per_query": 0}
    assert (await client.post("/v1/score", json=body)).status_code == 200
    left, right, _, options = engine.calls[-1][1]
    assert (left, [len(text.split()) for text in right]) == (["a b"], [1, 1])
    assert (options.instruction, options.priority) == ("Find the blue one.", 4)


async def test_long_pair_is_rejected_unless_it_may_be_cut(client: httpx.AsyncClient) -> None:
    body = {"text_1": "a", "text_2": "word " * 100}
    assert (await client.post("/score", json=body)).json()["error"]["code"] == "context_length_exceeded"
    assert (await client.post("/score", json={**body, "truncate_prompt_tokens": -1})).status_code == 200
