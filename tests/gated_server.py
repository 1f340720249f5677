"""The `penstock` command with a gate for the lines of batches, so that no test depends on the speed of the machine.

The file named by PENSTOCK_TEST_GATE holds a number. A line with a larger number waits before its route is asked, until
the file holds a number at least as large. Without the file no line waits.
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
    """The file of a gate, as tests move it.

    Args:
        path: The file.
    """

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
    """Let lines wait for the gate at `path`."""
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
