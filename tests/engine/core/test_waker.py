import socket
import threading
from collections.abc import Iterator

import pytest

from penstock.engine.core.waker import Waker


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_many_wake_ups_count_as_one_and_never_block() -> None:
    waker = Waker()
    for _ in range(70_000):  # more than the pipe holds
        waker.wake()
    assert waker.wait() == []
    woken = threading.Event()

    def sleep() -> None:
        waker.wait()
        woken.set()

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    assert not woken.wait(0.1)
    waker.wake()
    assert woken.wait(30)
    thread.join()


def test_readable_file_wakes_until_it_is_read(sockets: tuple[socket.socket, socket.socket]) -> None:
    waker, (one, other) = Waker(), sockets

    def on_readable() -> None:
        one.recv(10)

    waker.watch(one, on_readable)
    assert waker.poll() == []
    other.sendall(b"!")
    waker.wake()
    assert waker.wait() == [on_readable]
    assert waker.poll() == [on_readable]
    on_readable()
    assert waker.poll() == []
    other.sendall(b"!")
    waker.unwatch(one)
    assert waker.poll() == []


def test_wait_ends_with_a_pause(sockets: tuple[socket.socket, socket.socket]) -> None:
    waker, (one, other) = Waker(), sockets
    other.sendall(b"!")
    waker.watch(one, lambda: None)
    (on_readable,) = waker.poll()
    waker.pause(one, 0.01)
    callbacks = waker.wait()
    while not callbacks:  # `wait` may end a little before the pause
        callbacks = waker.wait()
    assert callbacks == [on_readable]
    waker.unwatch(one)
