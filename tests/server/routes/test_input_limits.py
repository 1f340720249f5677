"""--max-inputs-per-request limits every list. Options that reject or cut long inputs win over --auto-truncate."""

import copy
from typing import Any

import pytest

from penstock.engine.protocol.tasks import PoolingTask
from penstock.server.admission import AdmissionController
from penstock.server.http.json_reader import JsonReader
from penstock.server.settings import ServerSettings

from ...tables import table
from ..fake_engine import Serving
from .test_tei import SPLADE

CLASSES = ("negative", "positive")
# [path, kind of the model, body, list of three entries]
BODIES = table(__file__, "bodies_with_three_entries")


def shortened(body: dict[str, Any], param: str) -> dict[str, Any]:
    shorter = copy.deepcopy(body)
    *outer, last = param.split(".")
    within = shorter[outer[0]] if outer else shorter
    within[last] = within[last][:2]
    if last == "text_1":
        shorter["text_2"] = shorter["text_2"][:2]
    return shorter


@pytest.mark.parametrize("counted_by", ["reader and route", "route"])
@pytest.mark.parametrize("kind", ["embedding", "sequence_classifier", "splade"])
async def test_one_entry_over_the_limit_is_rejected(serving, make_engine, kind: str, counted_by: str) -> None:
    engine = make_engine(**SPLADE) if kind == "splade" else make_engine(kind, CLASSES if "classifier" in kind else ())
    async with serving(engine, max_inputs_per_request=2) as client:
        if counted_by == "route":  # the reader of bodies counts entries, too
            client._transport.app.dispatcher._reader = JsonReader(AdmissionController(ServerSettings()), 10**6)
        for path, _, body, param in (case for case in BODIES if case[1] == kind):
            rejected = await client.post(path, json=body)
            accepted = await client.post(path, json=shortened(body, param))
            assert rejected.status_code in (400, 422), rejected.text
            assert f"{param} has 3 entries; the limit is 2." in rejected.text
            assert accepted.status_code == 200, accepted.text


SPARSE = (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.SCORE, PoolingTask.SPARSE_EMBED)


@pytest.mark.parametrize("auto_truncate", [True, False])
async def test_option_rejects_long_inputs(serving: Serving, make_engine, auto_truncate: bool) -> None:
    async with serving(make_engine(auto_truncate=auto_truncate, tasks=SPARSE)) as client:
        for path, body, option in table(__file__, "test_option_rejects_long_inputs"):
            response = await client.post(path, json={**body, **option})
            assert response.status_code in (400, 413, 422), (path, option)
            assert "maximum context length" in response.text
            if auto_truncate:
                assert (await client.post(path, json={**body, **dict.fromkeys(option)})).status_code == 200


@pytest.mark.parametrize(("auto_truncate", "status"), [(True, 200), (False, 400)])
async def test_without_the_option_the_server_decides(serving, make_engine, auto_truncate: bool, status: int) -> None:
    async with serving(make_engine(auto_truncate=auto_truncate)) as client:
        for path, body in table(__file__, "test_without_the_option_the_server_decides"):
            assert (await client.post(path, json=body)).status_code == status, path
