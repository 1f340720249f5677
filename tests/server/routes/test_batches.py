"""/v1/files and /v1/batches."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.server.app import create_app
from penstock.server.models.served_model import ServedModel
from penstock.server.settings import ServerSettings, UsageError

from ...tables import cases, table
from ...waiting import until

TERMINAL_STATUSES = ("completed", "failed", "expired", "cancelled")


def embedding(number: int, **body: object) -> dict[str, Any]:
    """A line of an input file."""
    body = {"model": "fake-model", "input": f"text {number}", **body}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/embeddings", "body": body}


def jsonl(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def upload(client: httpx.AsyncClient, content: bytes, **fields: str) -> httpx.Response:
    form = {"purpose": "batch", **fields}
    return await client.post("/v1/files", files={"file": ("lines.jsonl", content)}, data=form)


async def create(client: httpx.AsyncClient, file_id: str, **fields: object) -> httpx.Response:
    body = {"input_file_id": file_id, "endpoint": "/v1/embeddings", "completion_window": "24h", **fields}
    return await client.post("/v1/batches", json=body)


async def start(client: httpx.AsyncClient, lines: list[Any], **fields: object) -> dict[str, Any]:
    """Uploads lines and creates a batch."""
    response = await create(client, (await upload(client, jsonl(lines))).json()["id"], **fields)
    assert response.status_code == 200, response.text
    return response.json()


async def finished(client: httpx.AsyncClient, batch: dict[str, Any]) -> dict[str, Any]:
    """Waits until a batch has ended and returns it."""
    async with asyncio.timeout(120):
        while (batch := (await client.get(f"/v1/batches/{batch['id']}")).json())["status"] not in TERMINAL_STATUSES:
            await asyncio.sleep(0.01)
    return batch


async def content(client: httpx.AsyncClient, file_id: str) -> list[dict[str, Any]]:
    response = await client.get(f"/v1/files/{file_id}/content")
    assert response.status_code == 200
    return [json.loads(line) for line in response.text.splitlines()]


@pytest.fixture
async def client(serving, engine, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(engine, data_dir=tmp_path / "data") as client:
        yield client


async def test_batch_answers_every_line_of_its_file(client, engine) -> None:
    batch = await start(client, [embedding(i) for i in range(250)], metadata={"note": "x"})
    assert (batch["object"], batch["status"], batch["metadata"]) == ("batch", "validating", {"note": "x"})
    assert batch["expires_at"] == batch["created_at"] + 24 * 3600
    assert re.fullmatch(r"batch_[0-9a-f]{24} file-[0-9a-f]{24}", f"{batch['id']} {batch['input_file_id']}")
    batch = await finished(client, batch)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 250, "completed": 250, "failed": 0}
    usage = {"input_tokens": 250 * 4, "output_tokens": 0, "total_tokens": 250 * 4}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    assert batch["usage"] == {**usage, **details}
    assert (batch["model"], batch["error_file_id"], batch["errors"]) == ("fake-model", None, None)
    assert 'penstock_batch_lines_total{outcome="completed"} 250.0' in (await client.get("/metrics")).text
    assert all(batch[f"{name}_at"] for name in ("in_progress", "finalizing", "completed"))
    answers = await content(client, batch["output_file_id"])
    assert sorted(answer["custom_id"] for answer in answers) == sorted(f"line-{i}" for i in range(250))
    for answer in answers[:5]:
        number = answer["custom_id"].partition("-")[2]
        alone = (await client.post("/v1/embeddings", json={"input": f"text {number}"})).json()
        response = answer["response"]
        assert (response["status_code"], answer["error"]) == (200, None)
        assert response["body"]["data"] == alone["data"]
        assert response["body"]["id"] == f"embd-{response['request_id']}"
        line = f"batch_req_{batch['id'].removeprefix('batch_')}_{int(number) + 1}"
        assert response["request_id"] == answer["id"] == line
    assert all(options.priority == 999 for name, (_, _, options) in engine.calls[:250])
    (entry,) = client._transport.app.state.context.models.entries
    assert entry.is_idle, "a line keeps the model in memory"
    file = (await client.get(f"/v1/files/{batch['output_file_id']}")).json()
    assert (file["purpose"], file["filename"]) == ("batch_output", f"{batch['id']}_output.jsonl")


async def test_large_response_of_a_line_is_complete(client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is serialised in parts, between which the server looks for a disconnect."""
    messages = []

    async def wait_for_disconnect(receive: Any) -> None:
        messages.append(await receive())  # the real one would block the event loop in an endless loop

    monkeypatch.setattr("penstock.server.http.json_responses.wait_for_disconnect", wait_for_disconnect)
    monkeypatch.setattr("penstock.server.response_size.LARGE_RESPONSE_BYTES", 0)
    batch = await finished(client, await start(client, [embedding(1, input=["a", "b", "a"])]))
    (answer,) = await content(client, batch["output_file_id"])
    alone = (await client.post("/v1/embeddings", json={"input": ["a", "b", "a"]})).json()
    assert answer["response"]["body"]["data"] == alone["data"]
    assert messages == []


