"""`penstock eval` against small fake servers."""

import base64
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.server.quality.evaluate import EvalClient, evaluate
from penstock.server.settings import CommandError, EvalSettings, UsageError
from penstock.server.target_server import TargetServer

from ...tables import table
from ..fake_server import Answered, Received, Serve, openai_server


def client_of(url: str, **settings: object) -> EvalClient:
    values = EvalSettings(texts_per_request=2, api_key=("k",), **settings)  # type: ignore[arg-type]
    return EvalClient(TargetServer(url, values), values)


@pytest.mark.parametrize("is_base64", [True, False])
def test_vectors_are_base64_or_numbers(serve: Serve, is_base64: bool, monkeypatch, capsys) -> None:
    def answer(received: Received) -> Answered:
        if received.body is None:
            return openai_server(received)
        rows = [np.array([len(text), 1], np.float32) for text in received.body["input"]]
        shown = [base64.b64encode(row.tobytes()).decode() if is_base64 else row.tolist() for row in rows]
        return Answered({"model": "served", "data": [{"embedding": each} for each in shown]})

    client = client_of(serve(answer))
    assert (client.model, client.dimensions) == ("m", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_base64)
    assert client.embed(["a", "bb", "ccc"], "query").tolist() == [[1, 1], [2, 1], [3, 1]]
    assert (client.model, client.dimensions) == ("served", 2)
    bar = capsys.readouterr().err
    assert ("query texts: 100%" in bar, "3/3" in bar, bool(bar)) == (is_base64,) * 3


def test_unexpected_response_is_an_error_with_the_path(serve: Serve) -> None:
    url = serve(lambda received: openai_server(received) if received.body is None else Answered({"data": [{}]}))
    with pytest.raises(CommandError, match="POST /v1/embeddings returned an unexpected response"):
        client_of(url).embed(["a"], "query")
    with pytest.raises(CommandError, match="POST /v1/rerank returned an unexpected response"):
        client_of(url, rerank="r").rerank([("q", ["a"])])


def degrees(text: str) -> list[float]:
    angle = np.radians(int(text))
    return [float(np.cos(angle)), float(np.sin(angle))]


def test_reports_of_all_tasks(serve: Serve, tmp_path: Path) -> None:
    """The vector of a text is its direction in degrees, and the reranker prefers the largest number."""

    def answer(received: Received) -> Answered:
        body = received.body
        if body is None:
            return Answered({"data": [{"id": "r", "endpoints": ["rerank"]}, {"id": "m", "endpoints": ["embed"]}]})
        requests.append((received.path, body))
        if received.path == "/v1/rerank":
            results = [{"index": i, "relevance_score": int(text)} for i, text in enumerate(body["documents"])]
            return Answered({"results": results[::-1]})
        return Answered({"model": "served", "data": [{"embedding": degrees(text)} for text in body["input"]]})

    requests: list[tuple[str, dict]] = []
    documents = [json.dumps({"_id": f"d{i}", "text": str(i)}) for i in range(1, 104)]
    files = table(__file__, "test_reports_of_all_tasks") | {"retrieval/corpus.jsonl": "\n".join(documents)}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    url, folders = serve(answer), [tmp_path / name for name in ("retrieval", "pairs", "classes")]
    settings = EvalSettings(rerank="r", rerank_top_k=102, dimensions=2)
    (retrieval,) = evaluate(url, folders[:1], settings)
    names = ("ndcg_at_10", "map_at_10", "recall_at_10", "recall_at_100", "mrr_at_10")
    head = {"model": "served", "dimensions": 2}
    counts = {"data": "retrieval", "task": "retrieval", "documents": 103, "queries": 1}
    scores = {"scores": dict.fromkeys(names, 0.0) | {"recall_at_100": 1.0}}
    scores["reranked_scores"] = dict(zip(names, (0.5, 0.33333, 1.0, 1.0, 0.33333), strict=True))
    assert retrieval == {**head, **counts, **scores, "reranker": "r"}
    fields = {"encoding_format": "base64", "truncate_prompt_tokens": -1, "dimensions": 2}
    embed = ("/v1/embeddings", {"model": "m", "input_type": "query", **fields, "input": ["0"]})
    ranked = ("/v1/rerank", {"model": "r", "query": "0", "return_documents": False})
    texts = [[str(i) for i in range(start, end)] for start, end in ((1, 65), (65, 103))]
    assert requests[2:] == [embed, *((ranked[0], {**ranked[1], "documents": each}) for each in texts)]
    assert {body["input_type"] for _, body in requests[:2]} == {"document"}
    requests.clear()
    retrieval, pairs, classes = evaluate(url, folders, EvalSettings())
    assert retrieval["scores"]["recall_at_100"] == 1
    assert pairs == {**head, "data": "pairs", "task": "similarity", "pairs": 3, "scores": {"spearman": 1.0}}
    scores = {"scores": {"accuracy": 0.66667}}
    assert classes == {**head, "data": "classes", "task": "classification", "texts": 3, **scores}
    kinds = ["document", "document", "query", "similarity", "similarity", "classification", "classification"]
    assert [body["input_type"] for _, body in requests] == kinds
    with pytest.raises(UsageError, match=r"--rerank: .*pairs has no retrieval task"):
        next(evaluate(url, folders, settings))


def test_missing_data_and_missing_mteb_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mteb", None)
    with pytest.raises(UsageError, match="DATA: name a folder with a data set, or a task of MTEB with --mteb"):
        next(evaluate("http://127.0.0.1:9", [], EvalSettings()))
    with pytest.raises(UsageError, match=r"--mteb: needs mteb; run `pip install 'penstock\[mteb\]'`"):
        next(evaluate("http://127.0.0.1:9", [], EvalSettings(mteb=("STSBenchmark",))))
