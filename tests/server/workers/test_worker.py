from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

from penstock.server.http.http_server import uvicorn_config
from penstock.server.settings import ServerSettings
from penstock.server.workers.handover import MAIN, METRICS, ConnectionSender
from penstock.server.workers.worker import PassedConnectionServer

from ...waiting import until


async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        for step in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{step}.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def metrics_application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


async def test_connection_to_the_metrics_port_gets_its_application() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    config = uvicorn_config(application, ServerSettings())
    server = PassedConnectionServer(config, theirs, metrics_app=metrics_application)
    serving = asyncio.create_task(server.serve())
    sender = ConnectionSender(ours)
    with theirs:
        await until(lambda: server.started)
        for kind, status in ((MAIN, b"200"), (METRICS, b"204")):
            client, connection = socket.socketpair()
            with client, connection:
                client.setblocking(False)
                client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert sender.send(connection, kind)
                response = await asyncio.get_running_loop().sock_recv(client, 65536)
            assert response.split()[1] == status
        await until(lambda: not sender.num_open)
        server.should_exit = True
        await serving
    sender.close()


async def test_ending_server_serves_its_passed_connections() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = PassedConnectionServer(uvicorn_config(application, ServerSettings()), theirs)
    serving = asyncio.create_task(server.serve())
    sender = ConnectionSender(ours)
    with contextlib.ExitStack() as sockets:
        sockets.enter_context(theirs)
        await until(lambda: server.started)
        clients = []
        for _ in range(100):  # all wait when the server is closed
            client, connection = socket.socketpair()
            clients.append(sockets.enter_context(client))
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            with connection:
                assert sender.send(connection)
        server.servers[0].close()
        with socket.socket() as late:
            assert not sender.send(late)
        async with asyncio.timeout(120):
            for client in clients:
                client.setblocking(False)
                response = await asyncio.get_running_loop().sock_recv(client, 65536)
                assert response.startswith(b"HTTP/1.1 200")
        await until(lambda: not sender.num_open)
        server.should_exit = True
        await serving
    sender.close()
