"""The bell of a device thread."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import pytest

from penstock.engine.core import bell as bell_module
from penstock.engine.core.bell import Bell


def test_it_keeps_its_rings_and_never_blocks_who_rings() -> None:
    bell = Bell()
    for _ in range(200_000):
        bell.ring()
    assert bell.wait() == []  # all of them at once
    woken = threading.Event()

    def sleep() -> None:
        bell.wait()
        woken.set()

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    assert not woken.wait(0.1)
    bell.ring()
    assert woken.wait(5)
    thread.join()


def test_what_it_watches_wakes_it_until_it_was_read() -> None:
    bell = Bell()
    one, other = socket.socketpair()
    with one, other:

        def hear() -> None:
            one.recv(10)

        bell.watch(one, hear)
        assert bell.look() == []
        other.sendall(b"!")
        bell.ring()
        assert bell.wait() == [hear]
        assert bell.look() == [hear]
        hear()
        assert bell.look() == []
        other.sendall(b"!")
        bell.ignore(one)
        assert bell.look() == []


def test_a_look_hears_what_has_rung() -> None:
    bell = Bell()
    bell.ring()
    assert bell.look() == []
    bell.ring()
    bell.wait()


def test_paused_file_is_ignored_and_then_watched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(bell_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    bell = Bell()
    one, other = socket.socketpair()
    with one, other:
        other.sendall(b"!")
        bell.watch(one, lambda: None)
        (hear,) = bell.look()
        bell.pause(one, 5.0)
        assert bell.look() == []
        bell.ring()
        assert bell.wait() == []
        now_s = 104.9
        assert bell.look() == []
        now_s = 105.0
        assert bell.look() == [hear]
        assert bell.wait() == [hear]
        bell.ignore(one)


def test_wait_ends_with_a_pause() -> None:
    bell = Bell()
    one, other = socket.socketpair()
    with one, other:
        other.sendall(b"!")
        bell.watch(one, lambda: None)
        (hear,) = bell.look()
        bell.pause(one, 0.01)
        heard = bell.wait()
        assert heard in ([], [hear])  # it need not last exactly as long
        while not heard:
            heard = bell.wait()
        bell.ignore(one)
