"""The routes of vLLM: /pooling, chats, tokens, /invocations and /load."""

from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from penstock.engine.protocol.tasks import PoolingTask
from penstock.server.routes import vllm

from ...tables import cases, table

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello world"}]
RENDERED = "<system> Be brief. <user> hello world "


def pooled(answer: dict[str, Any], num_rows: int) -> list[Any]:
    """Checks the fields of vLLM's PoolingResponse and returns the data of its rows."""
    assert set(answer) == {"id", "object", "created", "model", "data", "usage"}
    assert answer["id"].startswith("pooling-")
    assert (answer["object"], type(answer["created"])) == ("list", int)
    assert [row["index"] for row in answer["data"]] == list(range(num_rows))
    assert all(set(row) == {"index", "object", "data"} and row["object"] == "pooling" for row in answer["data"])
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    return [row["data"] for row in answer["data"]]


@pytest.mark.parametrize("path", ["/pooling", "/pooling/", "/v1/pooling"])
@pytest.mark.parametrize(("body", "task"), [row[1:] for row in table(__file__, "test_pooling_returns_embeddings")])
async def test_pooling_returns_embeddings(client: httpx.AsyncClient, engine, path: str, body: dict, task: str) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    rows = pooled(response.json(), len(body["input"]))
    assert engine.calls[-1][0] == task
    if task == "token_embed":
        assert [np.array(row).shape for row in rows] == [(4, 8), (3, 8)]
        assert response.json()["usage"]["prompt_tokens"] == 7
    else:
        assert all(np.linalg.norm(row) == pytest.approx(1, abs=1e-5) for row in rows)


@cases(__file__, "kind", "task", "shape")
async def test_pooling_runs_the_task_of_the_model(serving, make_engine, kind: str, task: str, shape: list[int]) -> None:
    fields = {"tasks": (PoolingTask.TOKEN_EMBED,)} if kind == "embedding" else {}
    engine = make_engine(kind, ("a", "b", "c"), **fields)
    async with serving(engine) as client:
        for named in (None, task):
            answer = (await client.post("/pooling", json={"input": "one two", "task": named, "priority": 4})).json()
            assert list(np.array(pooled(answer, 1)[0]).shape) == shape
            assert (engine.calls[-1][0], engine.calls[-1][1][-1].priority) == (task, 4)


def test_step_fields_reach_the_pooling_params() -> None:
    body = vllm.PoolingRequest(input="a", step_tag_id=3, returned_token_ids=[1, 2])
    params = body.pooling_params()
    assert (params.step_tag_id, params.returned_token_ids) == (3, (1, 2))


@cases(__file__, "kind", "body", "accepted")
async def test_unsuitable_encoding_is_rejected_before_the_engine(serving, make_engine, kind, body, accepted) -> None:
    engine = make_engine(kind, ("a", "b"), is_matryoshka=True)
    async with serving(engine) as client:
        response = await client.post("/pooling", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "encoding_format")
        assert not engine.calls
        assert (await client.post("/pooling", json={**body, **accepted})).status_code == 200


async def test_bytes_have_the_shapes_in_a_header(client: httpx.AsyncClient) -> None:
    body = {"input": ["one two", "three"], "task": "token_embed"}
    floats = pooled((await client.post("/pooling", json=body)).json(), 2)
    response = await client.post("/pooling", json={**body, "encoding_format": "bytes"})
    assert response.headers["content-type"] == "application/octet-stream"
    metadata = orjson.loads(response.headers["metadata"])
    assert metadata["usage"]["prompt_tokens"] == 7
    for row, place in zip(floats, metadata["data"], strict=True):
        part = response.content[place["start"] : place["end"]]
        np.testing.assert_allclose(np.frombuffer(part, "<f4").reshape(place["shape"]), row, rtol=1e-6)
    alone = await client.post("/pooling", json={**body, "encoding_format": "bytes_only"})
    assert alone.content == response.content
    assert "metadata" not in alone.headers


