from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from penstock.engine.core import waker as waker_module
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
    waker.ignore(one)
    assert waker.poll() == []


def test_paused_file_is_watched_again_after_the_pause(
    sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(waker_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    waker, (one, other) = Waker(), sockets
    other.sendall(b"!")
    waker.watch(one, lambda: None)
    (on_readable,) = waker.poll()
    waker.pause(one, 5.0)
    assert waker.poll() == []
    waker.wake()
    assert waker.wait() == []
    now_s = 104.9
    assert waker.poll() == []
    now_s = 105.0
    assert waker.poll() == [on_readable]
    assert waker.wait() == [on_readable]
    waker.ignore(one)


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
    waker.ignore(one)
