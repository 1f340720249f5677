"""POST /classify: the responses of vLLM, Infinity and Cohere, from classifiers and embedding models."""

from typing import Any

import numpy as np
import pytest

from penstock.engine.protocol.model_info import Activation
from penstock.engine.protocol.results import ClassResult
from penstock.engine.protocol.tasks import PoolingTask
from penstock.server.routes import classify as classify_route

from ...tables import cases
from ..fake_engine import FakeEngine, Serving

EXAMPLES = [{"text": "where is it", "label": "shipping"}, {"text": "money back", "label": "refund"}]
LABELS = ("negative", "positive")


@pytest.fixture
async def classifier(serving: Serving, make_engine):
    async with serving(make_engine("sequence_classifier", LABELS)) as client:
        yield client


async def classify(serving: Serving, engine: FakeEngine, path: str = "/classify", **body: object) -> dict[str, Any]:
    async with serving(engine) as client:
        response = await client.post(path, json={"model": "alias", **body})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
@pytest.mark.parametrize("texts", ["good", ["good", "bad"], [[5, 6], [7]]])
async def test_input_gets_the_response_of_vllm(serving, make_engine, path: str, texts: Any) -> None:
    engine = make_engine("sequence_classifier", LABELS)
    answer = await classify(serving, engine, path, input=texts, priority=4)
    assert (answer["object"], answer["model"], answer["id"][:9]) == ("list", "alias", "classify-")
    assert len(answer["data"]) == (1 if isinstance(texts, str) else len(texts))
    for i, row in enumerate(answer["data"]):
        best = LABELS[int(np.argmax(row["probs"]))]
        assert row == {"index": i, "label": best, "probs": row["probs"], "num_classes": 2}
        assert sum(row["probs"]) == pytest.approx(1)
    assert answer["usage"]["prompt_tokens"] > 0
    name, (_, params, options) = engine.calls[-1]
    assert (name, params.truncate_prompt_tokens, options.priority) == ("classify", None, 4)


def check_cohere_answer(answer: dict[str, Any], texts: list[str], labels: list[str]) -> None:
    """Checks the fields that the Cohere SDKs read."""
    assert set(answer) == {"id", "classifications", "meta"}
    assert answer["meta"] == {"api_version": {"version": "1"}, "billed_units": {"classifications": len(texts)}}
    for i, (item, text) in enumerate(zip(answer["classifications"], texts, strict=True)):
        scores = {name: label["confidence"] for name, label in item["labels"].items()}
        assert (item["id"], item["input"], list(scores)) == (f"{answer['id']}-{i}", text, labels)
        assert (item["prediction"], item["confidence"]) == (max(scores, key=scores.get), max(scores.values()))
        assert item["predictions"][0] == item["prediction"]
        assert item["confidences"] == [scores[name] for name in item["predictions"]]


@cases(__file__, "activation", "scores", "predictions")
async def test_sigmoid_scores_of_several_labels_are_multi_label(
    serving, make_engine, monkeypatch, activation, scores: list[float], predictions: list[str]
) -> None:
    labels, activation = ["a", "b", "c"][: len(scores)], Activation(activation)
    engine = make_engine("sequence_classifier", labels, activation=activation)
    result = ClassResult(np.array([scores], np.float32), tuple(labels), [3])
    monkeypatch.setattr(engine, "_classes", lambda *_: result)
    answer = await classify(serving, engine, inputs=["good"])
    check_cohere_answer(answer, ["good"], labels)
    is_multi = activation is Activation.SIGMOID and len(labels) > 1
    assert answer["classifications"][0]["classification_type"] == ("multi-label" if is_multi else "single-label")
    assert answer["classifications"][0]["predictions"] == predictions


@pytest.mark.parametrize("raw_scores", [False, True])
async def test_raw_scores_get_the_response_of_infinity(serving, make_engine, raw_scores: bool) -> None:
    # The body of infinity_client if its caller names no model.
    engine = make_engine("sequence_classifier", LABELS)
    body = {"input": ["good", "word " * 100], "model": "default/not-specified", "raw_scores": raw_scores}
    answer = await classify(serving, engine, **body)
    assert set(answer) == {"id", "object", "created", "model", "data", "usage"}
    assert (answer["object"], answer["model"]) == ("classify", "fake-model")
    assert (type(answer["id"]), type(answer["created"])) == (str, int)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    for row in answer["data"]:
        assert all(set(entry) == {"score", "label"} for entry in row)
        assert {entry["label"] for entry in row} == set(LABELS)
        assert row[0]["score"] >= row[1]["score"]
    params = engine.calls[-1][1][1]
    assert (params.use_activation, params.truncate_prompt_tokens) == (not raw_scores, -1)


async def test_examples_make_an_embedding_model_classify(serving: Serving, engine: FakeEngine) -> None:
    answer = await classify(serving, engine, "/v1/classify", inputs=["hello", "you"], examples=EXAMPLES)
    check_cohere_answer(answer, ["hello", "you"], ["shipping", "refund"])
    name, (texts, examples, params, _) = engine.calls[-1]
    assert (name, texts) == ("few_shot", ["hello", "you"])
    assert examples == [("where is it", "shipping"), ("money back", "refund")]
    assert params.truncate_prompt_tokens == -1


