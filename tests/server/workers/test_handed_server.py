"""A server whose connections are handed over serves what it has been handed, also when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

from penstock.server.http.http_server import uvicorn_config
from penstock.server.settings import ServerSettings
from penstock.server.workers.handover import ConnectionSender
from penstock.server.workers.worker import PassedConnectionServer

NUM_CLIENTS = 100


async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        for step in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{step}.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def test_one_that_ends_serves_what_it_was_handed_and_takes_nothing_more() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = PassedConnectionServer(uvicorn_config(application, ServerSettings()), theirs)  # type: ignore[arg-type]
    serving = asyncio.create_task(server.serve())
    end = ConnectionSender(ours)
    with contextlib.ExitStack() as sockets:
        sockets.enter_context(theirs)
        async with asyncio.timeout(120):
            while not server.started:
                await asyncio.sleep(0.005)
            clients = []
            for _ in range(NUM_CLIENTS):  # in one turn: none is taken before it is asked to end
                client, connection = socket.socketpair()
                clients.append(sockets.enter_context(client))
                client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                with connection:
                    assert end.send(connection)
            server.servers[0].close()
            with socket.socket() as late:
                assert not end.send(late), "whoever accepts has to pick another one"
            loop = asyncio.get_running_loop()
            for client in clients:
                client.setblocking(False)
                assert (await loop.sock_recv(client, 65536)).startswith(b"HTTP/1.1 200")
            while end.num_open:  # told although it takes nothing more
                await asyncio.sleep(0.005)
            server.should_exit = True
            await serving
    end.close()
