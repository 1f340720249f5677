"""Sends requests over raw HTTP/1.1 connections and records latencies and errors.

One process and one event loop: httptools parses the responses, so that the client costs little beside the server.
`Round.client_share` shows if it was too slow.

A closed loop sends the next request of a connection after the last response. An open loop sends at the times of a
Poisson process. A request that waits for a connection is late; its latency counts from its scheduled time. Otherwise a
slow server would slow down its own load and hide its latency (coordinated omission).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import httptools

from ..target_server import Address

_TOKENS: Final = re.compile(rb'"(?:prompt_tokens|input_tokens|total_tokens|prompt_eval_count)"\s*:\s*(\d+)')
_USAGE_BYTES: Final = 2048
"""Bytes at both ends of a response that may contain the usage."""
_PAUSE_S: Final = 0.1
"""Pause of a connection after a transport error, so that a lost server gets no flood of connections."""
UNSENT: Final = "not sent: all connections were busy"


@dataclass(slots=True)
class Round:
    """Result of one round.

    Attributes:
        num_texts: Texts in successful responses.
        num_tokens: Tokens of these texts, as the server reports them; 0 if it does not.
        seconds: From the start to the last response.
        latencies_s: Seconds of each successful request.
        errors: Number of failed requests by status or kind of error.
        client_s: Processor time of this process.
    """

    num_texts: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    client_s: float = 0.0

    @property
    def texts_per_s(self) -> float:
        """Texts per second in successful responses."""
        return self.num_texts / self.seconds if self.seconds else 0.0

    @property
    def client_share(self) -> float:
        """Share of one core that this process used."""
        return self.client_s / self.seconds if self.seconds else 0.0

    def latency_ms(self, share: float) -> float:
        """Milliseconds within which `share` of the successful requests were answered; NaN without any."""
        ordered = sorted(self.latencies_s)
        return 1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


async def run_round(
    address: Address,
    requests: Sequence[bytes],
    texts_per_request: int,
    *,
    connections: int,
    seconds: float,
    timeout_s: float,
    rate: float | None = None,
    result: Round | None = None,
) -> Round:
    """Sends requests over and over for `seconds`.

    Args:
        address: Where to send them.
        requests: Complete HTTP/1.1 requests.
        texts_per_request: Texts in each request.
        connections: Maximum number of concurrent requests.
        seconds: Duration. Running requests finish after it.
        timeout_s: Seconds after which a request fails.
        rate: Mean requests per second of an open loop. None: a closed loop.
        result: Object to fill. Another task may read it meanwhile, and after a cancellation.

    Raises:
        OSError: The server does not accept connections at the start.
    """
    result = Round() if result is None else result
    opened = [_Connection(address) for _ in range(connections)]
    client_s, began_s = time.process_time(), time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*(connection.open() for connection in opened))
        client_s, began_s = time.process_time(), time.monotonic()
        until_s = began_s + seconds
        times = _closed(until_s) if rate is None else _poisson(rate, began_s, until_s)
        drop_s = math.inf if rate is None else until_s
        feed = itertools.cycle(requests)
        await asyncio.gather(
            *(_send_at(connection, times, feed, drop_s, texts_per_request, timeout_s, result) for connection in opened)
        )
    finally:
        result.seconds, result.client_s = time.monotonic() - began_s, time.process_time() - client_s
        for connection in opened:
            connection.close()
    return result


def _closed(until_s: float) -> Iterator[float]:
    while (now_s := time.monotonic()) < until_s:
        yield now_s


def _poisson(rate: float, began_s: float, until_s: float) -> Iterator[float]:
    rng = random.Random(0)
    at_s = began_s
    while (at_s := at_s + rng.expovariate(rate)) < until_s:
        yield at_s


async def _send_at(
    connection: _Connection,
    times: Iterator[float],
    feed: Iterator[bytes],
    drop_s: float,
    texts_per_request: int,
    timeout_s: float,
    result: Round,
) -> None:
    """Sends requests at `times`, which all connections share. Drops requests that are still late at `drop_s`."""
    for at_s in times:
        if (wait_s := at_s - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)
        elif time.monotonic() > drop_s:
            result.errors[UNSENT] += 1
            continue
        try:
            async with asyncio.timeout(timeout_s):
                response = await connection.send(next(feed))
        except OSError as error:  # a TimeoutError is one
            connection.close()
            result.errors["timeout" if isinstance(error, TimeoutError) else _kind(error)] += 1
            await asyncio.sleep(_PAUSE_S)
            continue
        if response.status != 200:
            result.errors[f"status {response.status}"] += 1
            continue
        result.latencies_s.append(time.monotonic() - at_s)
        result.num_texts += texts_per_request
        result.num_tokens += response.num_tokens


def _kind(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return "connection reset" if isinstance(error, ConnectionResetError) else str(error)


class _Response(NamedTuple):
    status: int
    num_tokens: int


class _Connection(asyncio.Protocol):
    """A connection with at most one request under way. It opens again if the server has closed it."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._transport: asyncio.Transport | None = None
        self._response: asyncio.Future[_Response] | None = None
        self._body: list[bytes] = []
        self._tokens = 0

    async def open(self) -> None:
        """Connects. Raises OSError."""
        self._transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: self, self._address.host, self._address.port, ssl=self._address.tls
        )

    def close(self) -> None:
        """Closes the connection. `send` opens it again."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    async def send(self, request: bytes) -> _Response:
        """Sends a request and returns its response. Raises OSError."""
        if self._transport is None or self._transport.is_closing():
            await self.open()
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._body = []
        self._tokens = 0
        self._response = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._response

    def data_received(self, data: bytes) -> None:
        if self._response is None or self._response.done():
            return  # the request has timed out
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._response.set_exception(ConnectionError(f"malformed response: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._response is not None and not self._response.done():
            self._response.set_exception(ConnectionError("connection closed before the response ended"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Reads the token count of Text Embeddings Inference."""
        if name.lower() == b"x-compute-tokens" and value.isdigit():
            self._tokens = int(value)

    def on_body(self, data: bytes) -> None:
        """Collects the body."""
        self._body.append(data)

    def on_message_complete(self) -> None:
        """Completes the request."""
        assert self._response is not None
        assert self._transport is not None
        if not self._response.done():
            self._response.set_result(
                _Response(self._parser.get_status_code(), self._tokens or _num_tokens(b"".join(self._body)))
            )
        if not self._parser.should_keep_alive():
            self._transport.close()


def _num_tokens(body: bytes) -> int:
    """Returns the tokens in the usage of a response, without parsing its vectors; 0 if there is no usage."""
    found = _TOKENS.findall(body[-_USAGE_BYTES:]) or _TOKENS.findall(body[:_USAGE_BYTES])
    return int(found[0]) if found else 0