async def test_rejected_lines_are_in_the_error_file(client) -> None:
    lines = [embedding(1), embedding(2, input="a", dimensions=5000), embedding(3, model="unknown")]
    lines += [embedding(4, dimension=1), embedding(5, encoding_format="bytes")]
    batch = await finished(client, await start(client, lines))
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 5, "completed": 1, "failed": 4}
    errors = {error["custom_id"]: error for error in await content(client, batch["error_file_id"])}
    assert {name: error["response"] and error["response"]["status_code"] for name, error in errors.items()} == table(
        __file__, "test_rejected_lines_are_in_the_error_file"
    )
    assert "'unknown'" in errors["line-3"]["response"]["body"]["error"]["message"]
    assert errors["line-5"]["error"]["code"] == "unsupported_answer"
    assert len(await content(client, batch["output_file_id"])) == 1


FAULTS = [
    *table(__file__, "wrong_file_fails_with_the_number_of_the_line"),
    ([embedding(i, input=["a"] * 4000) for i in range(13)], "too_many_inputs", None, "52000 inputs together"),
]


@pytest.mark.parametrize(("lines", "code", "number", "part"), FAULTS, ids=[code for _, code, _, _ in FAULTS])
async def test_wrong_file_fails_with_the_number_of_the_line(client, engine, lines, code, number, part) -> None:
    batch = await finished(client, await start(client, lines))
    assert (batch["status"], batch["output_file_id"], batch["error_file_id"]) == ("failed", None, None)
    (error,) = batch["errors"]["data"]
    assert (error["code"], error["line"]) == (code, number)
    assert part in error["message"]
    assert not engine.calls


async def test_first_100_errors_of_a_file_are_listed(client) -> None:
    file = (await upload(client, b"{\n\n" + b"no\n" * 500)).json()
    batch = await finished(client, (await create(client, file["id"])).json())
    assert [error["line"] for error in batch["errors"]["data"]] == [1, *range(3, 102)]


async def test_lines_may_call_other_routes(client, engine) -> None:
    for endpoint, body in table(__file__, "test_lines_may_call_other_routes").items():
        line = {"custom_id": "1", "method": "POST", "url": endpoint, "body": {"priority": -9, **body}}
        batch = await finished(client, await start(client, [line], endpoint=endpoint))
        (answer,) = await content(client, batch["output_file_id"])
        assert answer["response"]["status_code"] == 200
        assert engine.calls[-1][1][-1].priority == 999
        alone = (await client.post(endpoint, json=body)).json()
        if isinstance(alone, dict):
            changes = dict.fromkeys(("id", "created"))
            alone.update(changes)
            answer["response"]["body"].update(changes)
        assert answer["response"]["body"] == alone


