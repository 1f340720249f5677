"""Clients of one server that cost the machine little: open and closed loops over plain sockets."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Seen:
    """What came back.

    Attributes:
        seconds: Of each answer, by status, from the request to its end.
        waits_s: Each Retry-After.
    """

    seconds: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    waits_s: list[int] = field(default_factory=list)

    @property
    def num_answers(self) -> int:
        return sum(map(len, self.seconds.values()))


class Client(asyncio.Protocol):
    """A connection that sends one request at a time."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self._head = b""
        self._status = self._num_missing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self, request: bytes, then: Callable[[Client], None]) -> None:
        """Send a request; `then` is called when its answer has come."""
        self._then = then
        self._began_s = time.monotonic()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        if not self._num_missing:
            self._head += data
            head, end, body = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._head = b""
            headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
            self._status = int(head[9:12])
            if self._status == 429:
                self.seen.waits_s.append(int(headers[b"retry-after"]))
            self._num_missing = int(headers[b"content-length"])
            data = body
        self._num_missing -= len(data)
        if not self._num_missing:
            self.seen.seconds[self._status].append(time.monotonic() - self._began_s)
            self._then(self)


class Load:
    """Sends one request again and again.

    Args:
        port: Of the server, on 127.0.0.1.
        request: The bytes of the request.
    """

    def __init__(self, port: int, request: bytes) -> None:
        self.seen = Seen()
        self._port = port
        self._request = request
        self._idle: list[Client] = []

    async def closed_loop(self, num_clients: int, for_s: float) -> float:
        """Clients that ask again as soon as they are answered, whatever the answer. Returns those with 200 a second."""
        loop = asyncio.get_running_loop()
        num_left, done = num_clients, loop.create_future()
        end_s = time.monotonic() + for_s

        def again(client: Client) -> None:
            nonlocal num_left
            if time.monotonic() < end_s:
                client.send(self._request, again)
                return
            self._idle.append(client)
            num_left -= 1
            if not num_left:
                done.set_result(None)

        for _ in range(num_clients):
            (await self._client()).send(self._request, again)
        rate = await self._answered_per_s(for_s)
        async with asyncio.timeout(60):
            await done
        return rate

    async def open_loop(self, per_s: float, for_s: float, *, num_first: int) -> float:
        """So many requests a second, whatever becomes of them, after some at once. Returns those with 200 a second."""
        num_sent = self.seen.num_answers

        async def send() -> None:
            nonlocal num_sent
            num_sent += 1
            (await self._client()).send(self._request, self._idle.append)

        async def send_all() -> None:
            for _ in range(num_first):
                await send()
            began_s, number = time.monotonic(), 0
            while time.monotonic() < began_s + for_s:
                await send()
                number += 1
                await asyncio.sleep(max(began_s + number / per_s - time.monotonic(), 0.0))

        sending = asyncio.create_task(send_all())
        rate = await self._answered_per_s(for_s)
        await sending
        async with asyncio.timeout(60):
            while self.seen.num_answers < num_sent:
                await asyncio.sleep(0.05)
        return rate

    def close(self) -> None:
        for client in self._idle:
            client.transport.close()

    async def _answered_per_s(self, for_s: float) -> float:
        """The first tenth does not count."""
        await asyncio.sleep(for_s / 10)
        began_s, num_before = time.monotonic(), len(self.seen.seconds[200])
        await asyncio.sleep(for_s * 0.88)
        return (len(self.seen.seconds[200]) - num_before) / (time.monotonic() - began_s)

    async def _client(self) -> Client:
        if self._idle:
            return self._idle.pop()
        _, client = await asyncio.get_running_loop().create_connection(
            lambda: Client(self.seen), "127.0.0.1", self._port
        )
        return client
