"""The waker of the device thread."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import pytest

from penstock.engine.core import waker as waker_module
from penstock.engine.core.waker import Waker


def test_many_wake_ups_count_as_one_and_never_block() -> None:
    waker = Waker()
    for _ in range(200_000):
        waker.wake()
    assert waker.wait() == []  # consumes all of them
    woken = threading.Event()

    def sleep() -> None:
        waker.wait()
        woken.set()

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    assert not woken.wait(0.1)
    waker.wake()
    assert woken.wait(5)
    thread.join()


def test_readable_file_wakes_until_it_is_read() -> None:
    waker = Waker()
    one, other = socket.socketpair()
    with one, other:

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


def test_poll_consumes_a_wake_up() -> None:
    waker = Waker()
    waker.wake()
    assert waker.poll() == []
    waker.wake()
    waker.wait()


def test_paused_file_is_ignored_and_then_watched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(waker_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    waker = Waker()
    one, other = socket.socketpair()
    with one, other:
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


def test_wait_ends_with_a_pause() -> None:
    waker = Waker()
    one, other = socket.socketpair()
    with one, other:
        other.sendall(b"!")
        waker.watch(one, lambda: None)
        (on_readable,) = waker.poll()
        waker.pause(one, 0.01)
        callbacks = waker.wait()
        assert callbacks in ([], [on_readable])  # the pause may end a little earlier
        while not callbacks:
            callbacks = waker.wait()
        waker.ignore(one)
