"""POST /classify: vLLM's `input`, Infinity's and Cohere's `inputs`, by a classifier or by an embedding model."""

import httpx
import pytest

from penstock.engine.protocol.model_info import Activation
from penstock.engine.protocol.tasks import PoolingTask

EXAMPLES = [{"text": "where is it", "label": "shipping"}, {"text": "money back", "label": "refund"}]


@pytest.fixture
async def classifier(serving, make_engine):
    async with serving(make_engine("sequence_classifier", ("negative", "positive"))) as client:
        yield client


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
@pytest.mark.parametrize("texts", ["good", ["good", "bad"], [[5, 6], [7]]])
async def test_vllm_answer_of_a_classifier(classifier: httpx.AsyncClient, path: str, texts: object) -> None:
    answer = (await classifier.post(path, json={"model": "alias", "input": texts})).json()
    assert (answer["object"], answer["model"]) == ("list", "alias")
    assert len(answer["data"]) == (1 if isinstance(texts, str) else len(texts))
    for i, row in enumerate(answer["data"]):
        assert (row["index"], row["num_classes"]) == (i, 2)
        assert row["label"] == ["negative", "positive"][row["probs"].index(max(row["probs"]))]
        assert sum(row["probs"]) == pytest.approx(1)
    assert answer["usage"]["prompt_tokens"] > 0


def check_cohere_answer(answer: dict, texts: list[str], labels: list[str]) -> None:
    """Checks the fields that the Cohere SDKs read."""
    assert isinstance(answer["id"], str)
    assert answer["meta"]["billed_units"] == {"classifications": len(texts)}
    assert [item["input"] for item in answer["classifications"]] == texts
    for item in answer["classifications"]:
        assert isinstance(item["id"], str)
        assert item["prediction"] in labels
        assert item["predictions"][0] == item["prediction"]
        assert item["confidence"] == item["confidences"][0] == item["labels"][item["prediction"]]["confidence"]
        assert list(item["labels"]) == labels


async def test_cohere_answer_of_a_classifier(classifier: httpx.AsyncClient) -> None:
    body = {"inputs": ["good", "bad"], "model": "alias", "examples": None, "preset": None, "truncate": None}
    answer = (await classifier.post("/v1/classify", json=body)).json()
    check_cohere_answer(answer, ["good", "bad"], ["negative", "positive"])
    assert answer["classifications"][0]["classification_type"] == "single-label"


@pytest.mark.parametrize("raw_scores", [False, True])
async def test_infinity_answer_of_a_classifier(serving, make_engine, raw_scores: bool) -> None:
    """What infinity_client sends where its caller names no model, and all that its strict parser needs."""
    engine = make_engine("sequence_classifier", ("negative", "positive"))
    body = {"input": ["good", "word " * 100], "model": "default/not-specified", "raw_scores": raw_scores}
    async with serving(engine) as classifier:
        answer = (await classifier.post("/classify", json=body)).json()
    assert set(answer) == {"id", "object", "created", "model", "data", "usage"}
    assert (answer["object"], answer["model"]) == ("classify", "fake-model")
    assert (type(answer["id"]), type(answer["created"])) == (str, int)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    for row in answer["data"]:
        assert all(set(entry) == {"score", "label"} for entry in row)
        assert {entry["label"] for entry in row} == {"negative", "positive"}
        assert row[0]["score"] >= row[1]["score"]
    params = engine.calls[-1][1][1]
    assert (params.use_activation, params.truncate_prompt_tokens) == (not raw_scores, -1)


async def test_cohere_answer_of_a_multi_label_classifier(serving, make_engine) -> None:
    engine = make_engine("sequence_classifier", ("a", "b", "c"), activation=Activation.SIGMOID)
    async with serving(engine) as client:
        answer = (await client.post("/v1/classify", json={"inputs": ["good"]})).json()
    check_cohere_answer(answer, ["good"], ["a", "b", "c"])
    assert answer["classifications"][0]["classification_type"] == "multi-label"


async def test_cohere_examples_with_an_embedding_model(client: httpx.AsyncClient, engine) -> None:
    body = {"inputs": ["hello", "you"], "examples": EXAMPLES, "model": "alias"}
    answer = (await client.post("/v1/classify", json=body)).json()
    check_cohere_answer(answer, ["hello", "you"], ["shipping", "refund"])
    name, (texts, examples, params, _) = engine.calls[-1]
    assert (name, texts) == ("few_shot", ["hello", "you"])
    assert examples == [("where is it", "shipping"), ("money back", "refund")]
    assert params.truncate_prompt_tokens == -1


