"""Messages between two processes of one server."""

from __future__ import annotations

import asyncio
import socket

import pytest

from penstock.engine.protocol.message_connection import MessageConnection
from penstock.server.workers.messages import (
    Channel,
    FromWorker,
    GetMetrics,
    GetModel,
    MetricFamily,
    MetricsReport,
    WorkerListening,
    WorkerReady,
    decode_from_worker,
    encode,
)


class End:
    """A channel that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[FromWorker] = []
        self.ended = asyncio.Event()
        self.channel = Channel(decode_from_worker, self.heard.append, self.ended.set)

    async def until(self, count: int) -> list[FromWorker]:
        async with asyncio.timeout(120):
            while len(self.heard) < count:
                await asyncio.sleep(0.005)
        return self.heard


def pair() -> tuple[End, End]:
    ends, sockets = (End(), End()), socket.socketpair()
    for end, each in zip(ends, sockets, strict=True):
        end.channel.open(each)
    return ends


def sent(message: FromWorker) -> bytes:
    """What goes over the socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        connection = MessageConnection(ours)
        connection.send(encode(message))
        connection.close()
        return theirs.recv(1 << 16)


async def test_messages_come_whole_and_in_order() -> None:
    one, other = pair()
    large = MetricsReport(
        3, [MetricFamily("n", "t", "counter", [("n_total", {"a": str(i)}, float(i)) for i in range(20_000)])]
    )
    said = [WorkerListening(), GetModel(2), large, GetMetrics(9), WorkerReady()]
    for message in said:
        one.channel.send(message)
    assert await other.until(len(said)) == said
    one.channel.close()
    await asyncio.wait_for(other.ended.wait(), 120)
    other.channel.send(WorkerListening())  # to one that has gone: nothing happens


async def test_one_byte_at_a_time() -> None:
    end = End()
    ours, theirs = socket.socketpair()
    end.channel.open(theirs)
    for byte in sent(GetModel(7)):
        ours.send(bytes([byte]))
        await asyncio.sleep(0.001)
    assert await end.until(1) == [GetModel(7)]
    ours.close()
    await asyncio.wait_for(end.ended.wait(), 120)


async def test_what_is_closed_hears_and_tells_nobody_any_more() -> None:
    end = End()
    ours, theirs = socket.socketpair()

    def take(message: FromWorker) -> None:
        end.heard.append(message)
        end.channel.close()

    end.channel = Channel(decode_from_worker, take, end.ended.set)
    end.channel.open(theirs)
    ours.send(sent(GetModel(1)) + sent(GetModel(2)))
    assert await end.until(1) == [GetModel(1)]
    end.channel.close()
    end.channel.send(WorkerListening())
    ours.close()
    await asyncio.sleep(0.05)
    assert not end.ended.is_set()


async def test_what_cannot_be_read_ends_the_channel(caplog: pytest.LogCaptureFixture) -> None:
    end = End()
    ours, theirs = socket.socketpair()
    end.channel.open(theirs)
    ours.send(sent(WorkerListening()).replace(b"WorkerListening", b"WorkerSleepingx"))
    await asyncio.wait_for(end.ended.wait(), 120)
    assert "is invalid" in caplog.text
    ours.close()
