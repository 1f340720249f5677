"""The engine process: its end does not end the client, and it does not outlive the client."""

import asyncio
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.engine import AsyncEngine
from penstock.engine.client import engine_process, running_core
from penstock.engine.client.core_supervisor import EngineState
from penstock.engine.client.stats import DispatcherStats
from penstock.engine.protocol import errors
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import LoadFailed, Start, StepResults
from penstock.engine.protocol.params import PoolingParams

from ...servers import children_of, exists
from ...waiting import until

PARAMS = PoolingParams()


async def test_core_is_replaced_if_its_results_cannot_be_read(
    minilm_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await AsyncEngine.start(EngineConfig(model=str(minilm_folder), num_threads=1))
    count = DispatcherStats.count

    def fail_once(stats: DispatcherStats, message: StepResults) -> None:
        monkeypatch.setattr(DispatcherStats, "count", count)
        raise RuntimeError("made up")

    monkeypatch.setattr(DispatcherStats, "count", fail_once)
    with pytest.raises(errors.EngineUnavailableError):
        await asyncio.wait_for(engine.embed(["lost"], PARAMS), 120)
    await until(lambda: engine.state is EngineState.READY)
    assert engine.num_restarts == 1
    assert (await engine.embed(["again"], PARAMS)).embeddings.shape == (1, 384)
    await engine.close()


async def test_process_and_its_socket_end_with_the_parent(minilm_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / ("t" * 119)  # a long path has a link for the socket
    folder.mkdir()
    script = textwrap.dedent("""
        import asyncio, sys
        from penstock.engine import AsyncEngine, EngineConfig

        async def main():
            await AsyncEngine.start(EngineConfig(model=sys.argv[1]))
            print("ready", flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """)
    command = [sys.executable, "-P", "-c", script, str(minilm_folder)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(folder)})
    try:
        assert parent.stdout is not None
        assert await asyncio.to_thread(parent.stdout.readline) == b"ready\n"
        (process,) = children_of(parent.pid)
        assert [len(list(made.iterdir())) for made in folder.iterdir()] == [1]
    finally:
        parent.kill()
        parent.wait()
        parent.communicate()
    await until(lambda: not exists(process))
    assert not list(folder.iterdir())


async def test_no_thread_with_tensors_outlives_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that frees tensors while the interpreter ends aborts the process."""
    script = textwrap.dedent("""
        import sys, threading
        from penstock.engine.core import core_process

        core_process.main()
        print(*sorted(thread.name for thread in threading.enumerate()), file=open(sys.argv[-1], "w"))
    """)
    popen, threads = subprocess.Popen, tmp_path / "threads"

    def start(arguments: tuple[str, ...], **options: Any) -> subprocess.Popen[bytes]:
        return popen((sys.executable, "-P", "-c", script, *arguments[-2:], str(threads)), **options)

    monkeypatch.setattr(engine_process.subprocess, "Popen", start)
    on_load, on_exit = Mock(), Mock()
    core = running_core.ProcessCore(Start(EngineConfig(model=str(tmp_path))), on_load, Mock(), on_exit)
    await core.start()
    await until(lambda: on_exit.called)
    await core.close()
    assert isinstance(on_load.call_args.args[0], LoadFailed)
    assert "exit code 0" in on_exit.call_args.args[0]
    assert threads.read_text().split() == ["MainThread", "lifeline", "log"]