async def test_line_with_a_wrong_priority_is_rejected_as_alone(client) -> None:
    line = embedding(1)
    line["body"]["priority"] = 1000
    batch = await finished(client, await start(client, [line]))
    (answer,) = await content(client, batch["error_file_id"])
    alone = await client.post("/v1/embeddings", json=line["body"])
    assert answer["response"]["status_code"] == alone.status_code == 400
    assert answer["response"]["body"]["error"]["param"] == "priority"


async def test_cancelled_batch_fails_its_unanswered_lines(client, engine) -> None:
    engine.gate = asyncio.Event()
    batch = await start(client, [embedding(i) for i in range(300)])
    await engine.entered.wait()
    response = await client.post(f"/v1/batches/{batch['id']}/cancel")
    assert (response.status_code, response.json()["status"]) == (200, "cancelling")
    assert (await client.post(f"/v1/batches/{batch['id']}/cancel")).status_code in (200, 409)
    batch = await finished(client, batch)
    assert batch["status"] == "cancelled"
    assert batch["request_counts"] == {"total": 300, "completed": 0, "failed": 300}
    errors = await content(client, batch["error_file_id"])
    assert {error["custom_id"] for error in errors} == {f"line-{i}" for i in range(300)}
    assert {error["error"]["code"] for error in errors} == {"batch_cancelled"}
    assert engine.was_cancelled
    response = await client.post(f"/v1/batches/{batch['id']}/cancel")
    assert (response.status_code, response.headers["x-should-retry"]) == (409, "false")
    assert "cancelled" in response.json()["error"]["message"]


async def test_file_of_a_running_batch_is_not_deleted(client, engine) -> None:
    engine.gate = asyncio.Event()
    batch = await start(client, [embedding(1)])
    path = f"/v1/files/{batch['input_file_id']}"
    response = await client.delete(path)
    assert response.status_code == 409
    assert batch["id"] in response.json()["error"]["message"]
    engine.gate.set()
    batch = await finished(client, batch)
    assert (await client.delete(path)).json() == {"id": batch["input_file_id"], "object": "file", "deleted": True}
    for method, gone in (("GET", path), ("GET", path + "/content"), ("DELETE", path)):
        assert (await client.request(method, gone)).status_code == 404
    assert await content(client, batch["output_file_id"])


async def test_files_and_batches_belong_to_their_key(serving, engine, tmp_path: Path) -> None:
    one, two = ({"authorization": f"Bearer {name}"} for name in ("one", "two"))
    keys = {"api_key": ("one", "two"), "data_dir": tmp_path / "data"}
    async with serving(engine, **keys) as client:
        assert (await client.get("/v1/files")).status_code == 401
        client.headers.update(one)
        batch = await finished(client, await start(client, [embedding(1)]))
        own = [(options.client, options.namespace) for _, (_, _, options) in engine.calls]
    async with serving(engine, **keys) as client:  # another process salts keys differently
        engine.calls.clear()
        assert (await client.post("/v1/embeddings", json={"input": "a"}, headers=one)).status_code == 200
        assert [(options.client, options.namespace) for _, (_, _, options) in engine.calls] == own
        assert "" not in own[0]
        paths = [f"/v1/files/{batch['input_file_id']}", f"/v1/files/{batch['output_file_id']}/content"]
        paths.append(f"/v1/batches/{batch['id']}")
        for path in paths:
            assert (await client.get(path, headers=one)).status_code == 200
            response = await client.get(path, headers=two)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
        client.headers.update(two)
        assert (await client.delete(paths[0])).status_code == 404
        assert (await client.post(paths[2] + "/cancel")).status_code == 404
        assert (await create(client, batch["input_file_id"])).status_code == 404
        for path in ("/v1/files", "/v1/batches"):
            assert (await client.get(path)).json()["data"] == []
            assert (await client.get(path, headers=one)).json()["data"]
    for name, status in (("one", 200), ("two", 404)):  # the only key of a server keeps its owner
        async with serving(engine, api_key=(name,), data_dir=tmp_path / "data") as client:
            response = await client.get(paths[2], headers={"authorization": f"Bearer {name}"})
            assert response.status_code == status


