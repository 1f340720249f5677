"""Large, empty, wrong and abandoned requests: a correct answer or a clear error, and the next request succeeds."""

import json
import re
import socket
import time
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from ..waiting import wait_until


@pytest.fixture(autouse=True)
def _next_request_succeeds(server) -> Iterator[None]:
    yield
    response = server.embed("and now?")
    assert response.status_code == 200
    assert np.linalg.norm(response.json()["data"][0]["embedding"]) == pytest.approx(1, abs=1e-5)


def test_2048_inputs_keep_their_order(server) -> None:
    texts = [f"text {i}" for i in range(2048)]
    answer = server.embed(texts).json()
    assert [row["index"] for row in answer["data"]] == list(range(2048))
    for i in (0, 1000, 2047):
        alone = server.embed(texts[i]).json()["data"][0]["embedding"]
        np.testing.assert_allclose(answer["data"][i]["embedding"], alone, atol=1e-6)


@pytest.mark.parametrize("unit", ["a", "word ", "東京", " "])
def test_text_of_1_mb_is_refused_or_cut(http: httpx.Client, unit: str) -> None:
    text = unit * (1_000_000 // len(unit.encode()))
    response = http.post("/v1/embeddings", json={"input": text})
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        assert "maximum context length is 256 tokens" in response.json()["error"]["message"]
    assert http.post("/v1/embeddings", json={"input": text, "truncate_prompt_tokens": -1}).status_code == 200


def raw_request(body: bytes, length: int | None = None) -> bytes:
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: {length or len(body)}\r\n\r\n"
    return head.encode() + body


def test_clients_that_hang_up_end_their_requests(server, http: httpx.Client) -> None:
    body = json.dumps({"input": [f"a text that takes a while {i} " * 30 for i in range(1000)]}).encode()
    half = raw_request(b'{"input": "ha', length=1000)
    for content, wait_s in ((raw_request(body), 0.0), (raw_request(body), 0.1), (raw_request(body), 0.3), (half, 0.0)):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(content)
            time.sleep(wait_s)
    cancelled = re.compile(r'penstock_http_requests_total\{.*route="/v1/embeddings",status="499"\}')
    wait_until(lambda: cancelled.search(http.get("/metrics").text))
    wait_until(lambda: server.metric("penstock_engine_requests") == 0)
