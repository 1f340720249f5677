import asyncio
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest

from penstock.engine import EngineConfig
from penstock.engine.protocol.config import SchedulerConfig
from penstock.server.models.served_model import ServedModel
from penstock.server.settings import ServerSettings, load_settings
from penstock.server.workers.messages import (
    Channel,
    FromWorker,
    GetMetrics,
    GetModel,
    MetricFamily,
    MetricsReport,
    WorkerConfig,
    WorkerListening,
    WorkerReady,
    decode_from_worker,
)

from ...waiting import until


class End:
    """A channel, its received messages, and whether the other end has closed it."""

    def __init__(self, end: socket.socket) -> None:
        self.received: list[FromWorker] = []
        self.has_ended = asyncio.Event()
        self.channel = Channel(decode_from_worker, self.receive, self.has_ended.set)
        self.channel.open(end)

    def receive(self, message: FromWorker) -> None:
        self.received.append(message)


async def test_messages_of_any_size_arrive_in_order() -> None:
    one, other = map(End, socket.socketpair())
    samples = [("n_total", {"a": str(i)}, float(i)) for i in range(20_000)]
    large = MetricsReport(3, [MetricFamily("n", "t", "counter", samples)])
    messages = [WorkerListening(), GetModel(2), large, GetMetrics(9), WorkerReady()]
    for message in messages:
        one.channel.send(message)
    await until(lambda: len(other.received) == len(messages))
    assert other.received == messages
    one.channel.close()
    await until(other.has_ended.is_set)
    other.channel.send(WorkerListening())  # ignored: the other end has closed


async def test_closed_channel_leaves_no_reader() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        end, descriptor = End(ours), ours.fileno()
        end.channel.close()
        end.channel.close()
        assert not asyncio.get_running_loop().remove_reader(descriptor)
    assert not end.has_ended.is_set()


async def test_handler_may_close_the_channel_between_two_messages() -> None:
    ours, theirs = socket.socketpair()
    end, received = End(ours), list[FromWorker]()
    channel = Channel(decode_from_worker, lambda message: (received.append(message), channel.close()), Mock())
    channel.open(theirs)
    for number in (1, 2):
        end.channel.send(GetMetrics(number))
    await until(end.has_ended.is_set)
    assert received == [GetMetrics(1)]


async def test_invalid_message_ends_the_channel(caplog: pytest.LogCaptureFixture) -> None:
    one, other = map(End, socket.socketpair())
    one.channel._connection.send(b"no message")
    await until(other.has_ended.is_set)
    await until(one.has_ended.is_set)
    assert "a message between the server's processes is invalid" in caplog.text
    assert (one.received, other.received) == ([], [])


def test_end_of_the_supervisor_before_the_plan_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(b"\x09")
        ours.close()
        with pytest.raises(EOFError, match="the supervising process has ended"):
            WorkerConfig.receive(theirs)


def worker_config(**settings: object) -> WorkerConfig:
    limits = SchedulerConfig(max_queued_tokens=40_000, max_queue_s=8.0)
    model = ServedModel(
        ("a", "b"), config=EngineConfig(model="/models/a", max_queued_chars=1_000, image_memory=2_000, scheduler=limits)
    )
    return WorkerConfig(load_settings(ServerSettings, settings), (model,), 4, 11, b"salt", 1_700_000_000)


async def test_plan_of_any_size_is_received_as_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"api_key": "one,two", "api_key_file": Path("/keys"), "pooler_config": '{"normalize":false}'}
    large = "{}" + " " * 3_000_000  # exceeds the buffer of the socket
    configs = [worker_config(**fields, chat_template=template) for template in ("{}", large)]
    monkeypatch.setenv("PENSTOCK_PORT", "1234")  # the receiver reads no variables
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for sent in configs:
            sending = asyncio.create_task(sent.send(ours))
            received = await asyncio.to_thread(WorkerConfig.receive, theirs)
            await sending
            assert received == sent
            assert received.settings.port == 8000


def test_each_process_has_its_share_of_the_limits() -> None:
    config = worker_config().config_with_share(worker_config().models[0])
    assert (config.max_queued_chars, config.image_memory) == (250, 500)
    assert (config.scheduler.max_queued_tokens, config.scheduler.max_queue_s) == (10_000, 2.0)
    small = EngineConfig(model="a", max_queued_chars=3, image_memory=3, scheduler=SchedulerConfig(max_queued_tokens=3))
    config = worker_config().config_with_share(ServedModel(("a",), config=small))
    assert (config.max_queued_chars, config.image_memory, config.scheduler.max_queued_tokens) == (1, 1, 1)
