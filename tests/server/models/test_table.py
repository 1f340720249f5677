"""Which model serves a request, over the real application and fake engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from penstock.engine.protocol.errors import EngineUnavailableError
from penstock.engine.protocol.model_info import AdapterSpec
from penstock.server.app import create_app
from penstock.server.models.served_model import ServedModel
from penstock.server.settings import ServerSettings

from ...tables import cases, table
from ..fake_engine import client_of


def served(engine: Any, *names: str, **more: Any) -> ServedModel:
    async def start() -> Any:
        return engine

    return ServedModel(names or (engine.info.name,), start, **more)


@asynccontextmanager
async def serving(*models: ServedModel, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, FastAPI]]:
    app = create_app(list(models), ServerSettings(**settings))
    async with client_of(app) as client:
        await app.state.context.models.manager.wait_until_started()
        yield client, app


async def test_request_loads_the_model_that_it_names(make_engine) -> None:
    lazy = make_engine(name="two")
    models = [
        served(make_engine(name="one")),
        served(lazy, "two", "zwei", info=lazy.info, is_preloaded=False),
        served(make_engine(name="three"), is_preloaded=False),
    ]
    async with serving(*models) as (client, _):
        ready = await client.get("/health/ready")
        assert (ready.status_code, ready.json()["engines"]["two"]) == (200, "unloaded")
        cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
        statuses = [cards[name]["status"]["value"] for name in ("one", "two", "three")]
        assert statuses == ["loaded", "unloaded", "unloaded"]
        assert cards["two"]["facts"]["kind"] == "embedding"  # from its files
        assert (cards["three"]["facts"], cards["three"]["max_model_len"]) == (None, None)
        assert (await client.post("/api/show", json={"model": "three"})).status_code == 503
        response = await client.post("/v1/embeddings", json={"input": "a", "model": "zwei"})
        assert (response.status_code, response.json()["model"]) == (200, "zwei")
        assert (await client.get("/health")).json()["engines"] == {"one": "ready", "two": "ready", "three": "unloaded"}
        assert [row["name"] for row in (await client.get("/api/ps")).json()["models"]] == ["one", "two"]
        metrics = (await client.get("/metrics")).text
        assert 'penstock_model_loaded{model="two"} 1.0' in metrics
        assert 'penstock_model_loads_total{model="three"} 0.0' in metrics
        assert 'penstock_http_requests_total{model="two",route="/v1/embeddings",status="200"} 1.0' in metrics


@pytest.mark.parametrize("is_loaded", [True, False])
async def test_name_of_an_adapter_selects_its_model(make_engine, is_loaded: bool) -> None:
    adapters = (AdapterSpec(name="legal", folder="legal"), AdapterSpec(name="unread"))
    engine = make_engine(name="one", adapters=adapters)
    models = [served(make_engine(name="two")), served(engine, "one", "eins", info=engine.info, is_preloaded=is_loaded)]
    async with serving(*models) as (client, _):
        cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
        assert {name: card["parent"] for name, card in cards.items()} == {"two": None, "one": None, "one:legal": "one"}
        assert cards["one:legal"]["aliases"] == ["eins:legal"]
        assert (await client.get("/v1/models/eins:legal")).json()["parent"] == "eins"
        for body in ({"model": "eins:legal"}, {"model": "eins", "lora_path": "legal"}):
            response = await client.post("/v1/embeddings", json={"input": "a", **body})
            assert (response.status_code, response.json()["model"]) == (200, "eins:legal")
            assert engine.calls[-1][1][2].adapter == "legal"
        for name, message in table(__file__, "test_name_of_an_adapter_selects_its_model"):
            response = await client.post("/v1/embeddings", json={"input": "a", "model": name})
            assert (response.status_code, response.json()["error"]["message"]) == (404, message)
        body = {"input": "a", "model": "one:legal", "lora_path": "legal"}
        assert (await client.post("/v1/embeddings", json=body)).json()["model"] == "one:legal"
        response = await client.post("/v1/embeddings", json={**body, "lora_path": "unread"})
        assert response.status_code == 400
        assert "two LoRA adapters of one, 'legal' and 'unread'" in response.json()["message"]
        response = await client.post("/v1/embeddings", json={"input": "a", "lora_path": "legal"})
        assert response.status_code == 404, "the first model has no adapter"


@pytest.mark.parametrize("fails", [False, True])
async def test_request_holds_its_model_until_its_response(make_engine, monkeypatch, fails: bool) -> None:
    engine = make_engine()
    async with serving(served(engine)) as (client, app):
        entry = app.state.context.models.entry(None)
        in_use: list[int] = []

        async def slow_client(scope: Any, receive: Any, send: Any) -> None:
            async def slow_send(message: Any) -> None:
                in_use.append(entry.num_requests)
                await send(message)

            await app(scope, receive, slow_send)

        monkeypatch.setattr(client._transport, "app", slow_client)
        engine.gate, engine.failure = asyncio.Event(), EngineUnavailableError("down") if fails else None
        request = asyncio.create_task(client.post("/v1/embeddings", json={"input": "a"}))
        await engine.entered.wait()
        assert entry.num_requests == (0 if fails and request.done() else 1)
        engine.gate.set()
        assert (await request).status_code == (503 if fails else 200)
        assert set(in_use) == {0}, "the client may read the response slowly"
        for body in ({"input": 3}, {"input": "a", "model": "other"}, {"input": "a", "dimensions": 10_000}):
            assert (await client.post("/v1/embeddings", json=body)).status_code in (400, 404)
        assert entry.num_requests == 0


@cases(__file__, "path", "body")
async def test_invalid_body_loads_no_model(make_engine, path: str, body: dict[str, Any]) -> None:
    models = [served(make_engine(name="one")), served(make_engine(name="two"), is_preloaded=False)]
    async with serving(*models, max_loaded_models=1, max_inputs_per_request=4) as (client, app):
        response = await client.post(path, json={"model": "two", **body})
        assert 400 <= response.status_code < 500
        entries = app.state.context.models.entries
        assert [(entry.state, entry.num_loads) for entry in entries] == [("ready", 1), ("unloaded", 0)]


async def test_request_that_waits_for_its_model_has_a_deadline(make_engine) -> None:
    may_load = asyncio.Event()

    async def start() -> Any:
        await may_load.wait()
        return make_engine(name="two")

    models = [served(make_engine(name="one")), ServedModel(("two",), start, is_preloaded=False)]
    body = {"input": "a", "model": "two"}
    async with serving(*models, load_wait_s=0.05) as (client, _):
        response = await client.post("/v1/embeddings", json=body)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    async with serving(*models, load_wait_s=300.0) as (client, _):
        response = await client.post("/v1/embeddings", json=body, headers={"x-request-timeout": "0.05"})
        assert response.status_code == 408
        assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200  # the other model
        may_load.set()
        assert (await client.post("/v1/embeddings", json=body)).status_code == 200


async def test_request_without_a_name_goes_to_a_suitable_model(make_engine) -> None:
    kinds = {"e": "embedding", "c": "sequence_classifier", "f": "embedding", "r": "cross_encoder"}
    engines = {name: make_engine(kind, ("x", "y"), name=name) for name, kind in kinds.items()}
    async with serving(*(served(engine, info=engine.info) for engine in engines.values())) as (client, _):
        for path, body, expected in table(__file__, "test_request_without_a_name_goes_to_a_suitable_model"):
            for engine in engines.values():
                engine.calls.clear()
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            assert [name for name, engine in engines.items() if engine.calls] == [expected], path


async def test_keep_alive_applies_to_the_model_that_answers(make_engine) -> None:
    engines = make_engine("cross_encoder", ("x",), name="r"), make_engine(name="e")
    async with serving(*(served(engine, info=engine.info, ttl_s=60.0) for engine in engines)) as (client, app):
        assert (await client.post("/api/embed", json={"input": "a", "keep_alive": 7})).status_code == 200
        assert [entry.ttl_s for entry in app.state.context.models.entries] == [60.0, 7.0]


async def test_hidden_path_of_a_model_is_accepted_but_not_shown(make_engine) -> None:
    path = "/srv/models/one"
    async with serving(served(make_engine(), "one", path, "alias", hidden_names=frozenset({path}))) as (client, _):
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["aliases"]) == ("one", ["alias"])
        unknown = [
            await client.post(route, json={"input": "a", "model": "two"}) for route in ("/v1/embeddings", "/api/embed")
        ]
        lists = [await client.get(route) for route in ("/api/tags", "/openapi.json", "/v1/models")]
        assert [response.status_code for response in unknown] == [404, 404]
        assert not any("/srv/models" in response.text for response in (*unknown, *lists))
        assert unknown[0].json()["message"] == "The model 'two' does not exist; this server has one."
        assert (await client.post("/v1/embeddings", json={"input": "a", "model": path})).status_code == 200
