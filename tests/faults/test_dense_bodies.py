"""Bodies that are small and hold much, or large and hold little: nobody waits long for them, and they fit the memory.

`pytest tests/faults/test_dense_bodies.py -m slow -s` prints, for each shape, the status that it gets, the longest wait
of a GET /health/live meanwhile, how much of it the server's event loop worked, and what its memory grew by. The first
is what clients see on a machine that has nothing else to do, the second is the same on every machine.
"""

from __future__ import annotations

import http.client
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from .conftest import MIB, Launch, Server

pytestmark = pytest.mark.slow
LARGEST = 16 * MIB - 4096
GIVEN_UP_S = 10
"""After which nobody waits for the model: what is measured is the server."""
MAX_STALL_S = 0.25
"""Seconds. The goal for the longest wait, on two cores."""


@dataclass
class Seen:
    """What was seen of a server while it was sent something.

    Attributes:
        longest_s: Of the waits for GET /health/live.
        busiest_s: Processor time that the event loop's thread had during one of them.
        grown: Bytes of memory, at the most.
    """

    longest_s: float = 0.0
    busiest_s: float = 0.0
    grown: int = 0


@contextmanager
def watching(server: Server) -> Iterator[Seen]:
    """Ask for the health of a server all the time, from a thread that does nothing else."""
    seen, done, process = Seen(), threading.Event(), Path(f"/proc/{server.process.pid}")
    before = int((process / "statm").read_text().split()[1]) * resource.getpagesize()
    (process / "clear_refs").write_text("5")  # its largest resident size is looked for anew

    def worked() -> float:
        return int((process / "task" / process.name / "schedstat").read_text().split()[0]) / 1e9

    def watch() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        while not done.is_set():
            began_s, worked_s = time.monotonic(), worked()
            connection.request("GET", "/health/live")
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200
            seen.longest_s = max(seen.longest_s, time.monotonic() - began_s)
            seen.busiest_s = max(seen.busiest_s, worked() - worked_s)
            time.sleep(0.005)
        connection.close()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        time.sleep(0.2)
        yield seen
        time.sleep(0.3)
    finally:
        done.set()
        thread.join()
    lines = (process / "status").read_text().splitlines()
    seen.grown = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) - before


