"""Options that reject or cut long inputs win over --auto-truncate; without them it decides."""

import httpx
import pytest

from penstock.engine.protocol.tasks import PoolingTask

from ..bodies import table
from ..conftest import FakeEngine, Serving

LONG = "word " * 100
SPARSE = (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.SCORE, PoolingTask.SPARSE_EMBED)


@pytest.mark.parametrize("auto_truncate", [True, False])
async def test_option_rejects_long_inputs(serving: Serving, make_engine, auto_truncate: bool) -> None:
    async with serving(make_engine(auto_truncate=auto_truncate, tasks=SPARSE)) as client:
        for path, body, option in table("options", "rejecting"):
            response = await client.post(path, json={**body, **option})
            assert response.status_code in (400, 413, 422), (path, option)
            assert "maximum context length" in response.text
            if auto_truncate:
                assert (await client.post(path, json={**body, **dict.fromkeys(option)})).status_code == 200


@pytest.mark.parametrize(("auto_truncate", "status"), [(True, 200), (False, 400)])
async def test_without_the_option_the_server_decides(serving, make_engine, auto_truncate: bool, status: int) -> None:
    async with serving(make_engine(auto_truncate=auto_truncate)) as client:
        for path, body in table("options", "silent"):
            assert (await client.post(path, json=body)).status_code == status, path


async def test_truncate_prompt_tokens_wins_over_truncate(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"input": LONG, "truncate": False, "truncate_prompt_tokens": 5}
    assert (await client.post("/v1/embeddings", json=body)).status_code == 200
    params = engine.calls[-1][1][1]
    assert (params.truncate_prompt_tokens, params.reject_too_long) == (5, False)
