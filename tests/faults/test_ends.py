"""Commands end without an abort. `--ends` sets the number of runs:

make test-faults ARGS='-k test_ends --ends 200'
"""

from __future__ import annotations

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ..servers import COMMAND, Launch

# Messages of the interpreter, the C++ runtime and the C library about a process that breaks while it ends.
BROKEN = re.compile(r"terminate called|Traceback|Fatal Python error|Aborted|core dumped|Exception ignored|double free")
NUM_PARALLEL = 2 * (os.cpu_count() or 1)
"""More than cores, so that threads end late."""


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("command", ["embed", "serve"])
def test_command_ends_without_an_abort(
    command: str, request: pytest.FixtureRequest, small_bert: Path, launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / "texts.txt").write_text("one\ntwo\n")

    def embed(number: int) -> tuple[int, str]:
        flags = ("--model", str(small_bert), "--output", str(tmp_path / f"{number}.npy"), "--device", "cpu")
        words = ["nice", *COMMAND, "embed", str(tmp_path / "texts.txt"), *flags]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    def serve(_: int) -> tuple[int, str]:
        server = launch(model=small_bert, command=("nice", *COMMAND))
        assert server.embed("one").status_code == 200
        return server.stop(), server.log.read_text()

    with ThreadPoolExecutor(NUM_PARALLEL) as pool:
        ends = list(pool.map(embed if command == "embed" else serve, range(request.config.getoption("ends", 10))))
    assert [output for code, output in ends if code or BROKEN.search(output)] == []
