"""Processes end in peace: nothing of theirs aborts on the way out. The count is --ends, of each command:

make test-faults ARGS='-k test_ends --ends 200'
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from ..ports import free_port
from .conftest import COMMAND, START_TIMEOUT_S

# What the interpreter, the C++ runtime and the C library say of a process that breaks while it ends.
BROKEN = re.compile(r"terminate called|Traceback|Fatal Python error|Aborted|core dumped|Exception ignored|double free")
NUM_AT_ONCE = 2 * (os.cpu_count() or 1)
"""More than there are cores: threads that end late show where others are kept waiting."""


def embed(model: Path, folder: Path) -> tuple[int, str]:
    """Embed two lines; return the exit code and what was said."""
    (folder / "texts.txt").write_text("one\ntwo\n")
    command = [*COMMAND, "embed", str(folder / "texts.txt"), "--model", str(model), "--output", str(folder / "out.npy")]
    done = subprocess.run(["nice", *command, "--device", "cpu"], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def serve(model: Path, folder: Path) -> tuple[int, str]:
    """Serve until ready, answer once, then stop by SIGTERM; return the exit code and what was said."""
    port = free_port()
    log = folder / "log.txt"
    command = [*COMMAND, "serve", str(model), "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as stderr, subprocess.Popen(["nice", *command], stderr=stderr) as process:
        give_up_s = time.monotonic() + START_TIMEOUT_S
        try:
            while process.poll() is None and time.monotonic() < give_up_s:
                try:
                    response = httpx.post(f"http://127.0.0.1:{port}/v1/embeddings", json={"input": "one"}, timeout=60)
                except httpx.TransportError:
                    pass
                else:
                    if response.status_code == 200:
                        break
                time.sleep(0.2)
        finally:
            process.send_signal(signal.SIGTERM)
    return process.returncode, log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("run", [embed, serve])
def test_ends(
    run: Callable[[Path, Path], tuple[int, str]], request: pytest.FixtureRequest, small_bert: Path, tmp_path: Path
) -> None:
    count = int(request.config.getoption("ends", 10))

    def one(number: int) -> tuple[int, str]:
        folder = tmp_path / str(number)
        folder.mkdir()
        return run(small_bert, folder)

    began_s = time.monotonic()
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        ends = list(pool.map(one, range(count)))
    broken = [(code, said) for code, said in ends if code or BROKEN.search(said)]
    print(
        f"{run.__name__}: {len(broken)} of {count} starts and ends broke ({NUM_AT_ONCE} at once, "
        f"{time.monotonic() - began_s:.0f} s)"
    )
    assert not broken, broken[0][1]