@pytest.mark.parametrize(
    ("truncate", "expected"),
    [(None, (-1, "right")), ("END", (-1, "right")), ("START", (-1, "left")), ("NONE", (None, None))],
)
async def test_cohere_truncate(classifier: httpx.AsyncClient, client, engine, truncate, expected) -> None:
    await client.post("/v1/classify", json={"inputs": ["a"], "examples": EXAMPLES, "truncate": truncate})
    params = engine.calls[-1][1][2]
    assert (params.truncate_prompt_tokens, params.truncation_side) == expected


async def test_zero_shot_with_an_embedding_model(client: httpx.AsyncClient, engine) -> None:
    answer = (await client.post("/classify", json={"input": ["hello"], "labels": ["praise", "complaint"]})).json()
    row = answer["data"][0]
    assert row["label"] in ("praise", "complaint")
    assert row["num_classes"] == 2
    assert engine.calls[-1][0] == "zero_shot"


async def test_the_default_prompt_reaches_embedding_models_only(serving, engine, make_engine) -> None:
    async with serving(engine, default_prompt_name="query") as client:
        await client.post("/classify", json={"input": ["a"], "labels": ["b", "c"]})
        assert engine.calls[-1][1][-1].prompt_name == "query"
        await client.post("/score", json={"text_1": "a", "text_2": "b"})
        assert engine.calls[-1][1][-1].prompt_name is None
    classifier = make_engine("sequence_classifier", ("a", "b"))
    async with serving(classifier, default_prompt_name="query") as client:
        await client.post("/classify", json={"input": ["a"]})
        assert classifier.calls[-1][1][-1].prompt_name is None


async def test_token_classifier_answers_per_token(serving, make_engine) -> None:
    async with serving(make_engine("token_classifier", ("O", "B-PER", "I-PER"))) as client:
        answer = (await client.post("/classify", json={"input": ["Ann met Bob", "x"]})).json()
        assert answer["labels"] == ["O", "B-PER", "I-PER"]
        assert [len(row["tokens"]) for row in answer["data"]] == [5, 3]
        for row in answer["data"]:
            for token in row["tokens"]:
                assert token["token"] == f"t{token['token_id']}"
                assert token["label"] == answer["labels"][token["token_id"] % 3]
                assert token["score"] == max(token["probs"]) == 1.0
        response = await client.post("/classify", json={"inputs": ["a"]})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "inputs"


async def test_an_answer_per_token_has_a_limit(serving, make_engine, monkeypatch) -> None:
    async with serving(make_engine("token_classifier", ("O", "B-PER", "I-PER"))) as client:
        for limit, value in (("calls.sizes.MAX_DECODED_IDS", 4), ("admission.MAX_RESPONSE_BYTES", 14)):
            with monkeypatch.context() as patch:
                patch.setattr(f"penstock.server.{limit}", value)
                response = await client.post("/classify", json={"input": ["Ann met Bob"]})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "input")
            assert f"the limit is {value}" in response.json()["message"]


WRONG_BODIES = [
    ("neither", {"labels": ["a", "b"]}, "input", "neither"),
    ("both", {"input": "a", "inputs": ["b"]}, "input", "both"),
    ("no classes", {"input": "a"}, "labels", "no classes of its own"),
    ("empty inputs", {"inputs": []}, "inputs", "empty list"),
    ("example without label", {"inputs": ["a"], "examples": [{"text": "b"}]}, "examples", "examples[0].label"),
    (
        "two kinds",
        {"input": "a", "labels": ["b", "c"], "examples": EXAMPLES},
        "labels",
        "examples (few-shot), not both",
    ),
    (
        "too many scores of labels",
        {"input": ["a"] * 1001, "labels": [f"l{i}" for i in range(1000)]},
        "labels",
        "1001 inputs with 1000 classes in labels",
    ),
    (
        "too many scores of examples",
        {"inputs": ["a"] * 1001, "examples": [{"text": "t", "label": f"l{i}"} for i in range(1000)]},
        "examples",
        "1001 inputs with 1000 classes in examples",
    ),
    ("labels as text", {"input": "a", "labels": "b"}, "labels", "'b'"),
]


