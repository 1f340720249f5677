"""--max-inputs-per-request limits every list of a body."""

import copy
from typing import Any

import pytest

from penstock.server.admission import AdmissionController
from penstock.server.http.json_reader import JsonReader
from penstock.server.settings import ServerSettings

from .test_tei import SPLADE

EXAMPLES = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}, {"text": "c", "label": "y"}]
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
CLASSES = ("negative", "positive")
# (path, kind of the model, body, list of three entries)
BODIES: list[tuple[str, str, dict[str, Any], str]] = [
    ("/v1/embeddings", "embedding", {"input": ["a", "b", "c"]}, "input"),
    ("/v1/embeddings", "embedding", {"messages": CHAT}, "messages"),
    ("/pooling", "embedding", {"input": ["a", "b", "c"]}, "input"),
    ("/pooling", "embedding", {"messages": [CHAT[:1]] * 3}, "messages"),
    ("/classify", "sequence_classifier", {"input": ["a", "b", "c"]}, "input"),
    ("/classify", "sequence_classifier", {"inputs": ["a", "b", "c"]}, "inputs"),
    ("/classify", "embedding", {"input": ["a"], "labels": ["x", "y", "z"]}, "labels"),
    ("/classify", "embedding", {"inputs": ["a"], "examples": EXAMPLES}, "examples"),
    ("/score", "embedding", {"text_1": "a", "text_2": ["b", "c", "d"]}, "text_2"),
    ("/score", "embedding", {"text_1": ["a", "b", "c"], "text_2": ["b", "c", "d"]}, "text_1"),
    ("/rerank", "embedding", {"query": "a", "documents": ["b", "c", "d"]}, "documents"),
    ("/v2/embed", "embedding", {"texts": ["a", "b", "c"], "input_type": "classification", "model": "alias"}, "texts"),
    ("/embed", "embedding", {"inputs": ["a", "b", "c"]}, "inputs"),
    ("/embed_all", "embedding", {"inputs": ["a", "b", "c"]}, "inputs"),
    ("/embed_sparse", "splade", {"inputs": ["a", "b", "c"]}, "inputs"),
    (
        "/similarity",
        "embedding",
        {"inputs": {"source_sentence": "a", "sentences": ["b", "c", "d"]}},
        "inputs.sentences",
    ),
    ("/predict", "sequence_classifier", {"inputs": [["a"], ["b"], ["c"]]}, "inputs"),
    ("/rerank", "embedding", {"query": "a", "texts": ["b", "c", "d"]}, "texts"),
    ("/decode", "embedding", {"ids": [[1], [2], [3]]}, "ids"),
    ("/tokenize", "embedding", {"inputs": ["a", "b", "c"]}, "inputs"),
    ("/api/embed", "embedding", {"input": ["a", "b", "c"], "model": "alias"}, "input"),
    ("/invocations", "embedding", {"input": ["a", "b", "c"]}, "input"),
    ("/invocations", "sequence_classifier", {"input": ["a", "b", "c"]}, "input"),
]


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
