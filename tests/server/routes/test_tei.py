"""TEI's routes as its clients send and read them: huggingface_hub's InferenceClient, LlamaIndex, Haystack, RAGFlow,
Dify, Milvus, LiteLLM, chromadb."""

import asyncio

import httpx
import numpy as np
import pytest

from penstock.engine.protocol.errors import (
    DeadlineExceededError,
    EngineOverloadedError,
    EngineUnavailableError,
    ModelExecutionError,
)
from penstock.engine.protocol.model_info import Activation
from penstock.engine.protocol.multi_vector import MultiVector, SparseKind, SparsePooling
from penstock.engine.protocol.tasks import PoolingTask
from penstock.server.routes import tei

TEXTS = ["one red", "one two three red", "blue"]
QUERY = "one two three red"
BEST_FIRST = [1, 0, 2]
LABELS = ("joy", "anger", "fear")
PAIRS = [["one red"], ["blue", "two"]]

# Who sends it, the path, the body, and how many vectors come back.
EMBED_BODIES = [
    ("huggingface_hub, a text", "/", {"inputs": "hello"}, 1),
    ("huggingface_hub, options", "/embed", {"inputs": TEXTS, "normalize": True, "truncate": True, "dimensions": 8}, 3),
    ("huggingface_hub, direction", "/", {"inputs": "a", "truncation_direction": "left", "encoding_format": "float"}, 1),
    ("huggingface_hub, prompt", "/", {"inputs": TEXTS, "prompt_name": "query"}, 3),
    ("huggingface.js", "/", {"inputs": TEXTS, "parameters": {}}, 3),
    ("llama_index", "/embed", {"inputs": TEXTS, "truncate": True}, 3),
    ("haystack", "/", {"inputs": TEXTS, "normalize": False, "truncate": True}, 3),
    ("ragflow", "/embed", {"inputs": "hello"}, 1),
    ("chromadb", "/embed/", {"inputs": TEXTS}, 3),
    ("weaviate", "/", {"inputs": TEXTS, "options": {"wait_for_model": True}}, 3),
    ("nulls", "/embed", {"inputs": ["a"], "truncate": None, "prompt_name": None, "dimensions": None}, 1),
    ("white space", "/embed", {"inputs": " "}, 1),
    ("ids of one text", "/embed", {"inputs": [5, 6, 7]}, 1),
    ("mixed", "/embed", {"inputs": ["a", [5, 6]]}, 2),
    ("model is an extension", "/embed", {"inputs": "a", "model": "alias"}, 1),
]


def cases(table: list[tuple]) -> dict[str, object]:
    return {"argvalues": [case[1:] for case in table], "ids": [case[0] for case in table]}


@pytest.mark.parametrize(("path", "body", "count"), **cases(EMBED_BODIES))
async def test_embed_answers_a_bare_list_of_vectors(client: httpx.AsyncClient, path: str, body: dict, count) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    vectors = np.array(response.json(), dtype="float32")  # as huggingface_hub reads it
    assert vectors.shape == (count, 8)
    is_unit = np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert is_unit is (body.get("normalize") is not False)
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-compute-type"] == "cpu"
    assert int(response.headers["x-compute-tokens"]) > 0
    assert int(response.headers["x-total-time"]) >= int(response.headers["x-compute-time"]) >= 0
    inputs = [body["inputs"]] if isinstance(body["inputs"], str) else body["inputs"]
    if isinstance(inputs[0], str):
        assert int(response.headers["x-compute-characters"]) == sum(map(len, inputs))


async def test_options_reach_the_engine(client: httpx.AsyncClient, engine) -> None:
    body = {"inputs": "a", "truncate": True, "truncation_direction": "Left", "dimensions": 8, "prompt_name": "query"}
    await client.post("/embed", json=body)
    _, (inputs, params, options) = engine.calls[-1]
    assert (inputs, params.truncate_prompt_tokens, params.truncation_side) == (["a"], -1, "left")
    assert (params.normalize, params.dimensions, options.prompt_name) == (True, 8, "query")


