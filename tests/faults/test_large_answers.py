"""Large responses: rejected before the model runs, written as they are read, and limited in total.

`pytest tests/faults/test_large_answers.py -m slow -s` prints longest wait and memory for each.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from ..servers import MIB, Launch, Server
from ..waiting import wait_until
from .load import request, watching
from .test_dense_bodies import MAX_WORK_S

pytestmark = pytest.mark.slow
PATIENT = ("--min-transfer-rate", "0")
"""Slow readers are never ended."""


@pytest.fixture(scope="module")
def small_server(launch: Launch, small_bert: object) -> Server:
    """A model that takes little time and gives 64 numbers for each token."""
    return launch(model=small_bert)


def start(server: Server, path: str, body: object, number: int = 0) -> socket.socket:
    """Send a request, from a different address for each number, and read nothing yet."""
    client = socket.create_connection(
        ("127.0.0.1", server.port), timeout=300, source_address=(f"127.0.0.{1 + number}", 0)
    )
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    client.sendall(request(body, "Connection: close", path=path))
    return client


def read(client: socket.socket) -> tuple[int, int]:
    """Read a response to its end. Returns its status and size."""
    status = num_bytes = 0
    with client:
        while received := client.recv(MIB):
            status = status or int(received[9:12])
            num_bytes += len(received)
    return status, num_bytes


def check_slow_readers(
    server: Server, path: str, body: object, number: int, most_bytes: float, *, least: int = 2, rejections: set[int]
) -> None:
    """Start requests that read only a status line, then finish the first one and drop the others.

    At least `least` get 200, the others a status of `rejections`. The event loop and memory are bounded, and a later
    request succeeds.
    """
    with watching(server, f"{number} slow readers of {path}") as seen, ExitStack() as stack:
        clients = [stack.enter_context(start(server, path, body, i)) for i in range(number)]
        statuses = [int(client.recv(12, socket.MSG_PEEK)[9:]) for client in clients]
        _, num_bytes = read(clients[0])
    print(f"{statuses}, {num_bytes / MIB:.1f} MiB")
    assert statuses[0] == 200
    assert statuses.count(200) >= least
    assert set(statuses) <= {200, *rejections}
    assert seen.busiest_s < MAX_WORK_S
    assert seen.grown < most_bytes
    wait_until(lambda: read(start(server, path, body))[0] == 200)


FP8 = {"task": "token_embed", "encoding_format": "base64", "embed_dtype": "fp8_e4m3"}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {"inputs": "!" * 499_000}, None),
        ("/embed_all", {"inputs": ["a " * 500] * 600}, None),
        ("/pooling", {"input": ["a " * 500] * 600, **FP8}, None),
        ("/embed_all", {"inputs": ["a " * 500] * 1_000}, 422),
        ("/embed", {"inputs": ["a"] * 4_096}, None),
    ],
    ids=["500,000 tokens", "20 M numbers", "20 M numbers in fp8", "30 M numbers", "vectors"],
)
def test_large_response_does_not_block_the_event_loop(
    small_server: Server, path: str, body: object, status: int | None
) -> None:
    num_tokens = small_server.metric("penstock_tokens_total")
    with watching(small_server, path) as seen:
        found, num_bytes = read(start(small_server, path, body))
    print(f"{found}, {num_bytes / MIB:.1f} MiB")
    assert found == status if status else found in (200, 400, 422)
    assert seen.busiest_s < MAX_WORK_S
    if status:
        assert small_server.metric("penstock_tokens_total") == num_tokens


def test_slow_readers_of_token_vectors_share_a_limit(launch: Launch, small_bert: object) -> None:
    server = launch("--answer-memory", "200MB", *PATIENT, model=small_bert)
    # 77 MB of numbers, 230 MB of JSON
    body = {"inputs": ["a " * 500] * 600}
    with watching(server, "embeddings beside them", "a"):
        check_slow_readers(server, "/embed_all", body, 16, 600 * MIB, rejections={429})
