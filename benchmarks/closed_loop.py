"""A closed loop: a fixed number of requests is under way at every moment.

Raw HTTP/1.1 over asyncio streams, so that the client costs little beside the server on the same machine.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from loads import Load


@dataclass(slots=True)
class Round:
    """Result of one round of one load.

    Attributes:
        num_texts: Texts answered.
        seconds: Seconds that the round took.
        latencies_s: Seconds of each request.
    """

    num_texts: int = 0
    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)

    @property
    def texts_per_s(self) -> float:
        """Texts answered per second."""
        return self.num_texts / self.seconds

    def latency_ms(self, share: float) -> float:
        """Milliseconds within which `share` of the requests were answered."""
        ordered = sorted(self.latencies_s)
        return 1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)]


async def run_round(url: str, load: Load, bodies: list[bytes], seconds: float) -> Round:
    """Sends `bodies` over and over for `seconds`, with `load.concurrency` connections.

    Raises:
        RuntimeError: The server answered with anything but 200.
    """
    result = Round()
    feed = itertools.cycle(bodies)
    began_s = time.monotonic()
    await asyncio.gather(*(_connection(url, load, feed, began_s + seconds, result) for _ in range(load.concurrency)))
    result.seconds = time.monotonic() - began_s
    return result


async def _connection(url: str, load: Load, feed: Iterator[bytes], until_s: float, result: Round) -> None:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 24)
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\nContent-Length: "
    try:
        while (sent_s := time.monotonic()) < until_s:
            body = next(feed)
            writer.write(f"{head}{len(body)}\r\n\r\n".encode() + body)
            header = await reader.readuntil(b"\r\n\r\n")
            answer = await reader.readexactly(_content_length(header))
            if not header.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"{url} answered {header[:40]!r}: {answer[:300]!r}")
            result.latencies_s.append(time.monotonic() - sent_s)
            result.num_texts += load.texts_per_request
    finally:
        writer.close()


def _content_length(header: bytes) -> int:
    for line in header.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split(b":")[1])
    raise RuntimeError(f"an answer without Content-Length: {header!r}")