async def test_vectors_are_normalised_independent_of_the_model(serving, make_engine) -> None:
    engine = make_engine(normalize=False)
    async with serving(engine) as client:
        await client.post("/embed", json={"inputs": "a"})
    assert engine.calls[-1][1][1].normalize is True


@pytest.mark.parametrize("body", [{"normalize": False}, {"parameters": {"normalize": False}}])
async def test_options_may_stand_in_parameters(client: httpx.AsyncClient, engine, body: dict) -> None:
    await client.post("/embed", json={"inputs": "a", **body})
    assert engine.calls[-1][1][1].normalize is False


async def test_an_option_beside_the_inputs_wins_over_parameters(client: httpx.AsyncClient, engine) -> None:
    await client.post("/embed", json={"inputs": "a", "normalize": True, "parameters": {"normalize": False}})
    assert engine.calls[-1][1][1].normalize is True


async def test_default_prompt_name_applies_where_a_request_names_none(serving, engine) -> None:
    async with serving(engine, default_prompt_name="query") as client:
        await client.post("/embed", json={"inputs": "a"})
        assert engine.calls[-1][1][2].prompt_name == "query"


@pytest.mark.parametrize(("truncate", "status"), [(None, 200), (True, 200), (False, 422)])
async def test_over_long_inputs_are_cut_unless_truncate_is_false(client: httpx.AsyncClient, truncate, status) -> None:
    body = {"inputs": "word " * 100, "truncate": truncate}
    assert (await client.post("/embed", json=body)).status_code == status


async def test_embed_all_gives_a_row_per_token(client: httpx.AsyncClient, engine) -> None:
    response = await client.post("/embed_all", json={"inputs": ["a b", "c"]})
    assert [len(rows) for rows in response.json()] == [4, 3]
    assert {len(row) for rows in response.json() for row in rows} == {8}
    assert engine.calls[-1][1][1].normalize is False
    assert len((await client.post("/embed_all", json={"inputs": "a b"})).json()) == 1


async def test_an_answer_of_too_many_numbers_is_refused(client: httpx.AsyncClient, monkeypatch) -> None:
    monkeypatch.setattr("penstock.server.admission.MAX_RESPONSE_BYTES", 10)
    response = await client.post("/embed_all", json={"inputs": ["a b"]})
    assert (response.status_code, response.json()["param"]) == (422, "inputs")


@pytest.mark.parametrize("path", ["/", "/similarity"])
async def test_similarity(client: httpx.AsyncClient, engine, path: str) -> None:
    body = {"inputs": {"source_sentence": QUERY, "sentences": TEXTS}, "parameters": {}}
    response = await client.post(path, json=body)
    assert response.json() == pytest.approx([0.2, 0.4, 0.0])
    name, (left, right, _, options) = engine.calls[-1]
    assert (name, left, right) == ("score", [QUERY], TEXTS)
    assert (options.prompt_name, options.prompt) == (None, "")  # one side must not get the query prompt alone
    await client.post(path, json={**body, "parameters": {"prompt_name": "query"}})
    assert engine.calls[-1][1][3].prompt_name == "query"


# (client, path, body, whether the answer is a list of lists)
PREDICT_BODIES = [
    ("a text", "/predict", {"inputs": "a"}, False),
    ("a text in a list", "/predict", {"inputs": ["a"]}, False),
    ("a pair", "/predict", {"inputs": ["a", "b"]}, False),
    ("a batch", "/predict", {"inputs": [["a"], ["b"]]}, True),
    ("texts and pairs", "/predict", {"inputs": PAIRS, "truncate": True}, True),
    ("huggingface_hub", "/", {"inputs": "a", "parameters": {}}, True),
    ("huggingface_hub at /predict", "/predict", {"inputs": "a", "parameters": {"top_k": 2}}, True),
    ("huggingface.js", "/", {"inputs": "a"}, True),
    ("nulls", "/predict", {"inputs": "a", "raw_scores": None, "truncate": None, "parameters": None}, False),
]


