"""Ollama's routes with the bodies of its clients."""

import asyncio
import json
import math
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import httpx
import numpy as np
import pytest

from penstock.server.app import create_app
from penstock.server.models import weight_files
from penstock.server.models.served_model import ServedModel
from penstock.server.routes.ollama import _seconds
from penstock.server.settings import ServerSettings

from ...tables import cases, table
from ...waiting import until
from ..fake_engine import client_of

TEXTS = ["hello", "hello world"]


@pytest.fixture
def folder(engine, tmp_path: Path) -> Path:
    """The model's folder, with 1000 bytes of weights."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 1000)
    object.__setattr__(engine.info, "path", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["alias", "alias:latest"])
async def test_embed_returns_normalized_vectors(client: httpx.AsyncClient, engine, name: str) -> None:
    body = {"model": name, "input": TEXTS, "keep_alive": "5m", "truncate": True, "options": {"temperature": 0}}
    response = await client.post("/api/embed", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert set(answer) == {"model", "embeddings", "total_duration", "load_duration", "prompt_eval_count"}
    assert answer["model"] == name
    assert np.array(answer["embeddings"]).shape == (2, 8)
    plain = (await client.post("/v1/embeddings", json={"input": TEXTS})).json()
    np.testing.assert_allclose(answer["embeddings"], [row["embedding"] for row in plain["data"]], atol=1e-6)
    assert answer["prompt_eval_count"] == plain["usage"]["total_tokens"]
    assert 1000 < answer["total_duration"] < 60e9
    assert answer["load_duration"] == 0
    one = (await client.post("/api/embed", json={"model": name, "input": "hello"})).json()
    np.testing.assert_allclose(one["embeddings"], answer["embeddings"][:1], atol=1e-6)


async def test_older_route_embeds_one_prompt(client: httpx.AsyncClient, engine) -> None:
    answer = (await client.post("/api/embeddings", json={"model": "alias", "prompt": "hello"})).json()
    assert list(answer) == ["embedding"]
    assert len(answer["embedding"]) == 8
    assert engine.calls[-1][1][1].normalize is False


def test_durations_of_go_are_seconds() -> None:
    given = ["1h30m", "1.5m2s", "250ms", "3us", "7µs", "9ns", "7", "0", 2.5, "-1m", "-0.5", -1]
    expected = [5400, 92, 0.25, 3e-6, 7e-6, 9e-9, 7, 0, 2.5, *[math.inf] * 3]
    assert list(map(_seconds, given)) == pytest.approx(expected)


@cases(__file__, "body", "limit", "rejects")
async def test_num_ctx_and_truncate_set_the_limit(serving, engine, body: dict, limit: int, rejects: bool) -> None:
    async with serving(engine, default_prompt_name="query") as client:
        response = await client.post("/api/embed", json={"model": "alias", "input": "a", **body})
        assert response.status_code == 200, response.text
    _, (_, params, options) = engine.calls[-1]
    assert (params.truncate_prompt_tokens, params.reject_too_long) == (limit, rejects)
    assert options.prompt_name == "query"


async def test_tags_and_ps_list_the_models(client: httpx.AsyncClient, engine, folder: Path) -> None:
    models = (await client.get("/api/tags")).json()["models"]
    size = models[0]["details"]["parameter_size"]
    details = {**table(__file__, "test_tags_and_ps_list_the_models"), "parameter_size": size}
    assert [(model["name"], model["model"]) for model in models] == [("fake-model",) * 2, ("alias",) * 2]
    assert all((model["size"], model["details"]) == (1000, details) for model in models)
    assert all(len(model["digest"]) == 64 for model in models)
    assert all(datetime.fromisoformat(model["modified_at"]).year >= 2020 for model in models)
    for device, size_vram in (("cpu", 0), ("cuda:0", 1000)):
        object.__setattr__(engine.info, "device", device)
        (loaded,) = (await client.get("/api/ps")).json()["models"]
        stays = {"expires_at": "2999-12-31T23:59:59Z", "size_vram": size_vram, "context_length": 64}
        assert loaded == {**models[0], **stays}
    assert (await client.get("/api/version")).json() == (await client.get("/version")).json()


async def test_model_of_a_moved_folder_is_listed_without_weights(client, engine, tmp_path: Path, caplog) -> None:
    object.__setattr__(engine.info, "path", str(tmp_path / "gone"))
    for path in ("/api/tags", "/api/ps"):
        card = (await client.get(path)).json()["models"][0]
        assert (card["name"], card["size"], card["details"]["format"]) == ("fake-model", 0, "")
    assert (await client.post("/api/show", json={"model": "alias"})).status_code == 200
    assert "the weights of fake-model cannot be described" in caplog.text


async def test_model_that_always_stays_loaded_is_not_unloaded(client: httpx.AsyncClient) -> None:
    for path in ("/api/generate", "/api/embed"):
        response = await client.post(path, json={"model": "alias", "keep_alive": 0})
        assert response.status_code == 400
        assert response.json()["error"].startswith("keep_alive is 0, but 'alias' always stays loaded.")


@pytest.mark.parametrize("field", ["model", "name"])
@pytest.mark.parametrize(("kind", "capabilities"), [("embedding", ["embedding"]), ("sequence_classifier", [])])
async def test_show_describes_a_model(serving, make_engine, tmp_path: Path, field, kind, capabilities) -> None:
    async with serving(make_engine(kind, ("a", "b"), path=str(tmp_path))) as client:
        answer = (await client.post("/api/show", json={field: "alias:latest"})).json()
        pulled = await client.post("/api/pull", json={field: "alias", "stream": True})
    parameters = answer["model_info"].pop("general.parameter_count")
    assert type(parameters) is int
    details = answer.pop("details")
    assert details["family"] == "fake"
    assert datetime.fromisoformat(answer.pop("modified_at"))
    assert answer == {**table(__file__, "test_show_describes_a_model"), "capabilities": capabilities}
    assert pulled.json() == {"status": "success"}


@cases(__file__, "path", "body", "status", "part")
async def test_errors_are_texts(client: httpx.AsyncClient, path: str, body: dict, status: int, part: str) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error", "message", "detail", "param", "code"}
    assert part in response.json()["error"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_request_for_text_is_rejected_with_the_routes(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, json={"model": "gpt", "messages": [{"role": "user", "content": "Hi"}], "n": 1})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "unsupported_task"
    assert "embed, token_embed, score" in error["message"]
    assert "/v1/embeddings" in error["message"]


async def test_keep_alive_sets_how_long_a_model_stays(make_engine, folder: Path) -> None:
    async def start():
        await asyncio.sleep(0.1)
        return make_engine(path=str(folder))

    app = create_app([ServedModel(("m",), start, is_preloaded=False)], ServerSettings())
    async with client_of(app) as client:
        await app.state.context.models.manager.wait_until_started()

        async def loaded() -> list[dict]:
            return (await client.get("/api/ps")).json()["models"]

        assert await loaded() == []
        answer = await client.post("/api/embed", json={"model": "m", "input": "a", "keep_alive": "1h30m"})
        assert 0.1e9 <= answer.json()["load_duration"] < answer.json()["total_duration"] < 60e9
        left = datetime.fromisoformat((await loaded())[0]["expires_at"]) - datetime.now(UTC)
        assert 5300 < left.total_seconds() <= 5400
        (entry,) = app.state.context.models.entries
        entry.last_used_s -= 1000
        left = datetime.fromisoformat((await loaded())[0]["expires_at"]) - datetime.now(UTC)
        assert 4300 < left.total_seconds() <= 4400
        await client.post("/api/embeddings", json={"model": "m", "prompt": "a", "keep_alive": -1})
        assert (await loaded())[0]["expires_at"].startswith("2999")
        await client.post("/api/embed", json={"model": "m", "input": "a", "keep_alive": 1e12})
        assert (await loaded())[0]["expires_at"].startswith("2999")
        gone = (await client.post("/api/generate", json={"model": "m", "keep_alive": 0})).json()
        assert datetime.fromisoformat(gone.pop("created_at")).tzinfo is not None
        assert gone == {"model": "m", "response": "", "done": True, "done_reason": "unload"}
        await until(lambda: entry.state == "unloaded")
        assert (await client.post("/api/chat", json={"model": "m", "messages": []})).json()["done_reason"] == "load"
        assert len(await loaded()) == 1
        for value, shown in (("soon", "'soon'"), (False, "false")):
            for path in ("/api/embed", "/api/generate"):
                wrong = await client.post(path, json={"model": "m", "input": "a", "keep_alive": value})
                assert wrong.status_code == 400
                message = f"keep_alive must be seconds or a duration such as 5m, not {shown};"
                assert wrong.json()["error"].startswith(message)
        assert len(await loaded()) == 1


@cases(__file__, "path", "fields", "answer")
async def test_request_without_a_text_loads_or_unloads_a_model(make_engine, path: str, fields: dict, answer) -> None:
    engine = make_engine()
    model = ServedModel(("m",), AsyncMock(return_value=engine), is_preloaded=False)
    app = create_app([model], ServerSettings())
    async with client_of(app) as client:
        await app.state.context.models.manager.wait_until_started()
        (entry,) = app.state.context.models.entries
        for keep_alive, num_loads in ((0, 0), (None, 1), (0, 1)):
            response = await client.post(path, json={"keep_alive": keep_alive, **fields})
            assert (response.status_code, response.json(), entry.num_loads) == (200, answer, num_loads)
        await until(lambda: entry.state == "unloaded")
    assert not engine.calls


async def test_weight_headers_are_read_once_for_each_change(client, engine, tmp_path: Path, monkeypatch) -> None:
    read = Mock(side_effect=weight_files._num_parameters)
    monkeypatch.setattr(weight_files, "_num_parameters", read)
    object.__setattr__(engine.info, "path", str(tmp_path))
    for num_reads, (num_rows, size) in enumerate([(1, "1.0K"), (2000, "2.0M")], start=1):
        header = json.dumps({"w": {"dtype": "F32", "shape": [num_rows, 1000], "data_offsets": [0, 0]}}).encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        for path in ("/api/tags", "/api/tags", "/api/ps"):
            card = (await client.get(path)).json()["models"][0]
            assert card["details"]["parameter_size"] == size
        assert read.call_count == num_reads
