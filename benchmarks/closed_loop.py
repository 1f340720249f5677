"""Runs a load in a closed loop with the load generator of `penstock bench`."""

from __future__ import annotations

from urllib.parse import urlsplit

from loads import Load

from penstock.server.bench.load_generator import Round, run_round as run_requests
from penstock.server.target_server import Address

__all__ = ["Round", "run_round"]


async def run_round(url: str, load: Load, bodies: list[bytes], seconds: float, timeout_s: float = 120.0) -> Round:
    """Sends `bodies` to /v1/embeddings over and over for `seconds`, with `load.concurrency` connections.

    Raises:
        RuntimeError: The server answered with anything but 200, a connection failed, or a request took more than
            `timeout_s` seconds.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\nContent-Length: "
    result = await run_requests(
        Address(parts.hostname, parts.port),
        [f"{head}{len(body)}\r\n\r\n".encode() + body for body in bodies],
        load.texts_per_request,
        connections=load.concurrency,
        seconds=seconds,
        timeout_s=timeout_s,
    )
    if result.errors:
        raise RuntimeError(f"{url}: {dict(result.errors)}")
    return result