@pytest.mark.parametrize(("path", "body", "is_nested"), **cases(PREDICT_BODIES))
async def test_predict(serving, make_engine, path: str, body: dict, is_nested: bool) -> None:
    async with serving(make_engine("sequence_classifier", LABELS)) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer = response.json() if is_nested else [response.json()]
    top_k = (body.get("parameters") or {}).get("top_k") or 3
    for row in answer:
        assert [set(item) for item in row] == [{"score", "label"}] * top_k
        assert [item["score"] for item in row] == sorted((item["score"] for item in row), reverse=True)
        assert {item["label"] for item in row} <= set(LABELS)


async def test_texts_and_pairs_keep_their_order(serving, make_engine) -> None:
    engine = make_engine("sequence_classifier", LABELS)
    batch = [["p", "q"], ["a"], ["r", "s"], ["b"]]
    async with serving(engine) as client:
        together = (await client.post("/predict", json={"inputs": batch})).json()
        assert [call[0] for call in engine.calls] == ["classify", "classify_pairs"]
        alone = [(await client.post("/predict", json={"inputs": entry})).json() for entry in batch]
    assert together == alone


@pytest.mark.parametrize("option", [{"raw_scores": True}, {"parameters": {"function_to_apply": "none"}}])
async def test_raw_scores_are_logits(serving, make_engine, option: dict) -> None:
    engine = make_engine("sequence_classifier", LABELS)
    async with serving(engine) as client:
        await client.post("/predict", json={"inputs": "a", **option})
        assert engine.calls[-1][1][1].use_activation is False
        body = {"inputs": "a", "parameters": {"function_to_apply": "sigmoid"}}
        wrong = await client.post("/predict", json=body)
        assert (wrong.status_code, wrong.json()["param"]) == (422, "function_to_apply")
        body["parameters"]["function_to_apply"] = "softmax"
        assert (await client.post("/predict", json=body)).status_code == 200


# Who sends it, the path, and the body less query and texts.
RERANK_BODIES = [
    ("llama_index", "/rerank", {}),
    ("haystack", "/rerank", {"raw_scores": False}),
    ("haystack, direction", "/rerank", {"raw_scores": False, "truncate": True, "truncation_direction": "Right"}),
    ("dify and pymilvus", "/rerank", {"return_text": True}),
    ("ragflow", "/rerank", {"raw_scores": False, "truncate": True}),
    (
        "litellm",
        "/rerank",
        {"raw_scores": False, "truncate": False, "truncation_direction": "Right", "top_n": 2, "return_text": True},
    ),
    ("rerankers", "/rerank", {"model": "alias", "top_n": 3, "return_text": True}),
    ("milvus", "/rerank/", {"truncate": None, "documents": None}),
    ("base with /v1", "/v1/rerank", {}),
    ("root path", "/", {}),
]


@pytest.mark.parametrize(("path", "body"), **cases(RERANK_BODIES))
async def test_rerank_answers_a_bare_list_best_first(client: httpx.AsyncClient, path: str, body: dict) -> None:
    response = await client.post(path, json={"query": QUERY, "texts": TEXTS, **body})
    assert response.status_code == 200, response.text
    ranks = response.json()
    assert [rank["index"] for rank in ranks] == BEST_FIRST[: body.get("top_n")]
    assert [rank["score"] for rank in ranks] == sorted((rank["score"] for rank in ranks), reverse=True)
    keys = {"index", "score", "text"} if body.get("return_text") else {"index", "score"}
    assert all(set(rank) == keys for rank in ranks)
    if body.get("return_text"):
        assert all(rank["text"] == TEXTS[rank["index"]] for rank in ranks)
    assert response.headers["x-compute-characters"] == str(len(QUERY) * 3 + sum(map(len, TEXTS)))


