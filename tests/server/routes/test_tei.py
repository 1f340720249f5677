"""TEI's routes with the bodies of real clients."""

from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
from fastapi import Response

from penstock.engine.protocol.errors import (
    DeadlineExceededError,
    EngineOverloadedError,
    EngineUnavailableError,
    ModelExecutionError,
)
from penstock.engine.protocol.model_info import Activation
from penstock.engine.protocol.multi_vector import MultiVector, SparseKind, SparsePooling, TokenHeadFiles
from penstock.engine.protocol.results import TokenizedText
from penstock.engine.protocol.tasks import PoolingTask
from penstock.server import penstock_version
from penstock.server.routes import tei

from ...tables import cases, table
from ..bodies import client_bodies

TEXTS = ["one red", "one two three red", "blue"]
QUERY = "one two three red"
BEST_FIRST = [1, 0, 2]
LABELS = ("joy", "anger", "fear")


@pytest.mark.parametrize(("path", "body", "count"), **client_bodies("tei_embed"))
async def test_embed_returns_a_bare_list_of_vectors(client: httpx.AsyncClient, path: str, body: dict, count) -> None:
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


async def test_options_reach_the_engine(serving, make_engine) -> None:
    engine = make_engine(normalize=False)
    async with serving(engine, default_prompt_name="query") as client:
        for fields, name, value in table(__file__, "tei"):
            await client.post("/embed", json={"inputs": "a", **fields})
            _, (inputs, params, options) = engine.calls[-1]
            assert (inputs, options.prompt_name) == (["a"], "query")
            assert getattr(params, name) == value, fields
    async with serving(engine) as client:
        for path in ("/embed", "/embed_all"):
            await client.post(path, json={"inputs": "a", "prompt_name": "query", "priority": 4})
            options = engine.calls[-1][1][2]
            assert (options.prompt_name, options.priority) == ("query", 4)


async def test_times_are_in_milliseconds(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.5, 13.0])
    monkeypatch.setattr(tei.time, "perf_counter", lambda: next(clock))
    call = Mock(began_s=10.0, info=Mock(device="cuda:0"), request=Mock(scope={}))
    call.respond.return_value = Response()
    headers = tei._respond(call, [], num_tokens=7, num_chars=3).headers
    assert headers["x-compute-type"] == "gpu"
    assert [headers[f"x-{name}"] for name in ("compute-time", "total-time", "queue-time")] == ["0", "2500", "0"]
    assert (headers["x-compute-characters"], headers["x-compute-tokens"]) == ("3", "7")


async def test_embed_all_returns_a_row_for_each_token(client: httpx.AsyncClient, engine) -> None:
    response = await client.post("/embed_all", json={"inputs": ["a b", "c"]})
    assert [len(rows) for rows in response.json()] == [4, 3]
    assert {len(row) for rows in response.json() for row in rows} == {8}
    assert engine.calls[-1][1][1].normalize is False
    assert len((await client.post("/embed_all", json={"inputs": "a b"})).json()) == 1


@pytest.mark.parametrize("path", ["/", "/similarity"])
async def test_similarity_scores_sentences_in_order(client: httpx.AsyncClient, engine, path: str) -> None:
    body = {"inputs": {"source_sentence": QUERY, "sentences": TEXTS}, "parameters": {}}
    response = await client.post(path, json=body)
    assert response.json() == pytest.approx([0.2, 0.4, 0.0])
    name, (left, right, _, options) = engine.calls[-1]
    assert (name, left, right) == ("score", [QUERY], TEXTS)
    assert (options.prompt_name, options.prompt) == (None, "")  # one side must not get the query prompt alone
    assert response.headers["x-compute-characters"] == str(len(QUERY) + sum(map(len, TEXTS)))
    assert int(response.headers["x-compute-tokens"]) > 0
    await client.post(path, json={**body, "parameters": {"prompt_name": "query", "priority": 4}})
    assert (engine.calls[-1][1][3].prompt_name, engine.calls[-1][1][3].priority) == ("query", 4)