async def test_batch_of_a_revoked_key_is_cancelled(serving, engine, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("penstock.server.middleware.auth.CHECK_EVERY_S", 0.0)
    file = tmp_path / "keys"
    file.write_text("one\n")
    settings = {"api_key": ("two",), "api_key_file": file, "data_dir": tmp_path / "data"}
    engine.gate = asyncio.Event()
    async with serving(engine, **settings) as client:
        client.headers["authorization"] = "Bearer one"
        batch = await start(client, [embedding(i) for i in range(20)])
        await engine.entered.wait()
        file.write_text("three\n")
        engine.gate.set()
        await until(lambda: not client._transport.app.state.batches.num_unfinished())
        assert len(engine.calls) == 1
        file.write_text("one\n")
        batch = await finished(client, batch)
        assert (batch["status"], bool(batch["cancelling_at"])) == ("cancelled", True)
        assert [error["code"] for error in batch["errors"]["data"]] == ["invalid_api_key"]
        assert sum(batch["request_counts"][name] for name in ("completed", "failed")) == 20
        codes = {error["error"]["code"] for error in await content(client, batch["error_file_id"])}
        assert codes == {"batch_cancelled"}


async def test_lists_have_pages(client) -> None:
    ids = [(await upload(client, b"x")).json()["id"] for _ in range(5)]
    page = (await client.get("/v1/files", params={"limit": 2, "order": "asc"})).json()
    assert ([file["id"] for file in page["data"]], page["has_more"]) == (ids[:2], True)
    page = (await client.get("/v1/files", params={"limit": 3, "order": "asc", "after": page["last_id"]})).json()
    assert ([file["id"] for file in page["data"]], page["has_more"]) == (ids[2:], False)
    assert (await client.get("/v1/files", params={"purpose": "batch_output"})).json()["data"] == []
    for query in ({"limit": 0}, {"limit": 10_001}, {"after": "file-none"}, {"order": "up"}):
        response = await client.get("/v1/files", params=query)
        assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(query)))
    page = (await client.get("/v1/files", params={"purpose": "batch"})).json()
    assert (page["object"], page["first_id"], page["last_id"], page["has_more"]) == ("list", ids[4], ids[0], False)
    for query in ({"limit": 0}, {"limit": 101}):
        assert (await client.get("/v1/batches", params=query)).status_code == 400
    batches = [(await start(client, [embedding(i)]))["id"] for i in range(21)]
    page = (await client.get("/v1/batches")).json()
    assert ([batch["id"] for batch in page["data"]], page["has_more"]) == (batches[:0:-1], True)
    page = (await client.get("/v1/batches", params={"limit": 2, "after": page["last_id"]})).json()
    assert ([batch["id"] for batch in page["data"]], page["has_more"]) == (batches[:1], False)


WRONG_BATCHES = table(__file__, "wrong_batches")


async def test_wrong_batch_is_rejected_with_the_field(client) -> None:
    batch = await finished(client, await start(client, [embedding(1)]))
    for fields, status, param in [*WRONG_BATCHES, ({"input_file_id": batch["output_file_id"]}, 400, "input_file_id")]:
        response = await create(client, batch["input_file_id"], **fields)
        assert response.status_code == status, response.text
        assert response.json()["error"]["param"].startswith(param)
    for window in ("1d", "24", "0h", "24 h", ""):
        message = (await create(client, batch["input_file_id"], completion_window=window)).json()["error"]["message"]
        assert message == f"completion_window must be 1h to 168h, such as 24h, not {window!r}."


async def test_without_a_data_folder_errors_name_the_flag(serving, engine) -> None:
    async with serving(engine) as client:
        for method, path in (
            *(("POST", "/v1/files"), ("GET", "/v1/files"), ("GET", "/v1/files/file-1"), ("DELETE", "/v1/files/file-1")),
            *(("GET", "/v1/files/file-1/content"), ("POST", "/v1/batches"), ("GET", "/v1/batches")),
            *(("GET", "/v1/batches/batch_1"), ("POST", "/v1/batches/batch_1/cancel")),
        ):
            response = await client.request(method, path)
            assert response.status_code == 404
            assert "--data-dir" in response.json()["error"]["message"]