async def test_pooling_options_reach_the_engine(client: httpx.AsyncClient, engine) -> None:
    body = table(__file__, "test_pooling_options_reach_the_engine")
    assert (await client.post("/pooling", json=body)).status_code == 200
    _, (inputs, params, options) = engine.calls[-1]
    assert inputs == ["a"]
    assert (params.use_activation, params.dimensions) == (False, 8)
    assert (params.truncate_prompt_tokens, params.truncation_side) == (-1, "left")
    assert (options.prompt_name, options.add_special_tokens) == ("query", False)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/invocations"])
@pytest.mark.parametrize("field", ["messages", "input"])
async def test_chats_are_rendered(serving, engine, path: str, field: str) -> None:
    async with serving(engine, default_prompt_name="query") as client:
        for chat, texts in table(__file__, "test_chats_are_rendered"):
            response = await client.post(path, json={"model": "alias", field: chat})
            assert response.status_code == 200, response.text
            assert len(response.json()["data"]) == len(texts)
            name, (inputs, _, options) = engine.calls[-1]
            assert (name, inputs) == ("embed", texts)
            assert (options.is_rendered, options.add_special_tokens) == (True, False)


@pytest.mark.parametrize("field", ["instruction", "prefix"])
async def test_chat_with_a_prompt_is_rejected(serving, make_engine, field: str) -> None:
    async with serving(make_engine(prompts={"query": "Instruct: a\nQuery: "})) as client:
        response = await client.post("/v1/embeddings", json={"messages": CHAT, field: "b"})
    assert response.status_code == 400
    assert "no effect on messages" in response.json()["message"]


async def test_chat_is_classified(serving, make_engine) -> None:
    engine = make_engine("sequence_classifier", ("no", "yes"))
    async with serving(engine) as client:
        answer = (await client.post("/classify", json={"messages": CHAT})).json()
    assert answer["data"][0]["num_classes"] == 2
    assert engine.calls[-1][1][0] == [RENDERED]


async def test_chat_options_reach_the_template(client: httpx.AsyncClient, engine) -> None:
    body = table(__file__, "test_chat_options_reach_the_template") | {"messages": CHAT}
    assert (await client.post("/v1/embeddings", json=body)).status_code == 200
    _, (inputs, _, options) = engine.calls[-1]
    assert inputs == [RENDERED + "!<assistant>"]
    assert options.add_special_tokens
    body = {"messages": CHAT, "continue_final_message": True}
    await client.post("/v1/embeddings", json=body)
    assert engine.calls[-1][1][0] == [RENDERED.rstrip()]


async def test_model_without_a_template_rejects_chats(client: httpx.AsyncClient, engine) -> None:
    engine.chat_template = None
    for path in ("/v1/embeddings", "/pooling", "/tokenize"):
        response = await client.post(path, json={"messages": CHAT})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"


async def test_tokenize_and_detokenize_return_tokens_and_text(client: httpx.AsyncClient, engine) -> None:
    body = {"model": "alias", "prompt": "one two", "add_special_tokens": None, "return_token_strs": None}
    answer = (await client.post("/tokenize/", json=body)).json()
    assert set(answer) == {"count", "max_model_len", "tokens", "token_strs"}
    assert (answer["count"], answer["max_model_len"], answer["token_strs"]) == (2, 64, None)
    assert len(answer["tokens"]) == 2
    answer = (await client.post("/tokenize", json={"prompt": "one two", "return_token_strs": True})).json()
    assert answer["token_strs"] == ["one", "two"]
    assert engine.calls[-1] == ("tokenize_details", (["one two"], True))
    body = {"prompt": "one", "add_special_tokens": False, "return_token_strs": True}
    assert (await client.post("/tokenize", json=body)).status_code == 200
    assert engine.calls[-1] == ("tokenize_details", (["one"], False))
    assert (await client.post("/tokenize", json={"prompt": ""})).json()["count"] == 0
    for adds in (True, False):
        await client.post("/tokenize", json={"prompt": "one", "add_special_tokens": adds})
        assert engine.special_tokens[-1] is adds
    answer = (await client.post("/detokenize", json={"model": "alias", "tokens": [5.0, 6]})).json()
    assert answer == {"prompt": "t5 t6"}
    assert engine.special_tokens[-1] is True
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_tokenized_chat_ends_with_the_generation_prompt(client: httpx.AsyncClient, engine) -> None:
    body = {"messages": CHAT, "return_token_strs": True}
    for more, ending in table(__file__, "test_tokenized_chat_ends_with_the_generation_prompt"):
        answer = (await client.post("/tokenize", json={**body, **more})).json()
        assert answer["token_strs"][-1] == ending
        assert engine.calls[-1][1][1] is False
    await client.post("/tokenize", json={**body, "add_special_tokens": True})
    assert engine.calls[-1][1][1] is True


