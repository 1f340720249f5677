"""Large responses: rejected before the model runs, written as they are read, and limited in total.

`pytest tests/faults/test_large_answers.py -m slow -s` prints longest wait and memory for each.
"""

import socket
from contextlib import ExitStack

import pytest

from ..servers import MIB, Launch, Server
from ..waiting import wait_until
from .load import MAX_WORK_S, request, watching

pytestmark = pytest.mark.slow


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
    """Some clients that read only a status line get 200, the others 429; a later request succeeds."""
    server = launch("--response-memory", "200MB", "--min-transfer-rate", "0", model=small_bert)
    body = {"inputs": ["a " * 500] * 600}  # 77 MB of numbers, 230 MB of JSON
    with ExitStack() as stack:
        stack.enter_context(watching(server, "embeddings beside slow readers", "a"))
        seen = stack.enter_context(watching(server, "health beside slow readers"))
        clients = [stack.enter_context(start(server, "/embed_all", body, i)) for i in range(16)]
        statuses = [int(client.recv(12, socket.MSG_PEEK)[9:]) for client in clients]
        read(clients[0])
    assert statuses[0] == 200
    assert statuses.count(200) >= 2
    assert set(statuses) <= {200, 429}
    assert seen.busiest_s < MAX_WORK_S
    assert seen.grown < 600 * MIB
    wait_until(lambda: read(start(server, "/embed_all", body))[0] == 200)
