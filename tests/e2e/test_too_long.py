"""The error for a long input names a field that lets the request pass; the response reports the truncation."""

import json
import re
from typing import Any

import httpx
import pytest

LONG = "water " * 400
CHAT = [{"role": "user", "content": LONG}]
ZERO_SHOT = {"labels": ["water", "fire"]}
FEW_SHOT = {"examples": [{"text": "a", "label": "b"}, {"text": "c", "label": "d"}]}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": LONG}),
    ("/v1/embeddings", {"input": LONG, "truncate": False}),
    ("/v1/embeddings", {"input": LONG, "truncation": False}),
    ("/v1/embeddings", {"input": ["a", LONG], "late_chunking": True}),
    ("/pooling", {"input": LONG, "task": "embed"}),
    ("/pooling", {"input": LONG, "task": "token_embed"}),
    ("/v1/encode", {"input": LONG}),
    ("/v1/multi-vector", {"input": [LONG]}),
    ("/v1/score", {"text_1": "a", "text_2": LONG}),
    ("/score", {"queries": "a", "documents": [LONG]}),
    ("/score", {"data_1": LONG, "data_2": "a"}),
    ("/v1/rerank", {"query": "a", "documents": [LONG], "truncation": False}),
    ("/v2/rerank", {"query": "a", "documents": [LONG], "truncation": False}),
    ("/rerank", {"query": LONG, "documents": ["a"], "truncation": False}),
    ("/rerank", {"query": "a", "documents": [LONG * 3], "truncation": False, "max_chunks_per_doc": 2}),
    ("/rerank", {"query": "a", "texts": [LONG], "truncate": False}),
    ("/classify", {"input": [LONG], **ZERO_SHOT}),
    ("/v1/classify", {"input": [LONG], **ZERO_SHOT}),
    ("/classify", {"inputs": [LONG], "truncate": "NONE", **FEW_SHOT}),
    ("/v1/embed", {"texts": [LONG], "truncate": "NONE", "input_type": "clustering"}),
    ("/v2/embed", {"texts": [LONG], "truncate": "NONE", "input_type": "clustering", "embedding_types": ["float"]}),
    ("/v2/embed", {"texts": [LONG], "truncate": "NONE", "max_tokens": 20, "input_type": "clustering"}),
    ("/embed", {"inputs": LONG, "truncate": False}),
    ("/embed_all", {"inputs": LONG, "truncate": False}),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": [LONG]}, "parameters": {"truncate": False}}),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": [LONG]}, "truncate": False}),
    ("/", {"inputs": LONG, "truncate": False}),
    ("/api/embed", {"input": LONG, "truncate": False}),
    ("/api/embed", {"input": LONG, "truncate": False, "options": {"num_ctx": 20}}),
    ("/invocations", {"input": LONG}),
    ("/invocations", {"inputs": LONG, "truncate": False}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=lambda value: json.dumps(value)[:40].replace("water ", ""))
def test_error_names_a_field_that_cuts_the_input(path: str, body: dict[str, Any], http: httpx.Client) -> None:
    rejected = http.post(path, json={"model": "all-MiniLM-L6-v2", **body})
    assert rejected.status_code in (400, 413, 422), rejected.text
    found = re.search(r"set ([a-z_]+) to (\S+?)(?: or \w+)? to cut", rejected.text)
    assert found, rejected.text
    name, value = found.groups()
    value = value if value.isupper() else json.loads(value)
    answer = http.post(path, json={"model": "all-MiniLM-L6-v2", **body, name: value})
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
