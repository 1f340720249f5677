"""One of the processes that ask a server.

python benchmarks/measure_gpu.py client PORT CONNECTIONS SECONDS WORDS TEXTS
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Final

import uvloop
from api_workers.measure import Client
from loads import WORDS

WARM_UP_S: Final = 2.0
_NUM_BODIES: Final = 128


async def client(port: int, num_connections: int, seconds: float, words: int, texts: int) -> None:
    """Sends requests over several connections, one at a time on each, and prints the number of responses."""
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    inputs = [[" ".join(random.choices(WORDS, k=words)) for _ in range(texts)] for _ in range(_NUM_BODIES)]
    bodies = [json.dumps({"input": each, "encoding_format": "base64"}).encode() for each in inputs]
    requests, counts = [head % (len(body), body) for body in bodies], [0]
    loop = asyncio.get_running_loop()
    for _ in range(num_connections):
        await loop.create_connection(lambda: Client(requests, counts), "127.0.0.1", port)
    await asyncio.sleep(WARM_UP_S)
    began_s, before = loop.time(), counts[0]
    await asyncio.sleep(seconds)
    print(json.dumps({"requests": counts[0] - before, "seconds": loop.time() - began_s}))


def main(arguments: list[str]) -> None:
    """Reads the arguments and asks."""
    port, connections, seconds, words, texts = arguments
    uvloop.run(client(int(port), int(connections), float(seconds), int(words), int(texts)))
