"""The error for a long input names a field that lets the request pass; the response reports the truncation."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

LONG = "water " * 400
REQUESTS = json.loads(Path(__file__).with_name("too_long.json").read_text().replace("$LONG", LONG))
"""Path and body of requests with an input that is too long."""


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=lambda value: json.dumps(value)[:40].replace("water ", ""))
def test_error_names_a_field_that_cuts_the_input(path: str, body: dict[str, Any], http: httpx.Client) -> None:
    rejected = http.post(path, json={"model": "all-MiniLM-L6-v2", **body})
    assert rejected.status_code in (400, 413, 422), rejected.text
    found = re.search(r"set ([a-z_]+) to (\S+?)(?: or \w+)? to cut", rejected.text)
    assert found, rejected.text
    name, value = found.groups()
    value = value if value.isupper() else json.loads(value)
    changed = {"parameters": {name: value}} if "parameters" in body else {name: value}
    answer = http.post(path, json={"model": "all-MiniLM-L6-v2", **body, **changed})
    assert answer.status_code == 200, f"{rejected.text}\n{answer.text}"
    assert answer.headers["x-truncated-inputs"] == "1"


def test_truncated_inputs_are_counted(http: httpx.Client) -> None:
    def num_truncated(task: str) -> float:
        text = http.get("/metrics").text
        found = re.search(rf'penstock_truncated_inputs_total{{model="[^"]+",task="{task}"}} (\S+)', text)
        return float(found[1]) if found else 0.0

    embedded, ranked = num_truncated("embed"), num_truncated("rerank")
    cohere = http.post("/v2/embed", json={"texts": [LONG, "a", LONG], "input_type": "clustering"})
    assert cohere.json()["meta"]["warnings"] == ["Inputs that were truncated because they are too long: 2."]
    for texts, expected in (([LONG, "a", LONG, LONG], "3"), (["a"], None)):
        answer = http.post("/v1/embeddings", json={"input": texts, "truncate_prompt_tokens": 100})
        assert answer.headers.get("x-truncated-inputs") == expected
    assert num_truncated("embed") == embedded + 5
    body = {"query": "a", "documents": [LONG, "a dam of water", LONG]}
    for limit, expected in ((None, 2), (2, 3)):
        answer = http.post("/v2/rerank", json={**body, "max_tokens_per_doc": limit})
        assert answer.json()["meta"]["warnings"][0].endswith(f" {expected}.")
        assert answer.headers["x-truncated-inputs"] == str(expected)
    assert num_truncated("rerank") == ranked + 5
    assert "warnings" not in http.post("/v2/rerank", json={"query": "a", "documents": ["b"]}).json()["meta"]