async def test_key_of_the_body_selects_the_dialect_of_tokenize(client: httpx.AsyncClient) -> None:
    own = (await client.post("/tokenize", json={"prompt": "one two"})).json()["tokens"]
    cohere = (await client.post("/tokenize", json={"text": "one two", "model": "alias"})).json()
    assert cohere["tokens"] == own
    assert len(cohere["token_strings"]) == 2
    tei = (await client.post("/tokenize", json={"inputs": ["one two"]})).json()
    assert [token["id"] for token in tei[0]] == own
    assert "error_type" in (await client.post("/tokenize", json={"inputs": 5})).json()


@cases(__file__, "limit", "part")
async def test_tokenized_text_has_a_size_limit(client, monkeypatch: pytest.MonkeyPatch, limit: str, part: str) -> None:
    for path, body, param in table(__file__, "tokenized_bodies"):
        assert (await client.post(path, json=body)).status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr(f"penstock.server.{limit}", 2)
            response = await client.post(path, json=body)
        answer = response.json()
        assert response.status_code == (422 if "inputs" in body else 400)
        assert (answer["param"] if "inputs" in body else answer["error"]["param"]) == param
        assert part in answer["message"]


@pytest.mark.parametrize(
    ("path", "field", "ids"), [("/detokenize", "tokens", [1] * 5), ("/decode", "ids", [[1] * 2, [1] * 3])]
)
@pytest.mark.parametrize(("limit", "value"), [("calls.limits.MAX_DECODED_IDS", 4), ("admission.MAX_RESPONSE_BYTES", 9)])
async def test_decoded_tokens_have_a_size_limit(client, monkeypatch, path, field, ids, limit, value) -> None:
    assert (await client.post(path, json={field: ids})).status_code == 200
    monkeypatch.setattr(f"penstock.server.{limit}", value)
    answer = await client.post(path, json={field: ids})
    assert answer.status_code in (400, 422)
    assert f"the limit is {value}" in answer.text


async def test_load_is_the_number_of_running_requests(client: httpx.AsyncClient) -> None:
    assert (await client.get("/load")).json() == {"server_load": 3}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_request_id_of_the_body_wins_over_the_header(client: httpx.AsyncClient, path: str) -> None:
    body = {"input": "a", "request_id": "mine-7", "padding": "do_not_pad"}
    response = await client.post(path, json=body, headers={"x-request-id": "other"})
    assert response.status_code == 200, response.text
    assert response.json()["id"].endswith("-mine-7")
    assert response.headers["x-request-id"] == "mine-7"


@cases(__file__, "kind", "body", "call", "key")
async def test_invocations_calls_the_route_of_its_body(serving, make_engine, kind, body, call: str, key: str) -> None:
    engine = make_engine(kind, ("a", "b") if "classifier" in kind else ())
    async with serving(engine) as client:
        response = await client.post("/invocations", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [name for name, _ in engine.calls if name != "render_chats"] == [call]
    rows = answer if isinstance(answer, list) else answer.get("results") or answer["data"]
    assert len(rows[0]) == 8 if key == 7 else key in rows[0]
