"""The server process frees a request after its error response; tests/server has all kinds of errors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..servers import MIB, Server
from ..waiting import wait_until
from .load import head

KEY = "a-key"
NUM_BYTES, MOST_LEFT = 6 * MIB, 60 * MIB
EMBED = "/v1/embeddings"
CUT = {"truncate_prompt_tokens": -1}
Body = Callable[[int], bytes]


def text(num_bytes: int) -> str:
    """A text of this size in UTF-8. Its last character makes Python use four bytes for each character."""
    return "a b " * (num_bytes // 4 - 1) + "\N{WATER WAVE}"


def body(**fields: object) -> Body:
    """A JSON object. A field with the value `text` gets a long text."""

    def make(num_bytes: int) -> bytes:
        filled = {name: text(num_bytes) if value is text else value for name, value in fields.items()}
        return json.dumps(filled, ensure_ascii=False).encode()

    return make


LONG = body(input=text)
WAITING = body(input=text, **CUT)


@dataclass(frozen=True)
class Case:
    """A request and its expected status.

    Attributes:
        status: 0 means that the client leaves before the response.
        make: Returns the body for a number of bytes.
        headers: Additional request headers.
        stay_s: Seconds after which a client leaves.
    """

    status: int
    path: str = EMBED
    make: Body = LONG
    headers: dict[str, str] = field(default_factory=dict)
    stay_s: float = 0.0


def send(server: Server, case: Case, content: bytes) -> int:
    """Send a request and return its status; leave after `stay_s` if the case expects none."""
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json", "connection": "close"}
    headers |= {"content-length": str(len(content)), **case.headers}
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as client:
        with contextlib.suppress(OSError):  # the server may reject an unread body
            client.sendall(head(*(f"{name}: {value}" for name, value in headers.items()), path=case.path))
            client.sendall(content)
        if not case.status:
            time.sleep(case.stay_s)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return 0
        received = client.recv(MIB)
        while client.recv(MIB):
            pass
    return int(received[9:12])


def check(server: Server, case: Case) -> None:
    """Send large bodies: the status is right, and the memory falls to its earlier size."""
    content, limit = case.make(NUM_BYTES), server.resident_bytes() + MOST_LEFT
    assert {send(server, case, content) for _ in range(6)} == {case.status}
    wait_until(lambda: server.resident_bytes() <= limit, 60)


@contextlib.contextmanager
def stopped(server: Server) -> Iterator[None]:
    """Stop the engine of a server for a while."""
    children = server.children()
    for child in children:
        os.kill(child, signal.SIGSTOP)
    try:
        yield
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGCONT)


def test_bodies_are_freed_after_errors(server: Server) -> None:
    for _ in range(2):  # the process keeps some free memory
        send(server, Case(400), LONG(NUM_BYTES))
    check(server, Case(400))
    check(server, Case(422, "/embed", body(inputs=text, truncate=False)))
    with stopped(server):
        check(server, Case(408, make=WAITING, headers={"x-request-timeout": "0.5"}))
        check(server, Case(0, make=WAITING, stay_s=0.5))
