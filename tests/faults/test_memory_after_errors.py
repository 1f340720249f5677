"""The server frees a request after its error response.

`pytest tests/faults/test_memory_after_errors.py -m slow -s` prints, for each error, the memory of the server process
before and after forty large bodies.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ..servers import MIB, Launch, Server
from ..waiting import wait_until
from .conftest import POISONED_ID
from .load import head

KEY = "a-key"
MAX_BODY = 24 * MIB
FLAGS = ("--api-key", KEY, "--max-body-bytes", str(MAX_BODY), "--max-queued-tokens", "2020")
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
        name: For the output.
        status: 0 means that the client leaves before the response.
        make: Returns the body for a number of bytes.
        headers: Additional request headers.
        num_unsent: Bytes at the end of the body that the client does not send.
        stay_s: Seconds after which a client leaves.
    """

    name: str
    status: int
    path: str = EMBED
    make: Body = LONG
    headers: dict[str, str] = field(default_factory=dict)
    num_unsent: int = 0
    stay_s: float = 0.0


CASES = (
    Case("success", 200, make=WAITING),
    Case("broken JSON", 400, make=lambda num_bytes: LONG(num_bytes)[:-2]),
    Case("wrong value", 400, make=body(input="a", encoding_format=text)),
    Case("too long", 400),
    Case("no key", 401, headers={"authorization": "Bearer none"}),
    Case("no route", 404, "/none"),
    Case("too large", 413, make=lambda _: LONG(MAX_BODY + 1)),
    Case("media type", 415, headers={"content-type": "text/plain"}),
    Case("client leaves within a body", 0, num_unsent=100),
)
CLIENT_DEADLINE = Case("client's deadline", 408, make=WAITING, headers={"x-request-timeout": "0.5"})
CLIENT_LEAVES = Case("client leaves while it waits", 0, make=WAITING, stay_s=0.5)
SERVER_DEADLINE = Case("server's deadline", 504, make=WAITING)


def send(server: Server, case: Case, content: bytes) -> int:
    """Send a request and return its status; leave after `stay_s` if the case expects none."""
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json", "connection": "close"}
    headers |= {"content-length": str(len(content)), **case.headers}
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as client:
        with contextlib.suppress(OSError):  # the server may reject an unread body
            client.sendall(head(*(f"{name}: {value}" for name, value in headers.items()), path=case.path))
            client.sendall(memoryview(content)[: len(content) - case.num_unsent])
        if not case.status:
            time.sleep(case.stay_s)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return 0
        received = client.recv(MIB)
        while client.recv(MIB):
            pass
    return int(received[9:12])


class Measurement:
    """Sends bodies and records a wrong status, or memory that does not fall to its earlier size.

    Args:
        num_bodies: Bodies of each case.
        num_bytes: Of each body.
    """

    MOST_LEFT = 60 * MIB

    def __init__(self, num_bodies: int, num_bytes: int) -> None:
        self.num_bodies, self.num_bytes = num_bodies, num_bytes
        self.wrong: list[str] = []

    def run(self, server: Server, case: Case) -> None:
        content = case.make(self.num_bytes)
        before = server.resident_bytes()
        statuses = {send(server, case, content) for _ in range(self.num_bodies)}
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: server.resident_bytes() <= before + self.MOST_LEFT, 60)
        after = server.resident_bytes()
        line = f"{case.status} {case.name} {case.path}: {before // MIB} MiB before, {after // MIB} MiB after"
        print(line, flush=True)
        if statuses != {case.status} or after > before + self.MOST_LEFT:
            self.wrong.append(f"{line}, {statuses}")


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


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_large_bodies_are_freed_after_errors(launch: Launch, small_bert: Path) -> None:
    measured = Measurement(40, 20 * MIB)
    server = launch(*FLAGS)
    for case in CASES:
        measured.run(server, case)
    impatient = launch(*FLAGS, "--request-timeout-s", "2", "--hang-timeout-s", "0")
    with stopped(impatient):
        for case in (CLIENT_DEADLINE, SERVER_DEADLINE, CLIENT_LEAVES):
            measured.run(impatient, case)

    vocabulary = json.loads((small_bert / "tokenizer.json").read_text())["model"]["vocab"]
    poison = next(word for word, number in vocabulary.items() if number == POISONED_ID)

    def poisoned(num_bytes: int) -> bytes:
        return body(input=f"{poison} {text(num_bytes)}", **CUT)(num_bytes)

    failing = Case("the model fails", 500, make=poisoned)
    measured.run(launch(*FLAGS, model=small_bert), failing)
    assert not measured.wrong


def test_bodies_are_freed_after_errors(server: Server) -> None:
    too_long, measured = Case("too long", 400), Measurement(6, 6 * MIB)
    for _ in range(2):  # the process keeps some free memory
        send(server, too_long, LONG(measured.num_bytes))
    measured.run(server, too_long)
    measured.run(server, Case("too long", 422, "/embed", body(inputs=text, truncate=False)))
    with stopped(server):
        measured.run(server, CLIENT_DEADLINE)
        measured.run(server, CLIENT_LEAVES)
    assert not measured.wrong
