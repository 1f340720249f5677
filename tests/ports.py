"""Ports for servers that tests start."""

import secrets
import socket
from contextlib import suppress
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """An unused port of 127.0.0.1 below the range of ephemeral ports, so that other sockets do not get it."""
    end = int(RANGE.read_text().split()[0])
    while True:
        port = end // 2 + secrets.randbelow(end // 2)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