@pytest.mark.parametrize(("of_model", "of_server", "expected"), [("a", "b", "b"), (None, "b", "b"), ("a", None, "a")])
async def test_similarity_uses_the_default_prompt(serving, make_engine, of_model, of_server, expected: str) -> None:
    engine = make_engine(prompts={"a": "", "b": ""}, default_prompt_name=of_model)
    async with serving(engine, default_prompt_name=of_server) as client:
        body = {"inputs": {"source_sentence": QUERY, "sentences": TEXTS}}
        assert (await client.post("/similarity", json=body)).status_code == 200
    assert engine.calls[-1][1][3].prompt_name == expected


@pytest.mark.parametrize(("path", "body", "is_nested"), **client_bodies("tei_predict"))
async def test_predict_returns_classes_best_first(serving, make_engine, path: str, body: dict, is_nested: bool) -> None:
    async with serving(make_engine("sequence_classifier", LABELS)) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer = response.json() if is_nested else [response.json()]
    top_k = (body.get("parameters") or {}).get("top_k") or 3
    for row in answer:
        assert [set(item) for item in row] == [{"score", "label"}] * top_k
        assert [item["score"] for item in row] == sorted((item["score"] for item in row), reverse=True)
        assert {item["label"] for item in row} <= set(LABELS)


async def test_predict_keeps_the_order_of_texts_and_pairs(serving, make_engine) -> None:
    engine = make_engine("sequence_classifier", LABELS)
    batch = [["p", "q"], ["a"], ["r", "s"], ["b"]]
    async with serving(engine) as client:
        response = await client.post("/predict", json={"inputs": batch, "priority": 4})
        assert [(name, arguments[0]) for name, arguments in engine.calls] == [
            ("classify", ["a", "b"]),
            ("classify_pairs", [("p", "q"), ("r", "s")]),
        ]
        assert {arguments[-1].priority for _, arguments in engine.calls} == {4}
        assert (response.headers["x-compute-characters"], response.headers["x-compute-tokens"]) == ("6", "14")
        together = response.json()
        alone = [(await client.post("/predict", json={"inputs": entry})).json() for entry in batch]
    assert together == alone


@pytest.mark.parametrize("option", [{"raw_scores": True}, {"parameters": {"function_to_apply": "none"}}])
async def test_predict_returns_logits_on_request(serving, make_engine, option: dict) -> None:
    engine = make_engine("sequence_classifier", LABELS)
    async with serving(engine) as client:
        await client.post("/predict", json={"inputs": "a", **option})
        assert engine.calls[-1][1][1].use_activation is False
        body = {"inputs": "a", "parameters": {"function_to_apply": "sigmoid"}}
        wrong = await client.post("/predict", json=body)
        assert (wrong.status_code, wrong.json()["param"]) == (422, "function_to_apply")
        body["parameters"]["function_to_apply"] = "softmax"
        assert (await client.post("/predict", json=body)).status_code == 200
        wrong = await client.post("/predict", json={**body, "raw_scores": True})
        assert wrong.status_code == 422
        assert "raw_scores is true, but function_to_apply is 'softmax'" in wrong.json()["message"]


async def test_predict_of_logits_returns_probabilities_unless_raw(serving, make_engine) -> None:
    async with serving(make_engine("cross_encoder", ("LABEL_0",), activation=Activation.IDENTITY)) as client:
        bodies = [{"inputs": ["a", "b"], "raw_scores": is_raw} for is_raw in (True, False)]
        raw, shown = [(await client.post("/predict", json=body)).json()[0]["score"] for body in bodies]
    assert shown == pytest.approx(1 / (1 + np.exp(-raw)), abs=1e-6)
    assert abs(shown - raw) > 0.1


@pytest.mark.parametrize(("path", "body"), **client_bodies("tei_rerank"))
async def test_rerank_returns_a_bare_list_best_first(client: httpx.AsyncClient, path: str, body: dict) -> None:
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


@cases(__file__, "kind", "activation", "use_activation", "raw_scores", "best")
async def test_logits_become_probabilities_unless_raw(
    serving, make_engine, kind: str, activation: str, use_activation: bool, raw_scores: bool | None, best: float
) -> None:
    engine = make_engine(kind, ["LABEL_0"], activation=Activation(activation), use_activation=use_activation)
    async with serving(engine) as client:
        response = await client.post("/rerank", json={"query": QUERY, "texts": TEXTS, "raw_scores": raw_scores})
    assert response.json()[0] == {"index": 1, "score": pytest.approx(best, abs=1e-6)}
    assert engine.calls[-1][1][2].use_activation is (False if raw_scores else None)


