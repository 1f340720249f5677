"""Bodies with many small values, and large bodies with few: other requests do not wait, and memory is bounded.

`pytest tests/faults/test_dense_bodies.py -m slow -s` prints status, longest wait and memory for each body.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable

import pytest

from ..servers import MIB, Launch, Server
from .load import head, watching

pytestmark = pytest.mark.slow
LARGEST = 16 * MIB - 4096
MODEL_TIMEOUT_S = 10
"""The test measures the server and does not wait longer for the model."""
MAX_WORK_S = 0.25
"""Limit of the processor time during one probe, on two cores."""


def send(server: Server, path: str, body: bytes, *, num_parts: int = 1, pause_s: float = 0.0) -> tuple[int, bytes]:
    """Send a body, optionally in parts with pauses. Returns the status and the start of the response body."""
    lines = (f"Content-Length: {len(body)}", "Connection: close", f"x-request-timeout: {MODEL_TIMEOUT_S}")
    size = -(-len(body) // num_parts)
    received = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as client:
        try:
            client.sendall(head(*lines, path=path))
            for start in range(0, len(body), size):
                client.sendall(memoryview(body)[start : start + size])
                time.sleep(pause_s)
        except ConnectionError:  # refused before its end
            pass
        try:
            while part := client.recv(MIB):
                received = (received + part)[:2_000]
        except ConnectionError:
            pass
    return int(received[9:12] or 0), received.partition(b"\r\n\r\n")[2]


def send_together(server: Server, path: str, bodies: list[bytes], **options: float) -> None:
    threads = [threading.Thread(target=send, args=(server, path, body), kwargs=options) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def filled(start: bytes, unit: bytes, end: bytes, num_bytes: int = LARGEST) -> bytes:
    """`start`, repetitions of `unit` without the last comma, and `end`."""
    return start + (unit * ((num_bytes - len(start) - len(end)) // len(unit))).rstrip(b",") + end


def keys(width: int, num_bytes: int) -> bytes:
    """An object with keys of this width."""
    return b'{"input":"a",' + b",".join(b'"%0*d":1' % (width, i) for i in range(num_bytes // (width + 5))) + b"}"


PROSE = b"It is 5 o'clock, and the gate holds the water; the pipe, which is old, carries it away. "
IGNORED = b'{"input":"a","user":'
INPUT = b'{"input":['
BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "ignored []": ("/v1/embeddings", lambda: filled(IGNORED + b"[", b"[],", b"]}")),
    "documents {}": ("/rerank", lambda: filled(b'{"query":"a","documents":[', b"{},", b"]}")),
    "input [5] in 900 kB": ("/v1/embeddings", lambda: filled(INPUT, b"[5],", b"]}", 900_000)),
    "input texts": ("/v1/embeddings", lambda: filled(INPUT, b'"a",', b"]}")),
    "input objects": ("/v1/embeddings", lambda: filled(INPUT, b'{"text":"a"},', b"]}")),
    "deep input": ("/v1/embeddings", lambda: b'{"input":' + b"[" * (LARGEST // 2) + b"]" * (LARGEST // 2) + b"}"),
    "deep ignored": ("/v1/embeddings", lambda: filled(IGNORED + b"[", b"[" * 900 + b"]" * 900 + b",", b"]}", MIB)),
    "many keys": ("/v1/embeddings", lambda: keys(7, LARGEST)),
    "long keys": ("/v1/embeddings", lambda: keys(1_000_000, LARGEST)),
    "floats": ("/v1/embeddings", lambda: filled(INPUT, b"1.7976931348623157e-300,", b"]}")),
    "one number": ("/v1/embeddings", lambda: filled(b'{"input":', b"7", b"}")),
    "blanks": ("/v1/embeddings", lambda: filled(b'{"input":"a"', b" ", b"}")),
    "one text": ("/embed", lambda: filled(b'{"inputs":"', PROSE, b'"}')),
    "one text of escapes": ("/embed", lambda: filled(b'{"inputs":"', b"\\u00e9", b'"}')),
    "texts": ("/embed", lambda: filled(b'{"inputs":[', b'"' + PROSE * 190 + b'",', b"]}")),
    "1,000,000 ids": ("/v1/embeddings", lambda: json.dumps({"input": [list(range(1000, 1512))] * 2048}).encode()),
    "900,000 ids in one list": ("/detokenize", lambda: json.dumps({"tokens": [1000] * 900_000}).encode()),
    "chats": ("/v1/embeddings", lambda: filled(b'{"messages":[[', b'{"role":"user","content":"a"},', b"]]}")),
    "admitted objects": ("/v1/embeddings", lambda: IGNORED + b"[[" + b'{"a":1},' * 105_000 + b"1]]}"),
    "admitted floats": ("/v1/embeddings", lambda: IGNORED + b"[[" + b"1.7976931348623157e-300," * 1_990_000 + b"1]]}"),
    "admitted keys": (
        "/score",
        lambda: b'{"text_1":"a","text_2":"b","chat_template_kwargs":' + keys(7, 2_000_000) + b"}",
    ),
    "no end": ("/v1/embeddings", lambda: filled(INPUT, b'"' + PROSE * 190 + b'",', b"")),
    "no JSON": ("/v1/embeddings", lambda: b"x" * LARGEST),
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


def test_three_dense_bodies_together_are_bounded(small_server: Server) -> None:
    bodies = [BODIES[name][1]() for name in ("ignored []", "documents {}", "texts")]
    with watching(small_server, "three together") as seen:
        send_together(small_server, "/v1/embeddings", bodies)
    assert seen.busiest_s < MAX_WORK_S
    assert seen.grown < 8 * sum(map(len, bodies))


def test_ten_slow_dense_bodies_do_not_block_the_event_loop(small_server: Server) -> None:
    with watching(small_server, "ten slow bodies") as seen:
        send_together(small_server, "/embed", [BODIES["ignored []"][1]()] * 10, num_parts=40, pause_s=0.05)
    assert seen.busiest_s < MAX_WORK_S


@pytest.mark.parametrize(
    ("unit", "num_bytes"), [(b"[]", 60_000), (b'{"a":1}', 240_000), (b'"ab"', 600_000), (b"999", 600_000)]
)
def test_many_small_dense_bodies_are_bounded(small_server: Server, unit: bytes, num_bytes: int) -> None:
    """Documents keep their unknown fields until the response."""
    texts = b",".join([b'"' + b"a b " * 2_000 + b'"'] * 2)
    body = filled(b'{"query":"a","documents":[%b,{"text":"a","x":[' % texts, unit + b",", b"]}]}", num_bytes)
    with watching(small_server, f"64 bodies of {num_bytes} bytes with {unit.decode()}") as seen:
        send_together(small_server, "/rerank", [body] * 64)
    assert seen.busiest_s < MAX_WORK_S
    assert seen.grown < 64 * MIB + 8 * 64 * len(body)
