"""Unknown keys of bodies: each dialect ignores some; --unknown-fields sets the rule for the others."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from penstock.server.dialects import DIALECTS

from ..tables import cases, table

IGNORED = {dialect.name: set(dialect.ignored_keys) for dialect in DIALECTS}
# [path, body, dialects of the path]
BODIES = table(__file__, "bodies")


async def rejected(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[str | None, str]:
    """Sends a wrong body. Returns the field and the message of the error."""
    response = await client.post(path, json=body)
    answer = response.json()
    is_text = isinstance(answer["error"], str)
    assert response.status_code == (422 if is_text and not path.startswith("/api/") else 400), response.text
    return (answer["param"], answer["error"]) if is_text else (answer["error"]["param"], answer["message"])


def test_every_ignored_key_has_a_reason() -> None:
    assert all(reason.endswith(".") for dialect in DIALECTS for reason in dialect.ignored_keys.values())


@pytest.fixture
async def strict(serving, engine) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(engine, unknown_fields="reject") as client:
        yield client


async def test_unknown_key_is_rejected_unless_the_dialect_ignores_it(strict: httpx.AsyncClient, engine) -> None:
    client = strict
    for path, body, dialects in BODIES:
        ignored = set().union(*(IGNORED[dialect] for dialect in dialects))
        for key in set().union(*IGNORED.values()):
            if key in ignored:
                response = await client.post(path, json={**body, key: "x"})
                assert response.status_code == 200, response.text
            elif not (key == "options" and path.startswith("/api/")):  # a field of Ollama's
                param, message = await rejected(client, path, {**body, key: "x"})
                assert param == key
                assert message.startswith(f"{key} ")
        assert (await client.post(path, json={**body, "unknown_key": None})).status_code == 200  # null means absent
        num_calls = len(engine.calls)
        assert (await rejected(client, path, {**body, "unknown_key": 1}))[0] == "unknown_key"
        assert len(engine.calls) == num_calls


async def test_field_of_another_route_is_rejected_by_name(client: httpx.AsyncClient, engine) -> None:
    for path, body, unfit in table(__file__, "test_field_of_another_route_is_rejected_by_name"):
        (key,) = unfit
        param, message = await rejected(client, path, {**body, **unfit})
        assert param is not None
        assert param.startswith(key)
        assert key in message
    assert not engine.calls


@pytest.mark.parametrize(
    ("kind", "task"), [("sequence_classifier", "classify"), ("token_classifier", "token_classify")]
)
async def test_pooling_rejects_a_prompt_for_classes(serving, make_engine, kind: str, task: str) -> None:
    async with serving(make_engine(kind, ("x", "y"))) as client:
        for field in ("prompt_name", "input_type"):
            param, message = await rejected(client, "/pooling", {"input": "a", field: "query"})
            assert (param, task in message) == (field, True)
        assert (await client.post("/pooling", json={"input": "a", "prompt_name": "", "input_type": None})).is_success


async def test_misspelt_parameter_gets_a_hint(client: httpx.AsyncClient) -> None:
    assert await rejected(client, "/v1/embeddings", {"input": "a", "dimension": 8}) == (
        "dimension",
        "dimension is not known here; did you mean dimensions? Otherwise leave it out.",
    )
    _, message = await rejected(client, "/rerank", {"query": "a", "documents": ["b"], "dimensions": 8})
    assert message.startswith("dimensions has no use here; leave it out. This request takes model, ")
    _, message = await rejected(client, "/v1/embeddings", {"input": "a", "labels": ["x", "y"]})
    assert message.endswith(", ...")


async def test_unknown_key_is_ignored_with_a_warning(client: httpx.AsyncClient, engine, caplog) -> None:
    for path, body, _ in BODIES:
        plain, warned = await client.post(path, json=body), await client.post(path, json={**body, "unknown_key": 1})
        assert "x-ignored-fields" not in plain.headers
        assert (warned.status_code, warned.headers["x-ignored-fields"]) == (200, "unknown_key"), path
    many = {f"{'k' * 36}_{number:03}": 1 for number in range(32)}
    response = await client.post("/v1/embeddings", json={"input": "a", **many})
    assert response.headers["x-ignored-fields"].split(",") == [f"{'k' * 36}_{number:03}" for number in range(32)]
    assert (await rejected(client, "/v1/embeddings", {"input": "a", **many, "one_more": 1}))[0] == next(iter(many))
    assert len(caplog.messages) == 1  # one line a minute
    assert "unknown_key" in caplog.text
    metrics = (await client.get("/metrics")).text
    assert f'penstock_ignored_fields_total{{model="fake-model"}} {float(len(BODIES) + 32)}' in metrics
    assert "unknown_key" not in metrics


async def test_ignored_fields_are_silent_if_the_setting_says_so(serving, engine, caplog) -> None:
    async with serving(engine, unknown_fields="ignore") as client:
        response = await client.post("/v1/embeddings", json={"input": "a", "foo": 1})
        assert response.status_code == 200
        assert "x-ignored-fields" not in response.headers
        assert not caplog.messages
        assert (await rejected(client, "/v1/embeddings", {"input": "a", "dimension": 1}))[0] == "dimension"
        assert "penstock_ignored_fields_total{" not in (await client.get("/metrics")).text


async def test_header_with_ignored_fields_is_ascii_and_short(client: httpx.AsyncClient, caplog) -> None:
    keys = ["a\r\nset-cookie: x", "k" * 10_000, "é\U0001f600", "x,y"]
    response = await client.post("/v1/embeddings", json={"input": "a", **dict.fromkeys(keys, 1)})
    shown = ["a??set-cookie??x", "k" * 40, "??", "x?y"]
    assert response.headers["x-ignored-fields"].split(",") == shown
    assert "set-cookie" not in response.headers
    assert "\n" not in caplog.messages[0]


@cases(__file__, "key", "meant")
async def test_only_misspelt_keys_are_rejected(client: httpx.AsyncClient, key: str, meant: str | None) -> None:
    body = {"input": "a", key: 1}
    if meant is None:
        assert (await client.post("/v1/embeddings", json=body)).headers["x-ignored-fields"] == key
    else:
        param, message = await rejected(client, "/v1/embeddings", body)
        assert (param, f"did you mean {meant}?" in message) == (key, True)


# [path, body with an object that has an unknown key, name of the key in the header]
NESTED = table(__file__, "nested")


@pytest.mark.parametrize(("path", "body", "name"), NESTED)
async def test_unknown_key_of_a_nested_object_is_reported(client, strict, path: str, body: Any, name: str) -> None:
    response = await client.post(path, json=body)
    assert (response.status_code, response.headers.get("x-ignored-fields")) == (200, name), response.text
    assert (await rejected(strict, path, body))[0] == name


async def test_misspelt_key_of_a_nested_object_is_rejected(client: httpx.AsyncClient) -> None:
    body = {"input": [{"text": "a", "txet": "b"}]}
    param, message = await rejected(client, "/v1/embeddings", body)
    assert (param, "did you mean text?" in message) == ("input[].txet", True)
    chat = {"input": [{"role": "user", "content": "a", "name": "b"}]}
    assert "x-ignored-fields" not in (await client.post("/v1/embeddings", json=chat)).headers


async def test_many_long_keys_make_a_short_message(client: httpx.AsyncClient) -> None:
    body = {"input": "a", **{"k" * 10_000 + str(i): 1 for i in range(1000)}}
    param, message = await rejected(client, "/v1/embeddings", body)
    assert len(param) < 100
    assert len(message) < 1500
    assert "is one of 1000 unknown fields, of which at most 32 are ignored; leave them out" in message