async def test_root_path_predicts_pairs_with_a_reranker(serving, make_engine) -> None:
    engine = make_engine("cross_encoder", ["LABEL_0"], activation=Activation.SIGMOID)
    async with serving(engine) as client:
        answer = (
            await client.post("/", json={"inputs": [["a", "b"], ["a", "c"]], "texts": None, "parameters": None})
        ).json()
        assert (await client.post("/", json={"query": "a", "texts": ["b"]})).json()[0]["index"] == 0
    assert [row[0]["label"] for row in answer] == ["LABEL_0"] * 2


async def test_tokenize_returns_places_and_special_tokens(client: httpx.AsyncClient, engine) -> None:
    for inputs in ("one red", ["one red"]):
        (tokens,) = (await client.post("/tokenize", json={"inputs": inputs})).json()
        one, red = (token.pop("id") for token in tokens)
        assert [one, red] == (await engine.tokenize(["one red"]))[0]
        assert tokens == [
            {"text": "one", "special": False, "start": 0, "stop": 3},
            {"text": "red", "special": False, "start": 4, "stop": 7},
        ]
    await client.post("/tokenize", json={"inputs": "a", "add_special_tokens": False, "prompt_name": "query"})
    assert engine.calls[-1][1] == (["query: a"], False)
    await client.post("/tokenize", json={"inputs": "a", "prompt_name": ""})
    assert engine.calls[-1][1] == (["a"], True)
    special = TokenizedText([2], ["[SEP]"], [(0, 0)], [True])
    rows = list(tei._tokens("a", special))
    assert rows == [{"id": 2, "text": "[SEP]", "special": True, "start": None, "stop": None}]


@pytest.mark.parametrize(("ids", "texts"), [([5, 6], ["t5 t6"]), ([[5], [6, 7]], ["t5", "t6 t7"])])
async def test_decode_returns_a_text_for_each_list(client, engine, ids: list, texts: list[str]) -> None:
    for skip in (None, True, False):
        assert (await client.post("/decode", json={"ids": ids, "skip_special_tokens": skip})).json() == texts
    assert engine.special_tokens == [False, False, True]


@cases(__file__, "kind", "labels", "model_type")
async def test_info_describes_model_and_limits(serving, make_engine, kind: str, labels, model_type: dict) -> None:
    settings = {"max_inputs_per_request": 100, "max_queued_tokens": 640, "tokenizer_workers": 3, "max_num_seqs": 5}
    async with serving(make_engine(kind, labels), ("served",), max_num_batched_tokens=32, **settings) as client:
        info = (await client.get("/info")).json()
    expected = {**table(__file__, "tei_info"), "model_type": model_type, "version": penstock_version()}
    assert info == expected  # Dify reads the one key of model_type


def checked(response: httpx.Response) -> dict[str, Any]:
    """Checks the fields of an error that clients of TEI and others read."""
    body = response.json()
    assert set(body) == {"error", "error_type", "message", "detail", "param", "code"}
    assert isinstance(body["error"], str)
    assert body["error"] == body["message"] == body["detail"]
    assert response.headers["content-type"] == "application/json"
    return body


async def test_errors_have_the_status_and_body_of_tei(client: httpx.AsyncClient) -> None:
    for path, body, status, error_type, param, part in table(__file__, "test_errors_have_the_status_and_body_of_tei"):
        response = await client.post(path, json=body)
        error = checked(response)
        assert (response.status_code, error["error_type"], error["param"]) == (status, error_type, param), error
        assert part in error["error"]
        assert "<" not in error["error"]


# (failure, status, error_type, whether the response has Retry-After)
FAILURES = [
    (EngineOverloadedError("full", retry_after_s=2, reason="queue_tokens"), 429, "Overloaded", True),
    (EngineUnavailableError("starting"), 503, "Unhealthy", True),
    (DeadlineExceededError("late"), 504, "Backend", False),
    (ModelExecutionError("secret detail"), 500, "Backend", False),
]


