"""The `penstock` command with a gate for the lines of batches, so that tests do not depend on speed.

The file PENSTOCK_TEST_GATE has a number. Lines with larger numbers wait before their requests. Without the file no line
waits.
"""

import asyncio
import os
import sys
from pathlib import Path

from penstock.server.batches.internal_client import InternalClient, RouteResponse
from penstock.server.commands.cli import main

COMMAND = (sys.executable, "-P", __file__)
LOOK_EVERY_S = 0.01


class Gate:
    """Moves a gate. `environment` has the variables of the server."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment = {"PENSTOCK_TEST_GATE": str(path)}

    def let_through(self, number: int) -> None:
        """Let lines up to this number run."""
        part = self.path.with_suffix(".part")
        part.write_text(str(number))
        part.rename(self.path)

    def open(self) -> None:
        """Let all lines run."""
        self.path.unlink()


def install(path: Path) -> None:
    """Let lines wait for a gate."""
    send = InternalClient.send

    def is_open(number: int) -> bool:
        try:
            return number <= int(path.read_text())
        except FileNotFoundError:
            return True

    async def send_behind_gate(
        self: InternalClient, route: str, content: bytes, owner: str, name: str
    ) -> RouteResponse:
        number = int(name.rpartition("_")[2])
        while not is_open(number):
            await asyncio.sleep(LOOK_EVERY_S)
        return await send(self, route, content, owner, name)

    InternalClient.send = send_behind_gate  # type: ignore[method-assign]


if __name__ == "__main__":
    install(Path(os.environ["PENSTOCK_TEST_GATE"]))
    sys.exit(main())
