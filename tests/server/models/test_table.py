"""Which model a request names, and that it keeps it until its answer is known."""

import asyncio
from functools import partial

import httpx
import pytest

from penstock.engine.protocol.errors import EngineUnavailableError
from penstock.server.app import create_app
from penstock.server.models.served_model import ServedModel
from penstock.server.settings import ServerSettings


async def started(engine):
    return engine


def client_of(app) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_a_model_is_loaded_when_a_request_names_it(make_engine) -> None:
    lazy = make_engine(name="two")
    models = [
        ServedModel(("one",), partial(started, make_engine(name="one"))),
        ServedModel(("two", "zwei"), partial(started, lazy), info=lazy.info, is_preloaded=False),
        ServedModel(("three",), partial(started, make_engine(name="three")), is_preloaded=False),
    ]
    app = create_app(models, ServerSettings())
    async with app.router.lifespan_context(app), client_of(app) as client:
        await app.state.startup.wait()
        ready = await client.get("/health/ready")
        assert (ready.status_code, ready.json()["engines"]["two"]) == (200, "unloaded")
        cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
        assert [cards[name]["status"]["value"] for name in ("one", "two", "three")] == [
            "loaded",
            "unloaded",
            "unloaded",
        ]
        assert cards["two"]["facts"]["kind"] == "embedding"  # known from its files
        assert (cards["three"]["facts"], cards["three"]["max_model_len"]) == (None, None)
        assert (await client.post("/api/show", json={"model": "three"})).status_code == 503
        answer = await client.post("/v1/embeddings", json={"input": "a", "model": "zwei"})
        assert (answer.status_code, answer.json()["model"]) == (200, "zwei")
        assert (await client.get("/health")).json()["engines"] == {"one": "ready", "two": "ready", "three": "unloaded"}
        assert [row["name"] for row in (await client.get("/api/ps")).json()["models"]] == ["one", "two"]
        metrics = (await client.get("/metrics")).text
        assert 'penstock_model_loaded{model="two"} 1.0' in metrics
        assert 'penstock_model_loads_total{model="three"} 0.0' in metrics
        assert 'penstock_http_requests_total{model="two",route="/v1/embeddings",status="200"} 1.0' in metrics


async def test_nothing_is_loaded_because_a_client_names_it(make_engine) -> None:
    app = create_app([ServedModel(("one",), partial(started, make_engine()))], ServerSettings())
    async with app.router.lifespan_context(app), client_of(app) as client:
        await app.state.startup.wait()
        answer = await client.post("/v1/embeddings", json={"input": "a", "model": "some/hub-id"})
    assert answer.status_code == 404


@pytest.mark.parametrize("fails", [False, True])
async def test_a_request_holds_its_model_until_its_answer_is_known(make_engine, fails: bool) -> None:
    engine = make_engine()
    app = create_app([ServedModel(("one",), partial(started, engine))], ServerSettings())
    async with app.router.lifespan_context(app), client_of(app) as client:
        await app.state.startup.wait()
        entry = app.state.context.models.entry(None)
        engine.gate, engine.failure = asyncio.Event(), EngineUnavailableError("down") if fails else None
        asked = asyncio.create_task(client.post("/v1/embeddings", json={"input": "a"}))
        await engine.entered.wait()
        assert entry.num_in_use == (0 if fails and asked.done() else 1)
        engine.gate.set()
        assert (await asked).status_code == (503 if fails else 200)
        assert entry.num_in_use == 0
        for body in ({"input": 3}, {"input": "a", "model": "other"}, {"input": "a", "dimensions": 10_000}):
            assert (await client.post("/v1/embeddings", json=body)).status_code in (400, 404)
        assert entry.num_in_use == 0


async def test_a_request_that_waits_for_its_model_keeps_its_deadline(make_engine) -> None:
    may_load = asyncio.Event()

    async def start():
        await may_load.wait()
        return make_engine(name="two")

    models = [
        ServedModel(("one",), partial(started, make_engine(name="one"))),
        ServedModel(("two",), start, is_preloaded=False),
    ]
    body, hurried = {"input": "a", "model": "two"}, {"x-request-timeout": "0.05"}
    app = create_app(models, ServerSettings(load_wait_s=0.05))
    async with app.router.lifespan_context(app), client_of(app) as client:
        await app.state.startup.wait()
        waited = await client.post("/v1/embeddings", json=body)
        assert (waited.status_code, waited.headers["retry-after"]) == (503, "1")
    app = create_app(models, ServerSettings(load_wait_s=300.0))
    async with app.router.lifespan_context(app), client_of(app) as client:
        await app.state.startup.wait()
        assert (await client.post("/v1/embeddings", json=body, headers=hurried)).status_code == 408
        assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200  # the other model answers
        may_load.set()
        assert (await client.post("/v1/embeddings", json=body)).status_code == 200


