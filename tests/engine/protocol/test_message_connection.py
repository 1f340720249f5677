"""Messages between two processes arrive whole and in order, at any size and speed."""

import random
import select
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.engine.protocol.message_connection import MessageConnection

Message = tuple[bytes, list[bytes]]
Ends = tuple[MessageConnection, MessageConnection]


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, other = map(MessageConnection, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def receive_messages(connection: MessageConnection, number: int, timeout_s: float = 120.0) -> list[Message]:
    """Waits for `number` messages."""
    messages: list[Message] = []
    while len(messages) < number:
        assert select.select([connection], [], [], timeout_s)[0], f"{len(messages)} of {number} messages came"
        messages += copies(connection)
    return messages


def copies(connection: MessageConnection) -> list[Message]:
    return [(bytes(first), [bytes(frame) for frame in frames]) for first, frames in connection.receive()]


def join_sender() -> None:
    """Waits until no connection has a thread that sends."""
    for thread in threading.enumerate():
        if thread.name == "sender":
            thread.join(120)
    assert "sender" not in [thread.name for thread in threading.enumerate()]


def random_message(rng: random.Random, most_bytes: int) -> Message:
    sizes = [rng.choice((0, 1, 7, 8, 9, rng.randrange(most_bytes))) for _ in range(rng.randrange(4))]
    return rng.randbytes(rng.randrange(1, 100)), [rng.randbytes(size) for size in sizes]


@pytest.mark.parametrize("seed", range(2))
def test_messages_arrive_whole_and_in_order(ends: Ends, seed: int) -> None:
    one, other = ends
    rng = random.Random(seed)
    sent = [random_message(rng, 200_000 if seed % 2 else 300) for _ in range(200)]

    def send() -> None:
        for first, frames in sent:
            one.send(first, frames)

    sending = threading.Thread(target=send)
    sending.start()
    assert receive_messages(other, len(sent)) == sent
    sending.join()


@pytest.mark.parametrize("step", [1, 3, 65_537])
def test_message_may_arrive_in_pieces_of_any_size(step: int) -> None:
    rng = random.Random(step)
    max_size = 40 if step < 8 else 150_000
    sent = [random_message(rng, max_size) for _ in range(12)]
    writer, reader = socket.socketpair()
    recorded, stream = map(MessageConnection, socket.socketpair())
    other = MessageConnection(reader)
    for first, frames in sent:
        recorded.send(first, frames)
    closing = threading.Thread(target=recorded.close, args=(120.0,))
    closing.start()
    data = bytearray()
    while select.select([stream], [], [], 120)[0] and (piece := stream._socket.recv(1 << 20)):
        data += piece
    closing.join()
    received = []
    for begin in range(0, len(data), step):
        writer.sendall(data[begin : begin + step])
        received += copies(other)
    assert received == sent
    for end in (writer, recorded, stream, other):
        end.close()


def test_frames_are_aligned_for_numpy(ends: Ends) -> None:
    one, other = ends
    array = np.arange(5, dtype=np.float64)
    for first in (b"a", b"abcdefg", b"12345678"):
        one.send(first, [b"odd", memoryview(array).cast("B")])
        select.select([other], [], [], 120)
        ((_, (_, frame)),) = other.receive()
        view = np.frombuffer(frame, np.float64)
        assert view.flags.aligned
        np.testing.assert_array_equal(view, array)


def test_send_does_not_wait_for_the_receiver(ends: Ends) -> None:
    one, other = ends
    sent = [(b"%d" % i, [bytes([i % 256]) * 1_000_000]) for i in range(40)]
    for first, frames in sent:
        one.send(first, frames)  # 40 MB; a socket holds a tenth, at most
    assert [thread.name for thread in threading.enumerate()].count("sender") == 1
    assert receive_messages(other, len(sent)) == sent
    one.send(b"last")
    assert receive_messages(other, 1) == [(b"last", [])]
    join_sender()


def test_sent_messages_arrive_before_the_end(ends: Ends) -> None:
    one, other = ends
    one.send(b"last", [bytes(50)])
    one.close()
    one.close()
    assert one.fileno() == -1
    one.send(b"dropped")
    assert other.receive()[0][0] == b"last"
    with pytest.raises(EOFError):
        other.receive()
    with pytest.raises(EOFError):
        other.receive()
    other.send(b"dropped")


@pytest.mark.parametrize("data", [b"\xff" * 8, b"no message here.", b"\x00" * 8])
def test_bytes_that_are_no_message_raise_an_error(data: bytes) -> None:
    writer, reader = socket.socketpair()
    connection = MessageConnection(reader)
    writer.sendall(data)
    with pytest.raises(Exception, match=r".") as caught:
        connection.receive()
    assert not isinstance(caught.value, EOFError)
    writer.close()
    connection.close()


def test_connection_that_is_reset_has_ended(ends: Ends) -> None:
    one, other = ends
    one.send(b"unread")
    other.close()
    with pytest.raises(EOFError):
        one.receive()


def test_close_ends_the_sender(ends: Ends) -> None:
    one, _ = ends
    one.send(b"unread", [bytes(10_000_000)])
    one.close()
    assert "sender" not in {thread.name for thread in threading.enumerate()}
