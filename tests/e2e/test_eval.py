"""`penstock eval` against a real server."""

import json
from pathlib import Path

import httpx
import pytest

TEXTS = {"1": "A dam holds back water.", "2": "A song about the sea.", "3": "Bread rises in the oven."}
QUERIES = {"q1": "Which wall holds back water?", "q2": "How does a baker make bread?"}


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """A retrieval and a similarity data set."""
    retrieval, similarity = tmp_path / "retrieval", tmp_path / "similarity"
    (retrieval / "qrels").mkdir(parents=True)
    similarity.mkdir()
    for name, texts in (("corpus", TEXTS), ("queries", QUERIES)):
        rows = [json.dumps({"_id": key, "text": text}) for key, text in texts.items()]
        (retrieval / f"{name}.jsonl").write_text("\n".join(rows))
    (retrieval / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\t1\t1\nq2\t3\t1\n")
    pairs = [("A dam.", "A wall in a river.", 4), ("A dam.", "A song.", 1), ("A cat.", "A cat.", 5)]
    rows = [json.dumps({"sentence1": a, "sentence2": b, "score": score}) for a, b, score in pairs]
    (similarity / "test.jsonl").write_text("\n".join(rows))
    return [str(retrieval), str(similarity)]


def test_each_data_set_gives_a_line_of_scores(folders: list[str], run, server, http: httpx.Client) -> None:
    done = run("eval", server.url, *folders, "--texts-per-request", "2")
    assert done.returncode == 0, done.stderr
    retrieval, similarity = map(json.loads, done.stdout.splitlines())
    model = http.get("/v1/models").json()["data"][0]["id"]
    assert (retrieval["model"], retrieval["dimensions"], retrieval["queries"]) == (model, 384, 2)
    assert list(retrieval["scores"].values()) == [1.0] * 5
    assert (similarity["task"], similarity["pairs"], similarity["scores"]) == ("similarity", 3, {"spearman": 1.0})
    done = run("eval", f"{server.url}/v1", folders[0], "--rerank", model, "--rerank-top-k", "2")
    report = json.loads(done.stdout)
    assert (report["reranker"], report["reranked_scores"]["ndcg_at_10"]) == (model, 1.0)


def test_errors_have_a_reason_and_keep_earlier_results(folders: list[str], run, server) -> None:
    (Path(folders[1]) / "test.jsonl").write_text(
        '{"sentence1": "a", "sentence2": "' + "word " * 4_000_000 + '", "score": 1}\n'
        '{"sentence1": "a", "sentence2": "b", "score": 2}'
    )
    done = run("eval", server.url, *folders)  # the second body is above --max-body-bytes
    assert done.returncode == 1
    assert json.loads(done.stdout)["data"] == "retrieval"
    assert "413" in done.stderr.splitlines()[-1]

    done = run("eval", server.url, folders[0], "--model", "nope")
    assert (done.returncode, done.stdout) == (1, "")
    assert "The model 'nope' does not exist" in done.stderr
