"""Models loaded and unloaded by whoever has the admin key."""

from pathlib import Path

import pytest

from penstock.server.settings import UsageError


async def test_without_an_admin_key_there_are_no_such_routes(serving, engine) -> None:
    async with serving(engine) as client:
        assert (await client.post("/models/unload", json={"model": "alias"})).status_code in (404, 405)
        assert "/models/load" not in (await client.get("/openapi.json")).json()["paths"]


async def test_a_key_of_the_admin_key_file_opens_them(serving, engine, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# who may load models\nadmin\n")
    async with serving(engine, admin_key_file=file) as client:
        for key, status in (("wrong", 401), ("# who may load models", 401), ("admin", 200)):
            headers = {"authorization": f"Bearer {key}"}
            response = await client.post("/models/unload", json={"model": "alias"}, headers=headers)
            assert response.status_code == status
    with pytest.raises(UsageError, match=r"^--admin-key-file: .*No such file"):
        async with serving(engine, admin_key_file=tmp_path / "none"):
            pass


@pytest.mark.parametrize("api_key", [None, "data"])
async def test_only_the_admin_key_opens_them(serving, engine, api_key: str | None) -> None:
    keys = {"api_key": api_key} if api_key else {}
    async with serving(engine, admin_key="admin", **keys) as client:
        for key in (None, "data", "wrong"):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            refused = await client.post("/models/unload", json={"model": "alias"}, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["message"].startswith("The admin key is missing or wrong")
        as_admin = {"authorization": "Bearer admin"}
        embedded = await client.post("/v1/embeddings", json={"input": "a"}, headers=as_admin)
        assert embedded.status_code == (401 if api_key else 200)
        assert (await client.get("/models")).status_code == 200
        card = (await client.post("/models/unload", json={"model": "alias"}, headers=as_admin)).json()
        assert card["status"] == {"value": "unloaded", "state": "unloaded"}
        assert engine.is_closed
        unknown = await client.post("/models/load", json={"model": "other"}, headers=as_admin)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        card = (await client.post("/models/load", json={"model": "alias"}, headers=as_admin)).json()
        assert card["status"]["value"] == "loaded"
