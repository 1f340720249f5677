"""One curl per route, as the README shows them."""

import json
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def curl(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        ["curl", "--silent", "--show-error", "--write-out", "\n%{http_code}", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    body, _, status = done.stdout.rpartition("\n")
    return int(status), body


def post(url: str, body: dict) -> tuple[int, dict]:
    status, text = curl(url, "-H", "Content-Type: application/json", "-d", json.dumps(body))
    return status, json.loads(text)


def test_post_routes(server) -> None:
    query, documents = "What holds back the water?", ["A song.", "A gate holds back the water."]
    status, answer = post(f"{server.url}/v1/embeddings", {"input": documents})
    assert (status, len(answer["data"]), len(answer["data"][0]["embedding"])) == (200, 2, 384)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        status, answer = post(server.url + path, {"query": query, "documents": documents})
        assert (status, answer["results"][0]["index"]) == (200, 1)
    for path in ("/score", "/v1/score"):
        status, answer = post(server.url + path, {"text_1": query, "text_2": documents})
        assert status == 200
        assert answer["data"][1]["score"] > answer["data"][0]["score"]
    for path in ("/classify", "/v1/classify"):
        status, answer = post(server.url + path, {"input": "I love this!", "labels": ["praise", "complaint"]})
        assert (status, answer["data"][0]["label"]) == (200, "praise")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v1/models/all-MiniLM-L6-v2",
        "/health",
        "/health/live",
        "/health/ready",
        "/metrics",
        "/docs",
        "/version",
    ],
)
def test_get_routes(server, path: str) -> None:
    status, body = curl(server.url + path)
    assert status == 200
    assert body


def test_without_the_header_curl_sends_a_form_and_is_told_so(server) -> None:
    status, body = curl(f"{server.url}/v1/embeddings", "-d", '{"input": "a"}')
    assert status == 415
    assert "application/json" in json.loads(body)["message"]


def test_a_chunked_body(server, tmp_path) -> None:
    (tmp_path / "body.json").write_text(json.dumps({"input": "a"}))
    status, _ = curl(
        f"{server.url}/v1/embeddings",
        *("-H", "Content-Type: application/json", "-H", "Transfer-Encoding: chunked"),
        *("--data-binary", f"@{tmp_path / 'body.json'}"),
    )
    assert status == 200
