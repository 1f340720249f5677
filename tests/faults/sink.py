"""A server that answers whatever it gets with a 429: `python sink.py LENGTH` prints its port; requests are LENGTH long.

What a load generator costs the machine that it shares with the model is measured with it.
"""

from __future__ import annotations

import asyncio
import sys

ANSWER = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}"


class Sink(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.num_received = 0

    def data_received(self, data: bytes) -> None:
        self.num_received += len(data)
        while self.num_received >= LENGTH:
            self.num_received -= LENGTH
            self.transport.write(ANSWER)


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Sink, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    LENGTH = int(sys.argv[1])
    asyncio.run(main())
