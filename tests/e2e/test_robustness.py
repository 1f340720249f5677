"""Requests that are large, empty, wrong or abandoned: a right answer or a clear error, and the next request works."""

import json
import re
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _the_next_request_works(http: httpx.Client) -> Iterator[None]:
    yield
    response = http.post("/v1/embeddings", json={"input": "and now?"})
    assert response.status_code == 200
    assert np.linalg.norm(response.json()["data"][0]["embedding"]) == pytest.approx(1, abs=1e-5)


def test_2048_inputs(http: httpx.Client) -> None:
    texts = [f"text {i}" for i in range(2048)]
    answer = http.post("/v1/embeddings", json={"input": texts}).json()
    assert [row["index"] for row in answer["data"]] == list(range(2048))
    for i in (0, 1000, 2047):
        alone = http.post("/v1/embeddings", json={"input": texts[i]}).json()["data"][0]["embedding"]
        np.testing.assert_allclose(answer["data"][i]["embedding"], alone, atol=1e-6)


@pytest.mark.parametrize("text", ["", " ", "\n", "\x00", "\ufeff", "\U0010ffff"])
def test_odd_texts_have_a_vector(http: httpx.Client, text: str) -> None:
    row = http.post("/v1/embeddings", json={"input": text}).json()["data"][0]["embedding"]
    assert np.isfinite(row).all()


@pytest.mark.parametrize("unit", ["a", "word ", "東京", " "])
def test_a_text_of_1_mb(http: httpx.Client, unit: str) -> None:
    text = unit * (1_000_000 // len(unit.encode()))
    response = http.post("/v1/embeddings", json={"input": text})
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        assert "maximum context length is 256 tokens" in response.json()["error"]["message"]
    cut = http.post("/v1/embeddings", json={"input": text, "truncate_prompt_tokens": -1})
    assert cut.status_code == 200


@pytest.mark.parametrize(
    ("content", "status", "part"),
    [
        (b"", 400, "empty"),
        (b'{"input": [30522]}', 400, "out of vocabulary"),
        (b'{"input": "\\ud800"}', 400, "not valid JSON"),
    ],
)
def test_wrong_bodies(http: httpx.Client, content: bytes, status: int, part: str) -> None:
    response = http.post("/v1/embeddings", content=content)
    assert response.status_code == status
    assert part in response.json()["error"]["message"]


def raw_request(body: bytes, length: int | None = None) -> bytes:
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: {length or len(body)}\r\n\r\n"
    return head.encode() + body


def test_a_body_above_the_limit_is_refused_by_its_length(server) -> None:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(raw_request(b"", length=10**9))
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


def metric(http: httpx.Client, line: str) -> float:
    values = [row.rpartition(" ")[2] for row in http.get("/metrics").text.splitlines() if row.startswith(line)]
    return float(values[0]) if values else 0.0


def test_clients_that_hang_up(server, http: httpx.Client) -> None:
    address = urlsplit(server.url)
    body = json.dumps({"input": [f"a text that takes a while {i} " * 30 for i in range(1000)]}).encode()
    for wait_s in (0.0, 0.1, 0.3):
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall(raw_request(body))
            time.sleep(wait_s)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(raw_request(b'{"input": "ha', length=1000))  # hangs up in the middle of the body
    give_up_s = time.monotonic() + 120
    # Whether they have gone is asked a second after their requests were whole; texts are tokenized meanwhile.
    gone = re.compile(r'penstock_http_requests_total\{.*route="/v1/embeddings",status="499"\}')
    while not gone.search(http.get("/metrics").text) or metric(http, "penstock_engine_requests{") > 0:
        assert time.monotonic() < give_up_s, "abandoned work went on"
        time.sleep(0.05)


def test_garbage_instead_of_http(server) -> None:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert b"400" in connection.recv(1000)