async def test_engine_errors_have_the_body_of_tei(client: httpx.AsyncClient, engine) -> None:
    for engine.failure, status, error_type, has_retry in FAILURES:
        for path, body in (("/embed", {"inputs": "a"}), ("/rerank", {"query": "a", "texts": ["b"]})):
            response = await client.post(path, json=body)
            error = checked(response)
            assert (response.status_code, error["error_type"]) == (status, error_type)
            assert ("retry-after" in response.headers) is has_retry
            assert "secret" not in error["error"]


async def test_errors_of_the_server_have_the_body_of_tei(serving, engine) -> None:
    async with serving(engine, max_body_bytes=1000) as client:
        for path in sorted(route.path for route in tei.router.routes if "POST" in route.methods):
            response = await client.post(path, content=b"x" * 1001)
            assert (response.status_code, checked(response)["error_type"]) == (413, "Validation")
            response = await client.put(path)
            assert (response.status_code, checked(response)["error_type"]) == (405, "Validation")
        engine.failure = RuntimeError("secret detail")
        response = await client.post("/embed", json={"inputs": "a"})
        assert (response.status_code, checked(response)["error_type"]) == (500, "Backend")


@pytest.mark.parametrize("path", ["/", "/invocations"])
async def test_routes_for_all_bodies_have_the_errors_of_tei(client: httpx.AsyncClient, path: str) -> None:
    for body, status in (
        ({"inputs": [5, "a"]}, 422),
        ({"inputs": []}, 400),
        ({"inputs": "a", "model": "x"}, 404),
        ({"query": "a", "texts": [7]}, 422),
        ({"query": "a", "texts": None, "inputs": None, "top_n": 1}, 422 if path == "/" else 400),
    ):
        response = await client.post(path, json=body)
        assert response.status_code == status
        assert status != 422 or checked(response)


async def test_token_classifier_rejects_the_root_path(serving, make_engine) -> None:
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


async def test_large_sparse_vectors_need_more_memory(serving, make_engine, monkeypatch) -> None:
    monkeypatch.setattr("penstock.server.response_size.EXPECTED_ENTRIES", 2)
    monkeypatch.setattr("penstock.server.admission.MAX_RESPONSE_BYTES", 100)
    async with serving(make_engine(**SPLADE)) as client:
        assert (await client.post("/embed_sparse", json={"inputs": ["a b"]})).status_code == 200
        rejected = await client.post("/embed_sparse", json={"inputs": ["a b c"]})
    assert rejected.status_code == 422
    assert "the limit is 100" in rejected.json()["error"]
    assert rejected.json()["param"] == "inputs"


@pytest.mark.parametrize("path", ["/embed_sparse", "/"])
async def test_embed_sparse_returns_entries_that_are_not_zero(serving, make_engine, path: str) -> None:
    engine = make_engine(**SPLADE)
    async with serving(engine) as client:
        response = await client.post(path, json={"inputs": ["one two", "three"]})
        info = (await client.get("/info")).json()
    assert response.status_code == 200
    one, two = {"index": 0, "value": 0.5}, {"index": 1, "value": 0.5}
    assert response.json() == [[one, two], [one]]
    assert response.headers["x-compute-characters"] == "12"
    assert response.headers["x-compute-tokens"] == "7"
    assert info["model_type"] == {"embedding": {"pooling": "splade"}}


@pytest.mark.parametrize("heads", [{"multi_vector": MultiVector()}, {"token_heads": TokenHeadFiles()}])
async def test_embed_all_normalizes_trained_token_vectors(serving, make_engine, heads: dict[str, Any]) -> None:
    engine = make_engine(**heads, tasks=(PoolingTask.TOKEN_EMBED, PoolingTask.SCORE))
    async with serving(engine, ("fake-model", "alias"), default_prompt_name="query") as client:
        assert (await client.post("/embed_all", json={"inputs": ["a b"]})).status_code == 200
    _, (_, params, options) = engine.calls[-1]
    assert (params.normalize, options.prompt_name) == (True, "query")


async def test_root_path_embeds_with_a_model_of_dense_and_sparse_vectors(serving, make_engine) -> None:
    engine = make_engine(**{**SPLADE, "tasks": (PoolingTask.EMBED, PoolingTask.SPARSE_EMBED)})
    async with serving(engine) as client:
        await client.post("/", json={"inputs": "a", "model": "alias"})
    assert engine.calls[-1][0] == "embed"