async def test_number_of_scores_is_limited(client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classify_route, "MAX_SCORES", 4)
    for field, classes in (("labels", ["a", "b"]), ("examples", EXAMPLES)):
        assert (await client.post("/classify", json={"input": ["x", "y"], field: classes})).status_code == 200
        response = await client.post("/classify", json={"input": ["x", "y", "z"], field: classes})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert f"3 inputs with 2 classes in {field} give 6 scores; the limit is 4" in response.text


@cases(__file__, "fields", "expected")
async def test_truncate_sets_the_side_that_is_cut(serving, engine, fields: dict[str, Any], expected: list[Any]) -> None:
    await classify(serving, engine, **fields, examples=EXAMPLES)
    params = engine.calls[-1][1][2]
    assert [params.truncate_prompt_tokens, params.truncation_side] == expected


async def test_default_prompt_is_for_embedding_models_only(serving: Serving, engine: FakeEngine, make_engine) -> None:
    async with serving(engine, default_prompt_name="query") as client:
        await client.post("/classify", json={"input": ["a"], "labels": ["b", "c"], "priority": 4})
        assert (engine.calls[-1][1][-1].prompt_name, engine.calls[-1][1][-1].priority) == ("query", 4)
        await client.post("/score", json={"text_1": "a", "text_2": "b"})
        assert engine.calls[-1][1][-1].prompt_name is None
    classifier = make_engine("sequence_classifier", ("a", "b"))
    async with serving(classifier, default_prompt_name="query") as client:
        await client.post("/classify", json={"input": ["a"]})
        assert classifier.calls[-1][1][-1].prompt_name is None


async def test_token_classifier_returns_a_class_for_each_token(serving: Serving, make_engine) -> None:
    engine = make_engine("token_classifier", ("O", "B-PER", "I-PER"))
    answer = await classify(serving, engine, input=["Ann met Bob", "x"], priority=4)
    assert answer["labels"] == ["O", "B-PER", "I-PER"]
    assert [(row["index"], len(row["tokens"]), row["num_classes"]) for row in answer["data"]] == [(0, 5, 3), (1, 3, 3)]
    for token in (token for row in answer["data"] for token in row["tokens"]):
        assert token["token"] == f"t{token['token_id']}"
        assert token["label"] == answer["labels"][token["token_id"] % 3]
        assert token["score"] == max(token["probs"]) == 1.0
    assert engine.calls[-1][1][-1].priority == 4
    assert engine.special_tokens == [True]


async def test_response_for_tokens_has_a_size_limit(serving: Serving, make_engine, monkeypatch) -> None:
    async with serving(make_engine("token_classifier", ("O", "B-PER", "I-PER"))) as client:
        for limit, value in (("calls.limits.MAX_DECODED_IDS", 4), ("admission.MAX_RESPONSE_BYTES", 14)):
            with monkeypatch.context() as patch:
                patch.setattr(f"penstock.server.{limit}", value)
                response = await client.post("/classify", json={"input": ["Ann met Bob"]})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "input")
            assert f"the limit is {value}" in response.json()["message"]


async def test_pair_reranker_refers_single_texts_to_other_routes(serving: Serving, make_engine) -> None:
    engine = make_engine("cross_encoder", ("yes",), tasks=(PoolingTask.SCORE,), embedding_size=0)
    async with serving(engine) as client:
        for body, param in (({"input": "a"}, "input"), ({"inputs": ["a"]}, "inputs")):
            response = await client.post("/classify", json=body)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_task", param)
            assert "/rerank" in error["message"]
            assert "/score" in error["message"]
        response = await client.post("/pooling", json={"input": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_task")
        assert (await client.post("/rerank", json={"query": "a", "documents": ["a"]})).status_code == 200
    assert [name for name, _ in engine.calls] == ["score"]


@pytest.mark.parametrize("kind", ["sequence_classifier", "cross_encoder", "token_classifier"])
async def test_classifier_rejects_an_instruction(serving: Serving, make_engine, kind: str) -> None:
    async with serving(make_engine(kind, ("a", "b"))) as client:
        response = await client.post("/classify", json={"input": "good", "instruction": "Find praise."})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "instruction")
        assert (await client.post("/classify", json={"input": "good", "instruction": ""})).status_code == 200


async def test_instruction_needs_a_prompt_with_instruct(serving: Serving, make_engine, client) -> None:
    body = {"input": "good", "labels": ["praise", "blame"], "instruction": "Find praise."}
    response = await client.post("/classify", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "instruction")
    engine = make_engine(prompts={"query": "Instruct: Find it.\nQuery: "})
    await classify(serving, engine, **body)
    assert engine.calls[-1][1][-1].prompt == "Instruct: Find praise.\nQuery: "


@cases(__file__, "body", "param")
async def test_token_classifier_takes_input_only(serving, make_engine, body: dict[str, Any], param: str) -> None:
    engine = make_engine("token_classifier", ("x", "y"))
    async with serving(engine) as client:
        response = await client.post("/classify", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert not engine.calls
