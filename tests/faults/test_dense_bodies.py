"""Bodies with many small values, and large bodies with few: other requests do not wait, and memory is bounded.

`pytest tests/faults/test_dense_bodies.py -m slow -s` prints status, longest wait and memory for each body.
"""

import json
import socket
from collections.abc import Callable

import pytest

from ..servers import MIB, Launch, Server
from .load import MAX_WORK_S, head, watching

pytestmark = pytest.mark.slow
LARGEST = 16 * MIB - 4096
MODEL_TIMEOUT_S = 10
"""The test measures the server and does not wait longer for the model."""


def send(server: Server, path: str, body: bytes) -> tuple[int, bytes]:
    """Send a body. Returns the status and the start of the response body."""
    lines = (f"Content-Length: {len(body)}", "Connection: close", f"x-request-timeout: {MODEL_TIMEOUT_S}")
    received = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as client:
        try:
            client.sendall(head(*lines, path=path))
            client.sendall(body)
        except ConnectionError:  # rejected before its end
            pass
        try:
            while part := client.recv(MIB):
                received = (received + part)[:2_000]
        except ConnectionError:
            pass
    return int(received[9:12] or 0), received.partition(b"\r\n\r\n")[2]


def filled(start: bytes, unit: bytes, end: bytes, num_bytes: int = LARGEST) -> bytes:
    """`start`, repetitions of `unit` without the last comma, and `end`."""
    return start + (unit * ((num_bytes - len(start) - len(end)) // len(unit))).rstrip(b",") + end


def many_keys() -> bytes:
    return b'{"input":"a",' + b",".join(b'"%07d":1' % i for i in range(LARGEST // 12)) + b"}"


PROSE = b"It is 5 o'clock, and the gate holds the water; the pipe, which is old, carries it away. "
IGNORED = b'{"input":"a","user":'
INPUT = b'{"input":['
BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "ignored []": ("/v1/embeddings", lambda: filled(IGNORED + b"[", b"[],", b"]}")),
    "documents {}": ("/rerank", lambda: filled(b'{"query":"a","documents":[', b"{},", b"]}")),
    "input texts": ("/v1/embeddings", lambda: filled(INPUT, b'"a",', b"]}")),
    "deep input": ("/v1/embeddings", lambda: b'{"input":' + b"[" * (LARGEST // 2) + b"]" * (LARGEST // 2) + b"}"),
    "many keys": ("/v1/embeddings", many_keys),
    "one number": ("/v1/embeddings", lambda: filled(b'{"input":', b"7", b"}")),
    "one text": ("/embed", lambda: filled(b'{"inputs":"', PROSE, b'"}')),
    "texts": ("/embed", lambda: filled(b'{"inputs":[', b'"' + PROSE * 190 + b'",', b"]}")),
    "1,000,000 ids": ("/v1/embeddings", lambda: json.dumps({"input": [list(range(1000, 1512))] * 2048}).encode()),
    "admitted objects": ("/v1/embeddings", lambda: IGNORED + b"[[" + b'{"a":1},' * 105_000 + b"1]]}"),
    "no end": ("/v1/embeddings", lambda: filled(INPUT, b'"' + PROSE * 190 + b'",', b"")),
}


@pytest.fixture(scope="module")
def small_server(launch: Launch, small_bert: object) -> Server:
    """A model that takes little time."""
    server = launch(model=small_bert)
    server.embed(["warm"] * 1000)
    return server


@pytest.mark.parametrize("name", BODIES)
def test_dense_body_does_not_block_the_event_loop(small_server: Server, name: str) -> None:
    path, make = BODIES[name]
    body = make()
    with watching(small_server, name) as seen:
        status, start = send(small_server, path, body)
    print(f"{len(body) / MIB:.1f} MiB: {status} {start[:140]!r}")
    assert status in (200, 400, 408, 413, 422)
    assert seen.busiest_s < MAX_WORK_S