def send(server: Server, path: str, body: bytes, *, pieces: int = 1, pause_s: float = 0.0) -> tuple[int, bytes]:
    """Post a body, in pieces with pauses between them; return the status and the beginning of the answer."""
    lines = (f"Content-Length: {len(body)}", "Connection: close", f"x-request-timeout: {GIVEN_UP_S}")
    head = "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as client:
        client.sendall(head)
        size = -(-len(body) // pieces)
        try:
            for start in range(0, len(body), size):
                client.sendall(memoryview(body)[start : start + size])
                time.sleep(pause_s)
        except ConnectionError:  # refused before its end
            pass
        answer = b""
        try:
            while received := client.recv(MIB):
                answer = (answer + received)[:2_000]
        except ConnectionError:
            pass
    return int(answer[9:12] or 0), answer.partition(b"\r\n\r\n")[2]


def filled(start: bytes, unit: bytes, end: bytes, num_bytes: int = LARGEST) -> bytes:
    """`start`, `unit` again and again, and `end`, in which the last unit's comma is left out."""
    return start + (unit * ((num_bytes - len(start) - len(end)) // len(unit))).rstrip(b",") + end


def nested(unit: bytes, number: int) -> bytes:
    """An ignored list in a list, so that its entries are not counted, with nearly as many as are taken."""
    return IGNORED + b"[[" + (unit * number).rstrip(b",") + b"]]}"


def keys(width: int, num_bytes: int) -> bytes:
    """An object of as many keys."""
    return b'{"input":"a",' + b",".join(b'"%0*d":1' % (width, i) for i in range(num_bytes // (width + 5))) + b"}"


PROSE = b"It is 5 o'clock, and the gate holds the water; the pipe, which is old, carries it away. "
TABLE = rb"{\"a\":[1,2,3],\"b\":\"x, y\"},"
IGNORED = b'{"input":"a","user":'
SHAPES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "ignored [],": ("/v1/embeddings", lambda: filled(IGNORED + b"[", b"[],", b"]}")),
    "unknown [],": ("/v1/embeddings", lambda: filled(b'{"input":"a","zzz":[', b"[],", b"]}")),
    "documents {},": ("/rerank", lambda: filled(b'{"query":"a","documents":[', b"{},", b"]}")),
    "documents {} in 4 MB": ("/rerank", lambda: filled(b'{"query":"a","documents":[', b"{},", b"]}", 4 * MIB)),
    "input [5],": ("/v1/embeddings", lambda: filled(b'{"input":[', b"[5],", b"]}", 4 * MIB)),
    "input [5], in 900 kB": ("/v1/embeddings", lambda: filled(b'{"input":[', b"[5],", b"]}", 900_000)),
    'input "a",': ("/v1/embeddings", lambda: filled(b'{"input":[', b'"a",', b"]}")),
    'input "a", in 3 MB': ("/v1/embeddings", lambda: filled(b'{"input":[', b'"a",', b"]}", 3 * MIB)),
    'input {"text":"a"},': ("/v1/embeddings", lambda: filled(b'{"input":[', b'{"text":"a"},', b"]}")),
    "inputs of pairs": ("/predict", lambda: filled(b'{"inputs":[', b'["a","b"],', b"]}")),
    "input deep": ("/v1/embeddings", lambda: b'{"input":' + b"[" * (LARGEST // 2) + b"]" * (LARGEST // 2) + b"}"),
    "ignored deep": ("/v1/embeddings", lambda: filled(IGNORED + b"[", b"[" * 900 + b"]" * 900 + b",", b"]}", MIB)),
    "deep objects": (
        "/v1/embeddings",
        lambda: filled(IGNORED + b"[", b'{"a":' * 500 + b"1" + b"}" * 500 + b",", b"]}"),
    ),
    "many keys": ("/v1/embeddings", lambda: keys(7, LARGEST)),
    "many keys in 900 kB": ("/v1/embeddings", lambda: keys(7, 900_000)),
    "long keys": ("/v1/embeddings", lambda: keys(65, LARGEST)),
    "keys of a megabyte": ("/v1/embeddings", lambda: keys(1_000_000, LARGEST)),
    "floats": ("/v1/embeddings", lambda: filled(b'{"input":[', b"1.7976931348623157e-300,", b"]}")),
    "a number of 16 MB": ("/v1/embeddings", lambda: filled(b'{"input":', b"7", b"}")),
    "null, null": ("/v1/embeddings", lambda: filled(b'{"input":[', b"null,", b"]}")),
    "blanks": ("/v1/embeddings", lambda: filled(b'{"input":"a"', b" ", b"}")),
    "one text of letters": ("/embed", lambda: filled(b'{"inputs":"', b"a", b'"}')),
    "one text of prose": ("/embed", lambda: filled(b'{"inputs":"', PROSE, b'"}')),
    "one text, escaped": ("/embed", lambda: filled(b'{"inputs":"', b"\\u00e9", b'"}')),
    "one text of backslashes": ("/embed", lambda: filled(b'{"inputs":"', b"\\\\", b'"}')),
    "one text of emoji": ("/embed", lambda: filled(b'{"inputs":"', "😀".encode(), b'"}')),
    "one text, escaped emoji": ("/embed", lambda: filled(b'{"inputs":"', b"\\ud83d\\ude00", b'"}')),
    "letters and an emoji": ("/embed", lambda: filled(b'{"inputs":"', b"a", "😀".encode() + b'"}')),
    "16 MB of prose": ("/embed", lambda: filled(b'{"inputs":[', b'"' + PROSE * 190 + b'",', b"]}")),
    "16 MB of prose to rank": (
        "/rerank",
        lambda: filled(b'{"query":"a","documents":[', b'{"text":"' + PROSE * 190 + b'"},', b"]}"),
    ),
    "16 MB of JSON as text": ("/embed", lambda: filled(b'{"inputs":[', b'"' + TABLE * 550 + b'",', b"]}")),
    "2,048 x 512 ids": (
        "/v1/embeddings",
        lambda: json.dumps({"input": [[1000 + i for i in range(512)]] * 2048}).encode(),
    ),
    "900,000 ids in one": (
        "/detokenize",
        lambda: json.dumps({"tokens": [1000 + i % 20_000 for i in range(900_000)]}).encode(),
    ),
    "chats": ("/v1/embeddings", lambda: filled(b'{"messages":[[', b'{"role":"user","content":"a"},', b"]]}")),
    "let in: lists": ("/v1/embeddings", lambda: nested(b"[],", 220_000)),
    "let in: objects": ("/v1/embeddings", lambda: nested(b'{"a":1},', 105_000)),
    "let in: texts": ("/v1/embeddings", lambda: nested(b'"a",', 220_000)),
    "let in: words": ("/v1/embeddings", lambda: nested(b"null,", 1_990_000)),
    "let in: floats": ("/v1/embeddings", lambda: nested(b"1.7976931348623157e-300,", 1_990_000)),
    "let in: keys": (
        "/score",
        lambda: b'{"text_1":"a","text_2":"b","chat_template_kwargs":' + keys(7, 2_000_000) + b"}",
    ),
    "let in: chats": (
        "/v1/embeddings",
        lambda: b'{"messages":[[' + b",".join([b'{"role":"user","content":"a"}'] * 45_000) + b"]]}",
    ),
    "let in: ids with floats": ("/v1/embeddings", lambda: b'{"input":[' + b",".join([b"[5.0,6,7.0]"] * 4_000) + b"]}"),
    "no end": ("/v1/embeddings", lambda: filled(b'{"input":[', b'"' + PROSE * 190 + b'",', b"")),
    "no JSON": ("/v1/embeddings", lambda: b"x" * LARGEST),
}


@pytest.fixture(scope="module")
def small_server(launch: Launch, small_bert: object) -> Server:
    """A model that costs nothing: what is measured is the server."""
    server = launch(model=small_bert)
    send(server, "/embed", json.dumps({"inputs": ["warm"] * 1000}).encode())
    return server


@pytest.mark.parametrize("name", SHAPES)
def test_nobody_waits_long_beside_a_dense_body(small_server: Server, name: str) -> None:
    path, make = SHAPES[name]
    body = make()
    with watching(small_server) as seen:
        began_s = time.monotonic()
        status, answer = send(small_server, path, body)
        took_s = time.monotonic() - began_s
    report(name, seen, len(body), f"{status} after {took_s:.1f} s {answer[:140]!r}")
    assert status in (200, 400, 408, 413, 422)
    assert seen.busiest_s < MAX_STALL_S


def test_three_dense_bodies_at_once(small_server: Server) -> None:
    bodies = [SHAPES[name][1]() for name in ("ignored [],", "documents {},", "16 MB of prose")]
    with watching(small_server) as seen:
        threads = [threading.Thread(target=send, args=(small_server, "/v1/embeddings", body)) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    report("three at once", seen, sum(map(len, bodies)))
    assert seen.busiest_s < MAX_STALL_S
    assert seen.grown < 8 * sum(map(len, bodies))


def test_ten_dense_bodies_that_come_slowly(small_server: Server) -> None:
    body = filled(IGNORED + b"[", b"[],", b"]}")
    with watching(small_server) as seen:
        threads = [
            threading.Thread(target=send, args=(small_server, "/embed", body), kwargs={"pieces": 40, "pause_s": 0.05})
            for _ in range(10)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    report("ten that come slowly", seen, 10 * len(body))
    assert seen.busiest_s < MAX_STALL_S


@pytest.mark.parametrize("num_bytes", [60_000, 240_000, 600_000])
@pytest.mark.parametrize("unit", [b"[]", b'{"a":1}', b'"ab"', b"999"])
def test_many_dense_bodies_that_are_small(small_server: Server, unit: bytes, num_bytes: int) -> None:
    """Documents keep all that they were sent with until they are answered."""
    texts = b",".join([b'"' + b"a b " * 2_000 + b'"'] * 2)
    body = b'{"query":"a","documents":[%b,{"text":"a","x":[' % texts
    body = filled(body, unit + b",", b"]}]}", num_bytes)
    with watching(small_server) as seen:
        threads = [threading.Thread(target=send, args=(small_server, "/rerank", body)) for _ in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    report(f"64 x {num_bytes} of {unit.decode()}", seen, 64 * len(body))
    assert seen.busiest_s < MAX_STALL_S
    assert seen.grown < 64 * MIB + 8 * 64 * len(body)


def report(name: str, seen: Seen, num_bytes: int, said: str = "") -> None:
    """Print what was seen of one shape."""
    print(
        f"\n{name}: {num_bytes / MIB:.1f} MiB, longest wait {1000 * seen.longest_s:.0f} ms "
        f"({1000 * seen.busiest_s:.0f} ms of work), "
        f"memory {seen.grown / MIB:+.0f} MiB ({seen.grown / num_bytes:.1f} x) {said}"
    )
