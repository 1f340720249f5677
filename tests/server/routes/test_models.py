"""The list of models, their cards, and their loading and unloading with the admin key."""

from pathlib import Path
from typing import Any

import pytest

from penstock.engine.protocol.multi_vector import MultiVector, SparseKind, SparsePooling
from penstock.server.settings import UsageError

from ...engine.model_infos import make_info
from ...tables import table
from ..fake_engine import FakeEngine, Serving


async def test_list_has_a_card_for_each_model(serving: Serving, engine: FakeEngine) -> None:
    async with serving(engine, ("owner/name", "alias"), default_prompt_name="query") as client:
        answer = (await client.get("/v1/models")).json()
        for path in ("/models", "/v1/models/"):
            assert (await client.get(path)).json() == answer
        for name in ("owner/name", "alias"):
            card = (await client.get(f"/v1/models/{name}")).json()
            assert (card["id"], card["name"], len(card["aliases"])) == (name, name, 1)
            named = {field: card[field] for field in ("id", "name", "aliases")}
            assert card == {**answer["data"][0], **named}
        response = await client.get("/v1/models/owner/other")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    created = answer["data"][0]["created"]
    assert type(created) is int
    # The card has no tokenizer_url, which the Cohere client would download.
    card = {**table(__file__, "test_list_has_a_card_for_each_model"), "created": created}
    assert answer == {"object": "list", "data": [card], "models": [card]}


@pytest.mark.parametrize(
    ("arguments", "fields", "expected"),
    [
        (("sequence_classifier", ("a", "b")), {"embedding_size": 0}, {"outputs": [], "num_labels": 2}),
        ((), {"sparse": SparsePooling(kind=SparseKind.TOKEN_WEIGHTS)}, {"outputs": ["dense", "sparse"]}),
        ((), {"multi_vector": MultiVector()}, {"outputs": ["dense", "multi_vector"]}),
        ((), {"default_prompt_name": "query"}, {"default_prompt_name": "query"}),
        ((), {"image": make_info()}, {"modalities": ["text", "image"]}),
    ],
)
async def test_card_has_facts_of_the_model(serving, make_engine, arguments, fields, expected: dict[str, Any]) -> None:
    async with serving(make_engine(*arguments, **fields)) as client:
        facts = (await client.get("/v1/models/alias")).json()["facts"]
    assert {name: facts[name] for name in expected} == expected


async def test_without_admin_key_models_cannot_be_unloaded(serving: Serving, engine: FakeEngine) -> None:
    async with serving(engine) as client:
        for path in ("/models/load", "/models/unload"):
            response = await client.post(path, json={"model": "alias"})
            assert (response.status_code, "--admin-key" in response.text) == (404, True)


async def test_key_of_the_admin_key_file_is_accepted(serving: Serving, engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# who may load models\nadmin\n")
    async with serving(engine, admin_key_file=tmp_path / "keys") as client:
        for key, status in (("wrong", 401), ("admin", 200)):
            headers = {"authorization": f"Bearer {key}"}
            response = await client.post("/models/unload", json={"model": "alias"}, headers=headers)
            assert response.status_code == status
    with pytest.raises(UsageError, match=r"^--admin-key-file: .*No such file"):
        async with serving(engine, admin_key_file=tmp_path / "none"):
            pass


@pytest.mark.parametrize("api_key", [None, "data"])
async def test_admin_key_loads_and_unloads_models(serving, engine: FakeEngine, api_key: str | None) -> None:
    keys = {"api_key": api_key} if api_key else {}
    async with serving(engine, admin_key="admin", **keys) as client:
        for key in (None, "data", "wrong"):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            rejected = await client.post("/models/unload", json={"model": "alias"}, headers=headers)
            assert rejected.status_code == 401
            assert rejected.json()["error"]["message"].startswith("The admin key is missing or wrong")
        as_admin = {"authorization": "Bearer admin"}
        embedded = await client.post("/v1/embeddings", json={"input": "a"}, headers=as_admin)
        assert embedded.status_code == (401 if api_key else 200)
        card = (await client.post("/models/unload", json={"model": "alias"}, headers=as_admin)).json()
        assert card["status"] == {"value": "unloaded", "state": "unloaded"}
        assert engine.is_closed
        unknown = await client.post("/models/load", json={"model": "other"}, headers=as_admin)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        card = (await client.post("/models/load", json={"model": "alias"}, headers=as_admin)).json()
        assert card["status"]["value"] == "loaded"