@pytest.mark.parametrize(
    ("body", "param", "part"), [case[1:] for case in WRONG_BODIES], ids=[case[0] for case in WRONG_BODIES]
)
async def test_wrong_bodies(client: httpx.AsyncClient, body: dict, param: str, part: str) -> None:
    response = await client.post("/classify", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert part in response.json()["message"]


async def test_a_reranker_with_a_prompt_of_its_own_sends_single_texts_elsewhere(serving, make_engine) -> None:
    engine = make_engine("cross_encoder", ("yes",), tasks=(PoolingTask.SCORE,), embedding_size=0)
    async with serving(engine) as client:
        for body, param in (({"input": "a"}, "input"), ({"inputs": ["a"]}, "inputs")):
            response = await client.post("/classify", json=body)
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["code"], error["param"]) == ("unsupported_task", param)
            assert "/rerank" in error["message"]
            assert "/score" in error["message"]
        response = await client.post("/pooling", json={"input": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_task")
        assert (await client.post("/rerank", json={"query": "a", "documents": ["a"]})).status_code == 200
    assert [name for name, _ in engine.calls] == ["score"]


@pytest.mark.parametrize("kind", ["sequence_classifier", "cross_encoder", "token_classifier"])
async def test_an_instruction_is_not_silently_ignored(serving, make_engine, kind: str) -> None:
    async with serving(make_engine(kind, ("a", "b"))) as client:
        response = await client.post("/classify", json={"input": "good", "instruction": "Find praise."})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "instruction"
        assert (await client.post("/classify", json={"input": "good", "instruction": ""})).status_code == 200


async def test_an_instruction_stands_in_the_prompt_of_an_embedding_model(serving, make_engine, client) -> None:
    body = {"input": "good", "labels": ["praise", "blame"], "instruction": "Find praise."}
    response = await client.post("/classify", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "instruction")
    engine = make_engine(prompts={"query": "Instruct: Find it.\nQuery: "})
    async with serving(engine) as instructed:
        assert (await instructed.post("/classify", json=body)).status_code == 200
    (call,) = engine.calls
    assert call[1][-1].prompt == "Instruct: Find praise.\nQuery: "


@pytest.mark.parametrize(
    ("kind", "body", "call"),
    [
        ("sequence_classifier", {"input": "a"}, "classify"),
        ("sequence_classifier", {"inputs": ["a"]}, "classify"),
        ("embedding", {"input": "a", "labels": ["x", "y"]}, "zero_shot"),
        ("embedding", {"inputs": ["a"], "labels": ["x", "y"]}, "zero_shot"),
        ("embedding", {"input": "a", "examples": EXAMPLES}, "few_shot"),
        ("embedding", {"inputs": ["a"], "examples": EXAMPLES}, "few_shot"),
        ("token_classifier", {"input": "a"}, "token_classify"),
    ],
)
async def test_each_form_makes_one_engine_call(serving, make_engine, kind: str, body: dict, call: str) -> None:
    engine = make_engine(kind, ("x", "y") if "classifier" in kind else ())
    async with serving(engine) as client:
        response = await client.post("/classify", json=body)
    assert response.status_code == 200, response.text
    assert [name for name, _ in engine.calls] == [call]


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        ("embedding", {"input": "a"}, "labels"),
        ("embedding", {"inputs": ["a"]}, "labels"),
        ("embedding", {"input": "a", "labels": ["x", "y"], "examples": EXAMPLES}, "labels"),
        ("token_classifier", {"input": "a", "labels": ["x", "y"]}, "input"),
    ],
)
async def test_forms_the_model_cannot_answer_are_refused(
    serving, make_engine, kind: str, body: dict, param: str
) -> None:
    engine = make_engine(kind, () if kind == "embedding" else ("x", "y"))
    async with serving(engine) as client:
        response = await client.post("/classify", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert not engine.calls


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("labels", [("x",), ("x", "y")])
async def test_several_labels_with_sigmoid_are_multi_label(serving, make_engine, activation, labels) -> None:
    engine = make_engine("sequence_classifier", labels, activation=activation)
    async with serving(engine) as client:
        answer = (await client.post("/classify", json={"inputs": ["a"]})).json()
    is_multi = activation is Activation.SIGMOID and len(labels) > 1
    assert answer["classifications"][0]["classification_type"] == ("multi-label" if is_multi else "single-label")
