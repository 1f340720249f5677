"""The server keeps nothing of a request after its error response.

`pytest tests/faults/test_memory_after_errors.py -m slow -s` prints, for each error, the resident memory of the server
process before and after forty large bodies, sent one after the other.
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

from .conftest import MIB, POISONED_ID, Launch, Server

KEY = "a-key"
MAX_BODY = 24 * MIB
FORM = "multipart/form-data; boundary=B"
FLAGS = ("--api-key", KEY, "--max-body-bytes", str(MAX_BODY), "--max-queued-tokens", "2020")
Body = Callable[[int], bytes]


def text(num_bytes: int) -> str:
    """A text of this size in bytes. Its last character makes Python use four bytes for each character."""
    return "a b " * (num_bytes // 4 - 1) + "\N{WATER WAVE}"


def body(**fields: object) -> Body:
    """The JSON of an object; where a field is `text`, a long text stands there."""

    def make(num_bytes: int) -> bytes:
        filled = {name: text(num_bytes) if value is text else value for name, value in fields.items()}
        return json.dumps(filled, ensure_ascii=False).encode()

    return make


def many(num_bytes: int) -> bytes:
    """More inputs than a request may have."""
    return json.dumps({"input": [text(num_bytes // 5000)] * 5000}, ensure_ascii=False).encode()


def values(num_bytes: int) -> bytes:
    """More values than a body may hold."""
    return b'{"input": [' + b"[1]," * (num_bytes // 4 - 10) + b"[1]]}"


def form(num_bytes: int) -> bytes:
    """A file that comes whole, in a form that lacks its purpose."""
    head = b'--B\r\nContent-Disposition: form-data; name="file"; filename="f.jsonl"\r\n\r\n'
    return head + b"a" * num_bytes + b"\r\n--B--\r\n"


def form_without_end(num_bytes: int) -> bytes:
    """A form that ends before its last boundary."""
    return form(num_bytes)[:-9]


@dataclass(frozen=True)
class Case:
    """A request and the status that it gets.

    Attributes:
        name: For the table.
        status: Expected; 0: the client leaves before there is one.
        make: Returns the body for a number of bytes.
        headers: Additional request headers.
        kept_back: Bytes of the body that are not sent before the client leaves.
        share: Of the usual number of bodies one in so many is sent.
        share: Of the usual number of bodies one in so many is sent.
    """

    name: str
    status: int
    path: str
    make: Body
    headers: dict[str, str] = field(default_factory=dict)
    kept_back: int = 0
    share: int = 1


CUT = {"truncate_prompt_tokens": -1}
LONG = body(input=text)
WAITS = body(input=text, **CUT)
EMBED = "/v1/embeddings"
TOO_LONG = (
    ("vLLM pooling", 400, "/pooling", LONG),
    ("vLLM score", 400, "/score", body(text_1="a", text_2=text)),
    ("rerank", 400, "/rerank", body(query="a", documents=[text(400)], instruction=text)),
    ("Cohere", 400, "/v2/embed", body(texts=["a"], input_type=text)),
    ("TEI", 422, "/embed", body(inputs=text, truncate=False)),
    ("TEI", 424, "/predict", body(inputs=text)),
    ("Ollama", 400, "/api/embed", body(input=text, truncate=False)),
    ("Ollama, old", 404, "/api/embeddings", body(model="none", prompt=text)),
    ("Ollama chat", 400, "/api/chat", body(model="m", messages=[{"role": "user", "content": "a"}], format=text)),
    ("SageMaker", 422, "/invocations", body(inputs=text, truncate=False)),
    ("classify", 400, "/classify", body(input=text)),
    ("chat", 400, EMBED, body(messages=text)),
)
ANSWERED = (
    Case("none", 200, EMBED, WAITS),
    Case("broken JSON", 400, EMBED, lambda n: LONG(n)[:-2]),
    Case("broken small JSON", 400, EMBED, lambda n: b'{"input": "' + b"a" * 3000),
    Case("wrong type", 400, EMBED, body(input={"a": text(100)}, user=text)),
    Case("wrong value", 400, EMBED, body(input="a", encoding_format=text)),
    Case("unknown key", 400, EMBED, body(input="a", no_such_key=text)),
    Case("too long", 400, EMBED, LONG),
    Case("too many inputs", 400, EMBED, many),
    Case("no body", 400, EMBED, lambda n: b""),
    Case("wrong header", 400, EMBED, WAITS, {"x-request-timeout": "soon"}),
    Case("no key", 401, EMBED, LONG, {"authorization": "Bearer none"}),
    Case("no model", 404, EMBED, body(model="none", input=text)),
    Case("no route", 404, "/none", LONG),
    Case("no method", 405, "/v1/models", LONG),
    Case("too large", 413, EMBED, lambda n: LONG(MAX_BODY + 1)),
    Case("too large in chunks", 413, EMBED, lambda n: LONG(MAX_BODY + 1), {"transfer-encoding": "chunked"}),
    Case("too many values", 413, EMBED, values),
    Case("media", 415, EMBED, LONG, {"content-type": "text/plain"}),
    Case("coding", 415, EMBED, lambda n: b"\x1f" + LONG(n), {"content-encoding": "gzip"}),
    *(Case(f"{name}: too long", status, path, make, share=8) for name, status, path, make in TOO_LONG),
    Case("left within a body", 0, EMBED, LONG, kept_back=100),
    Case("left within a file", 0, "/v1/files", form, {"content-type": FORM}, kept_back=100),
    Case("file without purpose", 400, "/v1/files", form, {"content-type": FORM}),
    Case("file without end", 400, "/v1/files", form_without_end, {"content-type": FORM}),
    Case("file of no form", 415, "/v1/files", form),
)
UNANSWERED = (
    Case("its own deadline", 408, EMBED, WAITS, {"x-request-timeout": "0.5"}),
    Case("the server's deadline", 504, EMBED, WAITS),
    Case("left while it waited", 0, EMBED, WAITS, kept_back=0),
)


def ask(server: Server, case: Case, content: bytes, *, stay_s: float = 0.0) -> int:
    """Send a request and return its status; where none is expected, leave after a while."""
    headers = {"host": "x", "authorization": f"Bearer {KEY}", "content-type": "application/json", "connection": "close"}
    headers |= case.headers
    is_chunked = "transfer-encoding" in headers
    if not is_chunked:
        headers["content-length"] = str(len(content))
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if is_chunked:
        content = b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as client:
        with contextlib.suppress(OSError):  # the server may refuse an unread body
            client.sendall(f"POST {case.path} HTTP/1.1\r\n{head}\r\n".encode())
            client.sendall(memoryview(content)[: len(content) - case.kept_back])
        if not case.status:
            time.sleep(stay_s)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return 0
        answer = client.recv(MIB)
        while client.recv(MIB):
            pass
        return int(answer[9:12])


def resident(server: Server) -> int:
    """Memory of the server process, without that of its engine."""
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settled(server: Server, enough: int) -> int:
    """The memory of the server process. Waits up to a minute for it to fall to `enough`."""
    ends_s = time.monotonic() + 60
    while (now := resident(server)) > enough and time.monotonic() < ends_s:
        time.sleep(0.1)
    return now


@dataclass
class Table:
    """Sends the bodies of each case and prints the memory of the server before and after."""

    num_bodies: int
    num_bytes: int
    most_left: int
    left: dict[str, int] = field(default_factory=dict)
    statuses: dict[str, tuple[set[int], set[int]]] = field(default_factory=dict)

    def run(self, server: Server, case: Case, *, first: int = 0, stay_s: float = 0.0) -> None:
        """Send the bodies of a case one after the other."""
        content = case.make(self.num_bytes)
        before, began_s = resident(server), time.monotonic()
        statuses = {ask(server, case, content, stay_s=stay_s) for _ in range(self.num_bodies // case.share)}
        self.note(server, case, before, statuses, began_s)

    def note(self, server: Server, case: Case, before: int, statuses: set[int], began_s: float) -> None:
        """Print a line of the table."""
        after = settled(server, before + self.most_left)
        name = f"{case.status or '---'} {case.name}"
        print(
            f"{name:32} {case.path:16} {before / MIB:6.0f} MiB before, {after / MIB:6.0f} after "
            f"({time.monotonic() - began_s:.0f} s)",
            flush=True,
        )
        self.left[name] = after - before
        self.statuses[name] = statuses, {case.status}

    def check(self) -> None:
        """Fail where too much was left, or the status was another."""
        assert {name: seen for name, (seen, wanted) in self.statuses.items() if seen != wanted} == {}
        assert {name: left // MIB for name, left in self.left.items() if left > self.most_left} == {}


@contextlib.contextmanager
def stopped(server: Server) -> Iterator[None]:
    """The engine of a server does nothing for a while."""
    children = server.children()
    for child in children:
        os.kill(child, signal.SIGSTOP)
    try:
        yield
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGCONT)


def connected(server: Server, content: bytes, *, but: int = 0) -> socket.socket:
    """Send a request for embeddings but for its last bytes, and return its connection."""
    client = socket.create_connection(("127.0.0.1", server.port), timeout=120)
    head = f"POST {EMBED} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"
    client.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode())
    client.sendall(memoryview(content)[: len(content) - but])
    return client


def status_of(client: socket.socket) -> int:
    """Read the status of an answer and close its connection."""
    with client:
        return int(client.recv(MIB)[9:12])


def wait_for_status(server: Server, status: int) -> None:
    """Ask with a small body until there is this status."""
    small, ends_s = Case("small", status, EMBED, body(input="a"), {"x-request-timeout": "0.1"}), time.monotonic() + 60
    while ask(server, small, small.make(0)) != status:
        assert time.monotonic() < ends_s, f"no {status}"
        time.sleep(0.05)


def fill_while_bodies_come(server: Server, table: Table) -> None:
    """Fill the queue while a body is on its way; then send bodies to a full server."""
    late, early = (Case(name, 429, EMBED, WAITS) for name in ("no room after the body", "no room"))
    content, statuses = late.make(table.num_bytes), set()
    filler = body(input=["a " * 200] * 10, **CUT)(0)  # the most tokens that may wait
    with stopped(server):
        before, began_s = resident(server), time.monotonic()
        for _ in range(table.num_bodies // 4):
            client = connected(server, content, but=1)
            with connected(server, filler):
                wait_for_status(server, 429)
                client.sendall(content[-1:])
                statuses.add(status_of(client))
            wait_for_status(server, 408)
        table.note(server, late, before, statuses, began_s)
        with connected(server, filler):
            wait_for_status(server, 429)
            table.run(server, early)


def kill_while_bodies_wait(server: Server, table: Table) -> None:
    """Have requests lost with their engine, a few at once, and others refused until there is a new one.

    The first round counts as a start: bodies that are there at once leave free memory between them.
    """
    case = Case("the engine was killed", 503, EMBED, body(input=text, truncate_prompt_tokens=8))
    content, statuses = case.make(table.num_bytes), set()
    before, began_s = 0, time.monotonic()
    for number in range(3):
        if number == 1:
            before = resident(server)
        with stopped(server):
            clients = [connected(server, content) for _ in range(4)]
            ends_s = time.monotonic() + 60
            while server.metric("penstock_engine_requests") < 4:
                assert time.monotonic() < ends_s
                time.sleep(0.05)
            for child in server.children():
                os.kill(child, signal.SIGKILL)
        statuses |= {status_of(client) for client in clients}
        while (status := ask(server, case, content)) == 503:
            statuses.add(status)
        server.wait_until("/health/ready", 200)
    table.note(server, case, before, statuses, began_s)


def run_all(launch: Launch, table: Table, small_bert: Path, data: Path) -> None:
    """Run all cases, each against a server that can answer so."""
    server = launch(*FLAGS, "--data-dir", str(data))
    for case in ANSWERED:
        table.run(server, case)
    fill_while_bodies_come(server, table)
    kill_while_bodies_wait(server, table)

    impatient = launch(*FLAGS, "--request-timeout-s", "2", "--hang-timeout-s", "0")
    with stopped(impatient):
        for case in UNANSWERED:
            table.run(impatient, case, stay_s=0.5)

    vocabulary = json.loads((small_bert / "tokenizer.json").read_text())["model"]["vocab"]
    poison = next(word for word, number in vocabulary.items() if number == POISONED_ID)
    poisoned = Case("the model failed", 500, EMBED, lambda n: body(input=f"{poison} {text(n)}", **CUT)(n))
    table.run(launch(*FLAGS, model=small_bert), poisoned)
    table.check()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_large_bodies_leave_nothing_after_errors(launch: Launch, small_bert: Path, tmp_path: Path) -> None:
    run_all(launch, Table(40, 20 * MIB, 60 * MIB), small_bert, tmp_path / "data")


def test_bodies_leave_nothing_after_errors(server: Server) -> None:
    too_long, table = Case("too long", 400, EMBED, LONG), Table(6, 6 * MIB, 60 * MIB)
    for _ in range(2):  # free memory stays with the process up to some size
        ask(server, too_long, LONG(table.num_bytes))
    table.run(server, too_long)
    table.run(server, Case("too long", 422, "/embed", body(inputs=text, truncate=False)))
    with stopped(server):
        table.run(server, Case("its own deadline", 408, EMBED, WAITS, {"x-request-timeout": "0.5"}))
        table.run(server, Case("left while it waited", 0, EMBED, WAITS), stay_s=0.5)
    table.check()
