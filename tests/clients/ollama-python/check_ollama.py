"""ollama (PyPI): embeddings and models under /api, and errors of generation."""

import plain_http as http
import pytest
from ollama import Client, ResponseError
from plain_http import KEY, MODEL, PROTECTED_URL, TEXTS, TOO_LONG, URL, assert_close

client = Client(host=URL)
CHAT = [{"role": "user", "content": "Why?"}]


@pytest.mark.parametrize(
    ("texts", "options"),
    [
        (TEXTS, {}),
        (TEXTS[0], {"model": f"{MODEL}:latest", "keep_alive": "10m", "options": {"num_ctx": 256}}),
        (TEXTS, {"dimensions": http.WIDTH}),
        (http.MANY[:256], {}),
    ],
    ids=["texts", "tag and options", "dimensions", "many"],
)
def test_embeddings_equal_plain_http(texts, options):
    answer = client.embed(**{"model": MODEL, "input": texts, **options})
    assert_close([list(row) for row in answer.embeddings], http.embed(texts))
    assert answer.prompt_eval_count > 0
    assert answer.total_duration > 0


def test_older_call_returns_a_raw_vector():
    answer = client.embeddings(model=MODEL, prompt=TEXTS[0])
    length = sum(x * x for x in answer.embedding) ** 0.5
    assert_close([[x / length for x in answer.embedding]], http.embed(TEXTS[:1]))


def test_models_are_described():
    (model,) = [model for model in client.list().models if model.model == MODEL]
    assert model.size > 0
    assert model.modified_at.year >= 2020
    assert model.details.family == "bert"
    (loaded,) = client.ps().models
    assert loaded.model.endswith(MODEL)
    shown = client.show(MODEL)
    assert shown.capabilities == ["embedding"]
    assert shown.modelinfo["bert.embedding_length"] == http.WIDTH
    assert client.pull(MODEL).status == "success"
    assert [step.status for step in client.pull(MODEL, stream=True)] == ["success"]


@pytest.mark.parametrize(
    ("call", "status", "part"),
    [
        (lambda: client.embed(model=MODEL, input="a", dimensions=100), 400, "dimensions is 100"),
        (lambda: client.embed(model=MODEL, input=TOO_LONG, truncate=False), 400, "maximum context length"),
        (lambda: client.embed(model="unknown", input="a"), 404, "'unknown' does not exist"),
        (lambda: client.pull("unknown"), 404, "'unknown' does not exist"),
        (lambda: client.generate(model=MODEL, prompt="Why?"), 400, "writes none"),
        (lambda: client.chat(model=MODEL, messages=CHAT), 400, "writes none"),
        (lambda: Client(host=PROTECTED_URL).embed(model=MODEL, input="a"), 401, "key"),
    ],
)
def test_errors_have_status_and_message(call, status, part):
    with pytest.raises(ResponseError, match=part) as caught:
        call()
    assert caught.value.status_code == status


def test_long_text_is_cut():
    assert len(client.embed(model=MODEL, input=TOO_LONG).embeddings) == 1


def test_api_key_is_accepted():
    protected = Client(host=PROTECTED_URL, headers={"Authorization": f"Bearer {KEY}"})
    assert len(protected.embed(model=MODEL, input="a").embeddings) == 1
