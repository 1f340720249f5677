"""vLLM's dialect: /pooling, chats, tokens, /invocations, /load, /ping, as its clients send and read them."""

import base64

import httpx
import numpy as np
import orjson
import pytest

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello world"}]
RENDERED = "<system> Be brief. <user> hello world "
PARTS = [{"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]}]


def pooled(answer: dict, num_rows: int) -> list:
    """Reads an answer as vLLM's PoolingResponse: every field is there, in its type, and nothing else."""
    assert set(answer) == {"id", "object", "created", "model", "data", "usage"}
    assert answer["id"].startswith("pooling-")
    assert (answer["object"], type(answer["created"])) == ("list", int)
    assert [row["index"] for row in answer["data"]] == list(range(num_rows))
    assert all(set(row) == {"index", "object", "data"} and row["object"] == "pooling" for row in answer["data"])
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    return [row["data"] for row in answer["data"]]


# (what, body, task that runs)
POOLING = [
    ("mteb", {"model": "alias", "input": ["one two", "three"]}, "embed"),
    ("token embed", {"model": "alias", "input": ["one two", "three"], "task": "token_embed"}, "token_embed"),
    ("token ids", {"input": [[5, 6, 7], [8]], "task": "embed"}, "embed"),
    (
        "nulls and unknown fields",
        {
            "input": ["a", "b"],
            "task": None,
            "truncate_prompt_tokens": None,
            "dimensions": None,
            "mm_processor_kwargs": None,
            "cache_salt": "s",
            "request_id": "r",
            "priority": 0,
            "padding": None,
            "embed_dtype": None,
            "endianness": None,
            "encoding_format": None,
        },
        "embed",
    ),
]


@pytest.mark.parametrize("path", ["/pooling", "/pooling/", "/v1/pooling"])
@pytest.mark.parametrize(("body", "task"), [case[1:] for case in POOLING], ids=[case[0] for case in POOLING])
async def test_pooling_of_an_embedding_model(
    client: httpx.AsyncClient, engine, path: str, body: dict, task: str
) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    rows = pooled(response.json(), len(body["input"]))
    assert engine.calls[-1][0] == task
    if task == "token_embed":
        assert [np.array(row).shape for row in rows] == [(4, 8), (3, 8)]
        assert response.json()["usage"]["prompt_tokens"] == 7
    else:
        assert all(np.linalg.norm(row) == pytest.approx(1, abs=1e-5) for row in rows)


@pytest.mark.parametrize(
    ("kind", "task", "shape"),
    [
        ("sequence_classifier", "classify", (3,)),
        ("cross_encoder", "classify", (3,)),
        ("token_classifier", "token_classify", (4, 3)),
    ],
)
async def test_pooling_of_classifiers(serving, make_engine, kind: str, task: str, shape: tuple) -> None:
    engine = make_engine(kind, ("a", "b", "c"))
    async with serving(engine) as client:
        for asked in (None, task):
            answer = (await client.post("/pooling", json={"input": "one two", "task": asked})).json()
            assert np.array(pooled(answer, 1)[0]).shape == shape
            assert engine.calls[-1][0] == task


async def test_late_interaction_model_gives_token_vectors_by_default(serving, make_engine) -> None:
    from penstock.engine.protocol.tasks import PoolingTask

    async with serving(make_engine(tasks=(PoolingTask.TOKEN_EMBED,))) as client:
        answer = (await client.post("/pooling", json={"model": "alias", "input": ["one two"]})).json()
    assert np.array(pooled(answer, 1)[0]).shape == (4, 8)


@pytest.mark.parametrize(
    ("dtype", "order"), [(None, None), ("float32", "big"), ("float16", "little"), ("float16", "big")]
)
async def test_base64_of_token_vectors_is_flat(client: httpx.AsyncClient, dtype: str | None, order: str | None) -> None:
    body = {"input": ["one two", "three"], "task": "token_embed", "embed_dtype": dtype, "endianness": order}
    floats = pooled((await client.post("/pooling", json={**body, "encoding_format": "float"})).json(), 2)
    texts = pooled((await client.post("/pooling", json={**body, "encoding_format": "base64"})).json(), 2)
    code = (">" if order == "big" else "<") + ("f2" if dtype == "float16" else "f4")
    for row, text in zip(floats, texts, strict=True):
        decoded = np.frombuffer(base64.b64decode(text, validate=True), code)
        np.testing.assert_allclose(decoded, np.ravel(row), rtol=1e-3)


async def test_bytes_tell_the_shape_of_token_vectors(client: httpx.AsyncClient) -> None:
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
    body = {
        "input": "a",
        "use_activation": False,
        "truncate_prompt_tokens": -1,
        "truncation_side": "left",
        "dimensions": 8,
        "input_type": "search_query",
        "add_special_tokens": False,
    }
    assert (await client.post("/pooling", json=body)).status_code == 200
    _, (inputs, params, options) = engine.calls[-1]
    assert inputs == ["a"]
    assert (params.use_activation, params.dimensions) == (False, 8)
    assert (params.truncate_prompt_tokens, params.truncation_side) == (-1, "left")
    assert (options.prompt_name, options.add_special_tokens) == ("query", False)


async def test_an_answer_that_would_be_too_large(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.server.admission.MAX_RESPONSE_BYTES", 40)
    response = await client.post("/pooling", json={"input": ["a", "b"], "task": "token_embed"})
    assert response.status_code == 400
    assert "about 576 bytes; the limit is 40" in response.json()["message"]


# (what, messages, texts that are embedded)
CHATS = [
    ("one chat", CHAT, [RENDERED]),
    ("several chats", [CHAT, CHAT[1:]], [RENDERED, "<user> hello world "]),
    ("parts", PARTS, ["<user> hello\nworld "]),
    ("a part as a text", [{"role": "user", "content": ["hello"]}], ["<user> hello "]),
    ("more fields", [{"role": "user", "content": "hello", "name": "Ann"}], ["<user> hello "]),
]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/invocations"])
@pytest.mark.parametrize("field", ["messages", "input"])
async def test_chats_are_rendered(serving, engine, path: str, field: str) -> None:
    async with serving(engine, default_prompt_name="query") as client:
        for what, chat, texts in CHATS:
            response = await client.post(path, json={"model": "alias", field: chat})
            assert response.status_code == 200, (what, response.text)
            assert len(response.json()["data"]) == len(texts)
            name, (inputs, _, options) = engine.calls[-1]
            assert (name, inputs) == ("embed", texts), what
            assert (options.prompt, options.add_special_tokens) == ("", False)


async def test_a_chat_is_classified(serving, make_engine) -> None:
    engine = make_engine("sequence_classifier", ("no", "yes"))
    async with serving(engine) as client:
        answer = (await client.post("/classify", json={"messages": CHAT})).json()
    assert answer["data"][0]["num_classes"] == 2
    assert engine.calls[-1][1][0] == [RENDERED]


async def test_options_of_chats(client: httpx.AsyncClient, engine) -> None:
    body = {
        "messages": CHAT,
        "add_generation_prompt": True,
        "add_special_tokens": True,
        "chat_template_kwargs": {"extra": "!"},
        "chat_template": None,
    }
    assert (await client.post("/v1/embeddings", json=body)).status_code == 200
    _, (inputs, _, options) = engine.calls[-1]
    assert inputs == [RENDERED + "!<assistant>"]
    assert options.add_special_tokens
    body = {"messages": CHAT, "continue_final_message": True}
    await client.post("/v1/embeddings", json=body)
    assert engine.calls[-1][1][0] == [RENDERED.rstrip()]


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
# (what, path, body, field, part of the message)
WRONG_BODIES = [
    ("nothing", "/pooling", {}, "input", "input is missing"),
    ("both", "/pooling", {"input": "a", "messages": CHAT}, "input", "both"),
    ("unknown task", "/pooling", {"input": "a", "task": "encode"}, "task", "'encode'"),
    ("task of another model", "/pooling", {"input": "a", "task": "classify"}, "task", "does not support"),
    ("encoding", "/pooling", {"input": "a", "encoding_format": "hex"}, "encoding_format", "'hex'"),
    ("dtype", "/pooling", {"input": "a", "embed_dtype": "int4"}, "embed_dtype", "'int4'"),
    ("endianness", "/pooling", {"input": "a", "endianness": "middle"}, "endianness", "'middle'"),
    ("dimensions", "/pooling", {"input": "a", "dimensions": 4}, "dimensions", "Matryoshka"),
    ("step", "/pooling", {"input": "a", "task": "token_embed", "step_tag_id": 3}, "step_tag_id", "does not take"),
    ("out of vocabulary", "/pooling", {"input": [5000]}, "input", "out of vocabulary"),
    ("empty chat", "/pooling", {"messages": []}, "messages", "empty list"),
    ("a text as chat", "/v1/embeddings", {"messages": "hello"}, "messages", "list of messages"),
    ("no message", "/pooling", {"messages": ["hi"]}, "messages", "holds 'hi', but message 0 must be an"),
    ("no role", "/v1/embeddings", {"messages": [{"content": "a"}]}, "messages", "without a role; message 0 must be"),
    ("second chat", "/v1/embeddings", {"messages": [CHAT, []]}, "messages", "entry 1 is []"),
    ("content", "/v1/embeddings", {"messages": [{"role": "user", "content": 5}]}, "messages", "message 0 does not"),
    ("image", "/v1/embeddings", {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages", "'image_url'"),
    ("part", "/v1/embeddings", {"messages": [{"role": "user", "content": [{"text": 5}]}]}, "messages", "another"),
    ("template", "/v1/embeddings", {"messages": CHAT, "chat_template": "{{ 1 }}"}, "chat_template", "not taken"),
    (
        "reserved",
        "/v1/embeddings",
        {"messages": CHAT, "chat_template_kwargs": {"tokenize": 1}},
        "chat_template_kwargs",
        "'tokenize'",
    ),
    (
        "both flags",
        "/v1/embeddings",
        {"messages": CHAT, "add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
        "Cannot set both",
    ),
    ("late chunking", "/v1/embeddings", {"messages": CHAT, "late_chunking": True}, "late_chunking", "one text"),
    ("long chat", "/v1/embeddings", {"messages": [{"role": "user", "content": "a " * 99}]}, "messages", "maximum"),
    ("labels", "/classify", {"messages": CHAT, "labels": ["a", "b"]}, "messages", "labels or examples"),
    ("tokenize nothing", "/tokenize", {"model": "alias"}, "prompt", "neither"),
    ("tokenize both", "/tokenize", {"prompt": "a", "messages": CHAT}, "prompt", "both"),
    ("tokenize a number", "/tokenize", {"prompt": 5}, "prompt", "5"),
    ("tokenize chats", "/tokenize", {"messages": [CHAT, CHAT]}, "messages", "several chats"),
    ("no tokens", "/detokenize", {}, "tokens", "tokens is missing"),
    ("negative token", "/detokenize", {"tokens": [-1]}, "tokens", "-1"),
    ("text as tokens", "/detokenize", {"tokens": "a"}, "tokens", "'a'"),
    ("unknown form", "/invocations", {"question": "a"}, "input", "question"),
    ("form with an error", "/invocations", {"query": "a"}, "documents", "documents is missing"),
    ("a list", "/invocations", [1], None, "JSON object"),
    ("content of a pair", "/score", {"text_1": {"content": [IMAGE]}, "text_2": "a"}, "text_1", "image"),
]


@pytest.mark.parametrize(
    ("path", "body", "param", "part"), [case[1:] for case in WRONG_BODIES], ids=[case[0] for case in WRONG_BODIES]
)
async def test_wrong_bodies(client: httpx.AsyncClient, path: str, body: object, param: str, part: str) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert part in response.json()["error"]["message"]


async def test_a_model_without_a_chat_template(client: httpx.AsyncClient, engine) -> None:
    engine.chat_template = None
    for path in ("/v1/embeddings", "/pooling", "/tokenize"):
        response = await client.post(path, json={"messages": CHAT})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"


async def test_an_unknown_model_is_a_404(client: httpx.AsyncClient) -> None:
    for path, body in (("/pooling", {"input": "a"}), ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        response = await client.post(path, json={"model": "other", **body})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_tokenize_and_detokenize(client: httpx.AsyncClient, engine) -> None:
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
    answer = (await client.post("/detokenize", json={"model": "alias", "tokens": [5, 6]})).json()
    assert answer == {"prompt": "t5 t6"}
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_a_chat_is_tokenized_with_the_head_of_an_answer(client: httpx.AsyncClient, engine) -> None:
    body = {"messages": CHAT, "return_token_strs": True}
    for more, ending in (
        ({}, "<assistant>"),
        ({"add_generation_prompt": False}, "world"),
        ({"continue_final_message": True}, "world"),
        ({"tools": [{}, {}], "add_generation_prompt": False}, "tools"),
    ):
        answer = (await client.post("/tokenize", json={**body, **more})).json()
        assert answer["token_strs"][-1] == ending
        assert engine.calls[-1][1][1] is False


async def test_key_of_the_body_tells_the_dialect_of_tokens(client: httpx.AsyncClient) -> None:
    own = (await client.post("/tokenize", json={"prompt": "one two"})).json()["tokens"]
    cohere = (await client.post("/tokenize", json={"text": "one two", "model": "alias"})).json()
    assert cohere["tokens"] == own
    assert len(cohere["token_strings"]) == 2
    tei = (await client.post("/tokenize", json={"inputs": ["one two"]})).json()
    assert [token["id"] for token in tei[0]] == own
    assert "error_type" in (await client.post("/tokenize", json={"inputs": 5})).json()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "abcd"}, "prompt"),
        ("/tokenize", {"messages": CHAT}, "messages"),
        ("/tokenize", {"text": "abcd"}, "text"),
        ("/tokenize", {"inputs": ["ab", "cd"]}, "inputs"),
        ("/v1/tokenize", {"text": "abcd"}, "text"),
    ],
)
async def test_no_answer_holds_the_tokens_of_texts_of_any_size(client, monkeypatch, path, body, param) -> None:
    monkeypatch.setattr("penstock.server.calls.sizes.MAX_TOKENIZED_CHARS", 3)
    response = await client.post(path, json=body)
    answer = response.json()
    assert response.status_code == (422 if "inputs" in body else 400)
    assert (answer["param"] if "inputs" in body else answer["error"]["param"]) == param
    assert "the limit is 3" in answer["message"]


# (what, kind of the model, body, keys of the answer)
INVOCATIONS = [
    ("embeddings", "embedding", {"input": ["a"]}, {"data", "usage", "object", "id", "created", "model"}),
    (
        "pooling",
        "embedding",
        {"input": ["a"], "task": "token_embed"},
        {"data", "usage", "object", "id", "created", "model"},
    ),
    ("rerank", "embedding", {"query": "a", "documents": ["b"]}, {"results", "usage", "meta", "id", "model"}),
    ("score", "embedding", {"text_1": "a", "text_2": "b"}, {"data", "usage", "object", "id", "created", "model"}),
    (
        "score queries",
        "embedding",
        {"queries": "a", "documents": ["b"]},
        {"data", "usage", "object", "id", "created", "model"},
    ),
    ("classify", "sequence_classifier", {"input": "a"}, {"data", "usage", "object", "id", "created", "model"}),
]


@pytest.mark.parametrize(
    ("kind", "body", "keys"), [case[1:] for case in INVOCATIONS], ids=[case[0] for case in INVOCATIONS]
)
async def test_invocations(serving, make_engine, kind: str, body: dict, keys: set[str]) -> None:
    async with serving(make_engine(kind, ("a", "b") if kind != "embedding" else ())) as client:
        response = await client.post("/invocations", json=body)
        assert response.status_code == 200, response.text
        assert set(response.json()) == keys


async def test_invocations_in_teis_words(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/invocations", json={"inputs": ["a", "b"]})).json()
    assert [len(row) for row in answer] == [8, 8]


async def test_pairs_of_contents_and_their_limits(client: httpx.AsyncClient, engine) -> None:
    content = {"content": [{"type": "text", "text": "a b"}]}
    body = {"queries": content, "documents": [content, "a b c"], "max_tokens_per_doc": 1, "max_tokens_per_query": 0}
    answer = (await client.post("/score", json=body)).json()
    assert [row["index"] for row in answer["data"]] == [0, 1]
    left, right = engine.calls[-1][1][:2]
    assert left == ["a b"]
    assert [len(text.split()) for text in right] == [1, 1]


async def test_load_version_and_ping(client: httpx.AsyncClient) -> None:
    assert (await client.get("/load")).json() == {"server_load": 3}
    assert set((await client.get("/version")).json()) == {"version"}
    assert (await client.get("/ping")).status_code == (await client.post("/ping")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_the_body_may_name_its_request(client: httpx.AsyncClient, path: str) -> None:
    body = {"input": "a", "request_id": "mine-7", "padding": "do_not_pad"}
    response = await client.post(path, json=body, headers={"x-request-id": "other"})
    assert response.status_code == 200, response.text
    assert response.json()["id"].endswith("-mine-7")
    assert response.headers["x-request-id"] == "mine-7"
    response = await client.post(path, json={**body, "request_id": "two\r\nlines"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "request_id"
    response = await client.post(path, json={**body, "padding": "longest"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "padding")


async def test_invocations_of_a_token_classifier_are_poolings(serving, make_engine) -> None:
    engine = make_engine("token_classifier", ("O", "PER"))
    async with serving(engine) as client:
        body = {"input": ["hello world", "a"]}
        invoked = (await client.post("/invocations", json=body)).json()
        asked = (await client.post("/pooling", json=body)).json()
    assert invoked["data"] == asked["data"]
    assert invoked["data"][0]["object"] == "pooling"


# (kind of the model, body, the engine's call, a key that only the rows of that route have)
INVOKED = [
    ("embedding", {"input": ["a"]}, "embed", "embedding"),
    ("embedding", {"messages": [{"role": "user", "content": "a"}]}, "embed", "embedding"),
    ("embedding", {"input": ["a"], "task": "embed"}, "embed", "data"),
    ("embedding", {"input": ["a"], "task": "token_embed"}, "token_embed", "data"),
    ("sequence_classifier", {"input": ["a"]}, "classify", "probs"),
    ("sequence_classifier", {"messages": [{"role": "user", "content": "a"}]}, "classify", "probs"),
    ("sequence_classifier", {"input": ["a"], "task": "classify"}, "classify", "data"),
    ("token_classifier", {"input": ["a"]}, "token_classify", "data"),
    ("token_classifier", {"input": ["a"], "task": "token_classify"}, "token_classify", "data"),
    ("embedding", {"text_1": "a", "text_2": "b"}, "score", "score"),
    ("embedding", {"queries": "a", "documents": ["b"]}, "score", "score"),
    ("embedding", {"data_1": "a", "data_2": "b"}, "score", "score"),
    ("embedding", {"query": "a", "documents": ["b"]}, "score", "relevance_score"),
    ("embedding", {"query": "a", "documents": ["b"], "input": None}, "score", "relevance_score"),
    ("embedding", {"input": ["a"], "text_1": None}, "embed", "embedding"),
]


@pytest.mark.parametrize(("kind", "body", "call", "key"), INVOKED)
async def test_invocations_takes_the_route_of_its_body(
    serving, make_engine, kind: str, body: dict, call: str, key: str
) -> None:
    engine = make_engine(kind, ("a", "b") if "classifier" in kind else ())
    async with serving(engine) as client:
        response = await client.post("/invocations", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [name for name, _ in engine.calls if name != "render_chats"] == [call]
    assert key in (answer["results"] if "results" in answer else answer["data"])[0]


async def test_invocations_refuses_a_task_as_pooling_does(serving, make_engine) -> None:
    body = {"input": ["a"], "task": "token_classify"}
    async with serving(make_engine("sequence_classifier", ("a", "b"))) as client:
        pooled, invoked = [await client.post(path, json=body) for path in ("/pooling", "/invocations")]
    assert (pooled.status_code, pooled.json()["message"]) == (invoked.status_code, invoked.json()["message"])
    assert pooled.status_code == 400
