"""--max-inputs-per-request limits every list of a body."""

import copy
from typing import Any

import pytest

from penstock.server.admission import AdmissionController
from penstock.server.http.json_reader import JsonReader
from penstock.server.settings import ServerSettings

from ..bodies import table
from .test_tei import SPLADE

CLASSES = ("negative", "positive")
# [path, kind of the model, body, list of three entries]
BODIES = table("three_entries", "bodies")


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
            client._transport.app.state.json_reader = JsonReader(AdmissionController(ServerSettings()), 10**6)
        for path, _, body, param in (case for case in BODIES if case[1] == kind):
            rejected = await client.post(path, json=body)
            accepted = await client.post(path, json=shortened(body, param))
            assert rejected.status_code in (400, 422), rejected.text
            assert f"{param} has 3 entries; the limit is 2." in rejected.text
            assert accepted.status_code == 200, accepted.text