async def test_documents_still_get_the_other_answer(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/rerank", json={"query": QUERY, "documents": TEXTS})).json()
    assert [row["index"] for row in answer["results"]] == BEST_FIRST


@pytest.mark.parametrize(("raw_scores", "best"), [(None, 1 / (1 + np.exp(-0.4))), (True, 0.4)])
async def test_scores_are_probabilities_unless_they_are_raw(serving, make_engine, raw_scores, best: float) -> None:
    engine = make_engine("cross_encoder", ["LABEL_0"], activation=Activation.IDENTITY)
    async with serving(engine) as client:
        response = await client.post("/rerank", json={"query": QUERY, "texts": TEXTS, "raw_scores": raw_scores})
    assert response.json()[0] == {"index": 1, "score": pytest.approx(best, abs=1e-6)}
    assert engine.calls[-1][1][2].use_activation is (False if raw_scores else None)


async def test_a_reranker_predicts_pairs_at_the_root_path(serving, make_engine) -> None:
    engine = make_engine("cross_encoder", ["LABEL_0"], activation=Activation.SIGMOID)
    async with serving(engine) as client:
        answer = (await client.post("/", json={"inputs": [["a", "b"], ["a", "c"]]})).json()
        assert (await client.post("/", json={"query": "a", "texts": ["b"]})).json()[0]["index"] == 0
    assert [row[0]["label"] for row in answer] == ["LABEL_0"] * 2


async def test_tokenize(client: httpx.AsyncClient, engine) -> None:
    for inputs in ("one red", ["one red"]):
        (tokens,) = (await client.post("/tokenize", json={"inputs": inputs})).json()
        assert [set(token) for token in tokens] == [{"id", "text", "special", "start", "stop"}] * 2
        assert [(t["text"], t["start"], t["stop"], t["special"]) for t in tokens] == [
            ("one", 0, 3, False),
            ("red", 4, 7, False),
        ]
    await client.post("/tokenize", json={"inputs": "a", "add_special_tokens": False, "prompt_name": "query"})
    assert engine.calls[-1][1] == (["query: a"], False)


@pytest.mark.parametrize(("ids", "texts"), [([5, 6], ["t5 t6"]), ([[5], [6, 7]], ["t5", "t6 t7"])])
async def test_decode(client: httpx.AsyncClient, ids: list, texts: list[str]) -> None:
    assert (await client.post("/decode", json={"ids": ids, "skip_special_tokens": None})).json() == texts


@pytest.mark.parametrize(
    ("kind", "labels", "model_type"),
    [
        ("embedding", (), {"embedding": {"pooling": "mean"}}),
        ("cross_encoder", ("X",), {"reranker": {"id2label": {"0": "X"}, "label2id": {"X": 0}}}),
        (
            "sequence_classifier",
            ("a", "b"),
            {"classifier": {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}},
        ),
    ],
)
async def test_info(serving, make_engine, kind: str, labels: tuple, model_type: dict) -> None:
    async with serving(make_engine(kind, labels), max_inputs_per_request=100) as client:
        info = (await client.get("/info")).json()
    assert info["model_type"] == model_type  # Dify reads the one key
    assert (info["max_input_length"], info["max_client_batch_size"]) == (64, 100)
    assert (info["model_id"], info["served_model_name"]) == ("fake-model", "fake-model")
    assert all(isinstance(info[key], int) for key in ("max_concurrent_requests", "max_batch_tokens"))


async def test_info_is_open_and_inference_is_not(serving, engine) -> None:
    async with serving(engine, api_key=("secret",)) as client:
        assert (await client.get("/info")).status_code == 200
        assert (await client.post("/", json={"inputs": "a"})).status_code == 401
        raw = {"authorization": "secret"}  # as LlamaIndex's TEI reranker sends it
        body = {"query": "a", "texts": ["b"]}
        assert (await client.post("/rerank", json=body, headers=raw)).status_code == 200


async def test_the_root_path_tells_health(client: httpx.AsyncClient) -> None:
    assert (await client.get("/")).status_code == 200
    assert (await client.head("/")).status_code == 200


def checked(response: httpx.Response) -> dict:
    """What clients of TEI read of an error, and others of the same field names."""
    body = response.json()
    assert set(body) == {"error", "error_type", "message", "detail", "param", "code"}
    assert isinstance(body["error"], str)
    assert body["error"] == body["message"] == body["detail"]
    assert response.headers["content-type"] == "application/json"
    return body


# (what, path, body, status, error_type, field, part of the message)
WRONG_BODIES = [
    ("no inputs", "/embed", {}, 422, "Validation", "inputs", "missing"),
    ("no inputs at the root", "/", {"input": "a"}, 422, "Validation", "inputs", "input"),
    ("empty list", "/embed", {"inputs": []}, 400, "Empty", "inputs", "empty list"),
    ("empty text", "/embed", {"inputs": ""}, 400, "Empty", "inputs", "empty text"),
    ("an empty text among others", "/embed", {"inputs": ["a", ""]}, 400, "Empty", "inputs", "in entry 1"),
    ("empty text, all tokens", "/embed_all", {"inputs": [""]}, 400, "Empty", "inputs", "in entry 0"),
    ("empty text to classify", "/predict", {"inputs": ""}, 400, "Empty", "inputs", "empty text"),
    ("empty texts to classify", "/predict", {"inputs": [["a"], [""]]}, 400, "Empty", "inputs", "in entry 1"),
    (
        "empty sentence",
        "/similarity",
        {"inputs": {"source_sentence": "", "sentences": ["a"]}},
        400,
        "Empty",
        "inputs",
        "empty text",
    ),
    ("number", "/embed", {"inputs": 7}, 422, "Validation", "inputs", "7"),
    ("unknown prompt length", "/embed", {"inputs": "a", "dimensions": 99}, 422, "Validation", "dimensions", "99"),
    ("too long", "/embed", {"inputs": "w " * 99, "truncate": False}, 422, "Validation", "inputs", "64"),
    ("id", "/embed", {"inputs": [5000]}, 422, "Validation", "inputs", "5000"),
    (
        "direction",
        "/embed",
        {"inputs": "a", "truncation_direction": "up"},
        422,
        "Validation",
        "truncation_direction",
        "up",
    ),
    ("flag", "/embed", {"inputs": "a", "normalize": "perhaps"}, 422, "Validation", "normalize", "perhaps"),
    ("in parameters", "/", {"inputs": "a", "parameters": {"normalize": "x"}}, 422, "Validation", "normalize", "'x'"),
    ("unknown model", "/embed", {"inputs": "a", "model": "b"}, 404, "Validation", "model", "this server has"),
    ("model of no name", "/", {"inputs": "a", "model": 7}, 422, "Validation", "model", "7"),
    ("sparse", "/embed_sparse", {"inputs": "a"}, 424, "Backend", "task", "such as SPLADE"),
    ("classes of an embedder", "/predict", {"inputs": "a"}, 424, "Backend", "task", "a model with classes"),
    ("no texts", "/", {"query": "a"}, 422, "Validation", "texts", "missing"),
    ("empty texts", "/rerank", {"query": "a", "texts": []}, 400, "Empty", "texts", "empty list"),
    ("no query", "/rerank", {"texts": ["a"]}, 422, "Validation", "query", "missing"),
    ("number in texts", "/rerank", {"query": "a", "texts": ["b", 7]}, 422, "Validation", "texts", "entry 1 is 7"),
    (
        "rerank's model",
        "/rerank",
        {"query": "a", "texts": ["b"], "model": "c"},
        404,
        "Validation",
        "model",
        "server has",
    ),
    ("flat list", "/predict", {"inputs": ["a", "b", "c"]}, 422, "Validation", "inputs", "[[text], [text], ...]"),
    ("three in one", "/predict", {"inputs": [["a", "b", "c"]]}, 422, "Validation", "inputs", "entry 0"),
    ("no entries", "/predict", {"inputs": []}, 400, "Empty", "inputs", "not empty"),
    ("sentences", "/similarity", {"inputs": {"source_sentence": "a"}}, 422, "Validation", "inputs", "sentences"),
    ("no sentences", "/", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "Empty", "inputs", "sentences"),
    ("empty option", "/embed", {"inputs": "a", "truncate": []}, 422, "Validation", "truncate", "[]"),
    ("tokenize nothing", "/tokenize", {"inputs": []}, 400, "Empty", "inputs", "empty list"),
    (
        "tokenize with a prompt",
        "/tokenize",
        {"inputs": "a", "prompt_name": "x"},
        422,
        "Validation",
        "prompt_name",
        "query",
    ),
    ("decode nothing", "/decode", {"ids": []}, 400, "Empty", "ids", "not empty"),
    ("decode an empty list", "/decode", {"ids": [[]]}, 422, "Validation", "ids", "list 0"),
    ("decode texts", "/decode", {"ids": ["a"]}, 422, "Validation", "ids", "list 0"),
]


@pytest.mark.parametrize(("path", "body", "status", "error_type", "param", "part"), **cases(WRONG_BODIES))
async def test_errors_have_teis_status_and_body(
    client: httpx.AsyncClient, path: str, body: dict, status: int, error_type: str, param: str | None, part: str
) -> None:
    response = await client.post(path, json=body)
    error = checked(response)
    assert (response.status_code, error["error_type"], error["param"]) == (status, error_type, param), error
    assert part in error["error"]
    assert "<" not in error["error"]


@pytest.mark.parametrize("path", ["/embed", "/", "/predict", "/decode"])
async def test_bodies_that_are_no_json_objects(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, content=b"{", headers={"content-type": "application/json"})
    assert (response.status_code, checked(response)["error_type"]) == (400, "Validation")
    response = await client.post(path, json=["a"])
    assert (response.status_code, checked(response)["error_type"]) == (422, "Validation")
    response = await client.post(path, content=b"a=b", headers={"content-type": "application/x-www-form-urlencoded"})
    assert (response.status_code, checked(response)["error_type"]) == (415, "Validation")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", '{"inputs": %s}'),
        ("/", '{"inputs": "a", "parameters": {"normalize": %s}}'),
        ("/", '{"inputs": {"source_sentence": "a", "sentences": [%s]}}'),
        ("/predict", '{"inputs": [%s]}'),
        ("/rerank", '{"query": "a", "texts": [%s]}'),
        ("/tokenize", '{"inputs": %s}'),
        ("/decode", '{"ids": [%s]}'),
    ],
)
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"text": ', "}")])
async def test_deep_nesting_is_refused(client, path: str, body: str, opening: str, closing: str) -> None:
    response = await client.post(path, content=body % (opening * 1000 + "1" + closing * 1000))
    assert response.status_code in (400, 422)
    assert len(checked(response)["error"]) < 400