async def test_data_folder_is_used_by_one_server(serving, engine, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "data"
    async with serving(engine, data_dir=folder):
        with pytest.raises(UsageError, match="--data-dir: another server uses"):
            create_app([ServedModel(("m",), None)], ServerSettings(data_dir=folder))
        assert (folder / "secret").stat().st_mode & 0o777 == 0o600
        assert [path.stat().st_mode & 0o777 for path in (folder, folder / "files")] == [0o700] * 2
    async with serving(engine, data_dir=folder):
        pass


async def test_file_name_may_be_any_text(client) -> None:
    name = 'ein "Dämm"\\ 東京.jsonl'
    response = await client.post("/v1/files", files={"file": (name, b"0123456789")}, data={"purpose": "batch"})
    assert response.status_code == 200
    content = await client.get(f"/v1/files/{response.json()['id']}/content")
    assert (content.status_code, content.content) == (200, b"0123456789")
    assert "filename*=" in content.headers["content-disposition"]
    assert content.headers["content-type"].partition(";")[0] == "application/jsonl"
    part = await client.get(f"/v1/files/{response.json()['id']}/content", headers={"range": "bytes=2-4"})
    assert (part.status_code, part.content) == (206, b"234")


async def test_lines_may_call_every_model_route_except_listed_ones(client) -> None:
    table = client._transport.app.state.routes
    routes = {route.path for route in table.routes if route.runs_model}
    spellings = {"/embeddings", "/v1/pooling"}
    others_clients = {"/", "/invocations", "/api/embed", "/api/embeddings"}
    assert set(table.batch_uses()) | spellings | others_clients == routes


async def test_live_requests_are_seen_while_lines_run(client, engine) -> None:
    engine.gate = asyncio.Event()
    batch = await start(client, [embedding(1)])
    await engine.entered.wait()
    traffic = client._transport.app.state.batches.traffic
    assert traffic.seconds_until_quiet == 0, "lines, files and batches are not live requests"
    live = asyncio.create_task(client.post("/v1/embeddings", json={"input": "a"}))
    await until(lambda: traffic.seconds_until_quiet)
    engine.gate.set()
    assert (await live).status_code == 200
    await client.post(f"/v1/batches/{batch['id']}/cancel")


async def test_large_upload_needs_no_body_memory(serving, engine, tmp_path: Path) -> None:
    async with serving(engine, data_dir=tmp_path / "data", max_body_bytes=1000, max_file_bytes="1MiB") as client:
        assert (await upload(client, b"x" * 500_000)).status_code == 200
        response = await upload(client, b"x" * 2_000_000)
        assert (response.status_code, "--max-file-bytes" in response.json()["message"]) == (413, True)
        assert len(list((tmp_path / "data" / "files").iterdir())) == 1


async def test_content_of_a_removed_file_is_404(client: httpx.AsyncClient, tmp_path: Path) -> None:
    file_id = (await upload(client, b"x" * 100)).json()["id"]
    (body,) = (path for path in (tmp_path / "data").rglob("*") if path.name == file_id)
    body.unlink()
    response = await client.get(f"/v1/files/{file_id}/content")
    assert response.status_code == 404
    assert file_id in response.json()["error"]["message"]
    assert (await client.delete(f"/v1/files/{file_id}")).status_code == 200


@cases(__file__, "site", "settings", "status")
async def test_page_of_another_origin_changes_nothing(serving, engine, tmp_path, site, settings, status) -> None:
    async with serving(engine, data_dir=tmp_path / "data", operator_routes=True, **settings) as client:
        batch = await start(client, [embedding(1)]) if "api_key" not in settings else {"id": "batch_unknown"}
        client.headers.update(site)
        assert (await upload(client, b"{}")).status_code == status
        assert (await client.post("/reset_prefix_cache")).status_code == status
        refused = (await client.post(f"/v1/batches/{batch['id']}/cancel")).status_code == 403
        assert refused == (status == 403)