async def test_the_settings_of_a_model_are_its_own(make_engine) -> None:
    models = [
        ServedModel(("one",), partial(started, make_engine(name="one")), "query"),
        ServedModel(("two",), partial(started, make_engine(name="two"))),
    ]
    app = create_app(models, ServerSettings())
    async with app.router.lifespan_context(app), client_of(app) as client:
        await app.state.startup.wait()
        cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
    assert [cards[name]["facts"]["default_prompt_name"] for name in ("one", "two")] == ["query", None]


async def test_a_request_without_a_name_goes_to_the_first_model_that_was_made_for_it(make_engine) -> None:
    kinds = {"e": "embedding", "c": "sequence_classifier", "f": "embedding", "r": "cross_encoder"}
    engines = {name: make_engine(kind, ("x", "y"), name=name) for name, kind in kinds.items()}
    models = [ServedModel((name,), partial(started, engine), info=engine.info) for name, engine in engines.items()]
    app = create_app(models, ServerSettings())
    async with app.router.lifespan_context(app), client_of(app) as client:
        await app.state.startup.wait()
        for path, body, expected in (
            ("/v1/embeddings", {"input": "a"}, "e"),
            ("/v1/embeddings", {"input": "a", "model": "f"}, "f"),
            ("/embed", {"inputs": "a"}, "e"),
            ("/rerank", {"query": "a", "documents": ["b"]}, "r"),
            ("/rerank", {"query": "a", "texts": ["b"]}, "r"),
            ("/rerank", {"query": "a", "documents": ["b"], "model": "e"}, "e"),
            ("/score", {"text_1": "a", "text_2": "b"}, "r"),
            ("/classify", {"input": "a"}, "c"),
            ("/classify", {"input": "a", "labels": ["x", "y"]}, "e"),
            ("/predict", {"inputs": "a"}, "c"),
            ("/invocations", {"input": "a", "model": "c"}, "c"),
        ):
            for engine in engines.values():
                engine.calls.clear()
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert [name for name, engine in engines.items() if engine.calls] == [expected], path


async def test_a_path_with_a_line_end_is_no_other_path(make_engine) -> None:
    app = create_app([ServedModel(("one",), partial(started, make_engine()))], ServerSettings(admin_key=("admin",)))
    async with app.router.lifespan_context(app), client_of(app) as client:
        await app.state.startup.wait()
        for path, body in (("/models/unload", {"model": "one"}), ("/v1/embeddings", {"input": "a"})):
            answer = await client.post(f"{path}%0A", json=body)
            assert answer.status_code in (404, 405), path
        entry = app.state.context.models.entry(None)
        assert (entry.state, entry.num_in_use) == ("ready", 0)


async def test_keep_alive_without_a_name_is_for_the_model_that_answers(make_engine) -> None:
    reranker, embedder = make_engine("cross_encoder", ("x",), name="r"), make_engine(name="e")
    models = [
        ServedModel(("r",), partial(started, reranker), info=reranker.info, ttl_s=60.0),
        ServedModel(("e",), partial(started, embedder), info=embedder.info, ttl_s=60.0),
    ]
    app = create_app(models, ServerSettings())
    async with app.router.lifespan_context(app), client_of(app) as client:
        await app.state.startup.wait()
        assert (await client.post("/api/embed", json={"input": "a", "keep_alive": 7})).status_code == 200
        assert [entry.ttl_s for entry in app.state.context.models.entries] == [60.0, 7.0]


async def test_path_of_a_model_is_accepted_and_not_shown(make_engine) -> None:
    names, hidden = ("one", "/srv/models/one", "alias"), frozenset({"/srv/models/one"})
    model = ServedModel(names, partial(started, make_engine(name="one")), hidden_names=hidden)
    app = create_app([model], ServerSettings())
    async with app.router.lifespan_context(app), client_of(app) as client:
        await app.state.startup.wait()
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["aliases"]) == ("one", ["alias"])
        unknown = [
            await client.post(path, json={"input": "a", "model": "two"}) for path in ("/v1/embeddings", "/api/embed")
        ]
        lists = [await client.get(path) for path in ("/api/tags", "/openapi.json", "/v1/models")]
        assert [answer.status_code for answer in unknown] == [404, 404]
        assert not any("/srv/models" in answer.text for answer in (*unknown, *lists))
        assert unknown[0].json()["message"] == "The model 'two' does not exist; this server has one."
        answer = await client.post("/v1/embeddings", json={"input": "a", "model": "/srv/models/one"})
        assert answer.status_code == 200
