"""The server frees a request after its error response.

`pytest tests/faults/test_memory_after_errors.py -m slow -s` prints, for each error, the memory of the server process
before and after forty large bodies.
"""

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
from pathlib import Path

import pytest

from ..servers import MIB, Launch, Server
from ..waiting import wait_until
from .conftest import POISONED_ID
from .load import head

KEY = "a-key"
MAX_BODY = 24 * MIB
FORM = {"content-type": "multipart/form-data; boundary=B"}
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


def too_many_inputs(num_bytes: int) -> bytes:
    return json.dumps({"input": [text(num_bytes // 5000)] * 5000}, ensure_ascii=False).encode()


def too_many_values(num_bytes: int) -> bytes:
    return b'{"input": [' + b"[1]," * (num_bytes // 4 - 10) + b"[1]]}"


def form(num_bytes: int) -> bytes:
    """A complete form with a file and without its purpose."""
    start = b'--B\r\nContent-Disposition: form-data; name="file"; filename="f.jsonl"\r\n\r\n'
    return start + b"a" * num_bytes + b"\r\n--B--\r\n"


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
        share: This case sends the usual number of bodies divided by `share`.
    """

    name: str
    status: int
    path: str = EMBED
    make: Body = LONG
    headers: dict[str, str] = field(default_factory=dict)
    num_unsent: int = 0
    stay_s: float = 0.0
    share: int = 1


CASES = (
    Case("success", 200, make=WAITING),
    Case("broken JSON", 400, make=lambda n: LONG(n)[:-2]),
    Case("wrong type", 400, make=body(input={"a": text(100)}, user=text)),
    Case("wrong value", 400, make=body(input="a", encoding_format=text)),
    Case("unknown key", 400, make=body(input="a", no_such_key=text)),
    Case("too long", 400),
    Case("too many inputs", 400, make=too_many_inputs),
    Case("wrong header", 400, make=WAITING, headers={"x-request-timeout": "soon"}),
    Case("no key", 401, headers={"authorization": "Bearer none"}),
    Case("no model", 404, make=body(model="none", input=text)),
    Case("no route", 404, "/none"),
    Case("no method", 405, "/v1/models"),
    Case("too large", 413, make=lambda n: LONG(MAX_BODY + 1)),
    Case("too large in chunks", 413, make=lambda n: LONG(MAX_BODY + 1), headers={"transfer-encoding": "chunked"}),
    Case("too many values", 413, make=too_many_values),
    Case("media type", 415, headers={"content-type": "text/plain"}),
    Case("encoding", 415, make=lambda n: b"\x1f" + LONG(n), headers={"content-encoding": "gzip"}),
    Case("vLLM score", 400, "/score", body(text_1="a", text_2=text), share=8),
    Case("Cohere", 400, "/v2/embed", body(texts=["a"], input_type=text), share=8),
    Case("TEI", 422, "/embed", body(inputs=text, truncate=False), share=8),
    Case("Ollama", 400, "/api/embed", body(input=text, truncate=False), share=8),
    Case("SageMaker", 422, "/invocations", body(inputs=text, truncate=False), share=8),
    Case("classify", 400, "/classify", body(input=text), share=8),
    Case("chat", 400, make=body(messages=text), share=8),
    Case("client leaves within a body", 0, num_unsent=100),
    Case("client leaves within a file", 0, "/v1/files", form, FORM, num_unsent=100),
    Case("file without purpose", 400, "/v1/files", form, FORM),
    Case("file without end", 400, "/v1/files", lambda n: form(n)[:-9], FORM),
    Case("file in no form", 415, "/v1/files", form),
)
CLIENT_DEADLINE = Case("client's deadline", 408, make=WAITING, headers={"x-request-timeout": "0.5"})
CLIENT_LEAVES = Case("client leaves while it waits", 0, make=WAITING, stay_s=0.5)
SERVER_DEADLINE = Case("server's deadline", 504, make=WAITING)


def connect(server: Server, case: Case, content: bytes, num_unsent: int = 0) -> socket.socket:
    """Send a request without its last bytes and return the connection."""
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json", "connection": "close"}
    headers |= case.headers
    if "transfer-encoding" in headers:
        content = b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)
    else:
        headers["content-length"] = str(len(content))
    client = socket.create_connection(("127.0.0.1", server.port), timeout=120)
    with contextlib.suppress(OSError):  # the server may refuse an unread body
        client.sendall(head(*(f"{name}: {value}" for name, value in headers.items()), path=case.path))
        client.sendall(memoryview(content)[: len(content) - num_unsent])
    return client


def receive(client: socket.socket) -> int:
    """Read a response, close the connection and return the status."""
    with client:
        received = client.recv(MIB)
        while client.recv(MIB):
            pass
    return int(received[9:12])


def send(server: Server, case: Case, content: bytes) -> int:
    """Send a request and return its status; leave after `stay_s` if the case expects none."""
    client = connect(server, case, content, case.num_unsent)
    if case.status:
        return receive(client)
    with client:
        time.sleep(case.stay_s)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return 0


class Measurement:
    """Sends bodies and checks that memory falls to its earlier size.

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
        statuses = {send(server, case, content) for _ in range(self.num_bodies // case.share)}
        self.check(server, case, before, statuses)

    def check(self, server: Server, case: Case, before: int, statuses: set[int]) -> None:
        """Print a line and record a wrong status or lost memory."""
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


def wait_for_status(server: Server, status: int) -> None:
    """Wait until a small request gets this status."""
    small = Case("small", status, headers={"x-request-timeout": "0.1"})
    wait_until(lambda: send(server, small, b'{"input": "a"}') == status, 60)


def fill_queue_while_bodies_arrive(server: Server, measured: Measurement) -> None:
    """The queue is full once a body has arrived, and then before further bodies arrive."""
    late, early = (Case(name, 429, make=WAITING) for name in ("full after the body", "full before the body"))
    content, statuses = WAITING(measured.num_bytes), set()
    filler = body(input=["a " * 200] * 10, **CUT)(0)
    with stopped(server):
        before = server.resident_bytes()
        for _ in range(measured.num_bodies // 4):
            client = connect(server, late, content, num_unsent=1)
            with connect(server, late, filler):
                wait_for_status(server, 429)
                client.sendall(content[-1:])
                statuses.add(receive(client))
            wait_for_status(server, 408)
        measured.check(server, late, before, statuses)
        with connect(server, late, filler):
            wait_for_status(server, 429)
            measured.run(server, early)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_large_bodies_are_freed_after_errors(launch: Launch, small_bert: Path, tmp_path: Path) -> None:
    measured = Measurement(40, 20 * MIB)
    server = launch(*FLAGS, "--data-dir", str(tmp_path / "data"))
    for case in CASES:
        measured.run(server, case)
    fill_queue_while_bodies_arrive(server, measured)

    impatient = launch(*FLAGS, "--request-timeout-s", "2", "--hang-timeout-s", "0")
    with stopped(impatient):
        for case in (CLIENT_DEADLINE, SERVER_DEADLINE, CLIENT_LEAVES):
            measured.run(impatient, case)

    vocabulary = json.loads((small_bert / "tokenizer.json").read_text())["model"]["vocab"]
    poison = next(word for word, number in vocabulary.items() if number == POISONED_ID)
    failing = Case("the model fails", 500, make=lambda n: body(input=f"{poison} {text(n)}", **CUT)(n))
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