# (failure, status, error_type, whether it says when to come back)
FAILURES = [
    (EngineOverloadedError("full", retry_after_s=2, reason="queue_tokens"), 429, "Overloaded", True),
    (EngineUnavailableError("starting"), 503, "Unhealthy", True),
    (DeadlineExceededError("late"), 504, "Backend", False),
    (ModelExecutionError("secret detail"), 500, "Backend", False),
]


@pytest.mark.parametrize("path", ["/embed", "/rerank"])
@pytest.mark.parametrize(("failure", "status", "error_type", "comes_back"), FAILURES)
async def test_failures(client, engine, path: str, failure, status: int, error_type: str, comes_back: bool) -> None:
    engine.failure = failure
    body = {"inputs": "a"} if path == "/embed" else {"query": "a", "texts": ["b"]}
    response = await client.post(path, json=body)
    error = checked(response)
    assert (response.status_code, error["error_type"]) == (status, error_type)
    assert ("retry-after" in response.headers) is comes_back
    assert "secret" not in error["error"]


async def test_errors_outside_of_teis_routes_have_its_body_too(serving, engine) -> None:
    async with serving(engine, max_body_bytes=1000) as client:
        for path in sorted(route.path for route in tei.router.routes if "POST" in route.methods):
            response = await client.post(path, content=b"x" * 1001)
            assert (response.status_code, checked(response)["error_type"]) == (413, "Validation")
            response = await client.put(path)
            assert (response.status_code, checked(response)["error_type"]) == (405, "Validation")
        engine.failure = RuntimeError("secret detail")
        response = await client.post("/embed", json={"inputs": "a"})
        assert (response.status_code, checked(response)["error_type"]) == (500, "Backend")
        engine.failure, engine.gate = None, asyncio.Event()
        engine.entered.clear()
        asking = asyncio.create_task(client.post("/embed", json={"inputs": "a"}))
        await engine.entered.wait()
        asking.cancel()
        response = await asking
        assert (response.status_code, checked(response)["error_type"]) == (503, "Unhealthy")
        assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize("path", ["/", "/invocations"])
async def test_one_body_has_one_error_on_both_routes_for_all(client: httpx.AsyncClient, path: str) -> None:
    for body, status in (
        ({"inputs": [5, "a"]}, 422),
        ({"inputs": []}, 400),
        ({"inputs": "a", "model": "x"}, 404),
        ({"query": "a", "texts": [7]}, 422),
    ):
        response = await client.post(path, json=body)
        assert (response.status_code, bool(checked(response))) == (status, True)


async def test_the_way_out_is_said_in_teis_words(serving, engine) -> None:
    async with serving(engine, max_inputs_per_request=2) as client:
        response = await client.post("/rerank", json={"query": "a", "texts": ["b"] * 3})
        assert (response.status_code, checked(response)["param"]) == (422, "texts")
        response = await client.post("/embed", json={"inputs": ["b"] * 3})
        assert (response.status_code, checked(response)["param"]) == (422, "inputs")


async def test_a_token_classifier_refuses_the_root_path(serving, make_engine) -> None:
    async with serving(make_engine("token_classifier", ("O", "PER"))) as client:
        response = await client.post("/", json={"inputs": "a"})
        assert (response.status_code, checked(response)["error_type"]) == (424, "Backend")
        body = {"inputs": {"source_sentence": "a", "sentences": ["b"]}}
        assert (await client.post("/similarity", json=body)).status_code == 424


SPLADE = {
    "sparse": SparsePooling(kind=SparseKind.VOCABULARY_LOGITS),
    "tasks": (PoolingTask.SPARSE_EMBED, PoolingTask.SCORE),
    "sequence_pooling": (),
}


async def test_a_sparse_vector_that_is_larger_than_expected_takes_more_room(serving, make_engine, monkeypatch) -> None:
    monkeypatch.setattr("penstock.server.calls.sizes.EXPECTED_ENTRIES", 2)
    monkeypatch.setattr("penstock.server.admission.MAX_RESPONSE_BYTES", 100)
    async with serving(make_engine(**SPLADE)) as client:
        assert (await client.post("/embed_sparse", json={"inputs": ["a b"]})).status_code == 200
        refused = await client.post("/embed_sparse", json={"inputs": ["a b c"]})
    assert refused.status_code == 422
    assert "the limit is 100" in refused.json()["error"]


@pytest.mark.parametrize("path", ["/embed_sparse", "/"])
async def test_embed_sparse_gives_the_entries_that_are_not_zero(serving, make_engine, path: str) -> None:
    engine = make_engine(**SPLADE)
    async with serving(engine) as client:
        response = await client.post(path, json={"inputs": ["one two", "three"]})
        info = (await client.get("/info")).json()
    assert response.status_code == 200
    rows = response.json()
    assert [len(row) for row in rows] == [2, 1]
    assert all(set(entry) == {"index", "value"} and entry["value"] > 0 for row in rows for entry in row)
    assert response.headers["x-compute-tokens"] == "7"
    assert info["model_type"] == {"embedding": {"pooling": "splade"}}


async def test_vectors_of_tokens_are_those_that_the_model_was_trained_for(serving, make_engine) -> None:
    engine = make_engine(multi_vector=MultiVector(), tasks=(PoolingTask.TOKEN_EMBED, PoolingTask.SCORE))
    async with serving(engine) as client:
        assert (await client.post("/embed_all", json={"inputs": ["a b"]})).status_code == 200
    assert engine.calls[-1][1][1].normalize is True
