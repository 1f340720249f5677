"""Threads start when a job needs one, and end with their pool."""

import subprocess
import sys
import threading

import pytest

from penstock.engine.daemon_threads import DaemonThreadPool
from penstock.engine.protocol.errors import EngineUnavailableError

from ..waiting import wait_until

NAME = "a daemon thread"


def num_threads() -> int:
    return [thread.name for thread in threading.enumerate() if thread.daemon].count(NAME)


def test_threads_start_up_to_the_limit_and_end_with_the_pool() -> None:
    pool, may_end = DaemonThreadPool(2, NAME), threading.Event()
    for number in range(3):  # an idle thread takes the next job
        assert pool.submit(lambda number=number: number).result(60) == number  # type: ignore[misc]
        wait_until(lambda: not pool._num_unfinished)
        assert num_threads() == 1
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(60)
    wait_until(lambda: not pool._num_unfinished)
    running = [pool.submit(lambda: may_end.wait(60)) for _ in range(2)]
    wait_until(lambda: all(future.running() for future in running))
    cancelled, waiting = (pool.submit(lambda: pytest.fail("it runs")) for _ in range(2))
    assert cancelled.cancel()
    assert num_threads() == 2
    pool.close()
    with pytest.raises(EngineUnavailableError):
        waiting.result(60)
    with pytest.raises(EngineUnavailableError):
        pool.submit(may_end.set)
    may_end.set()
    assert [future.result(60) for future in running] == [True, True]
    wait_until(lambda: num_threads() == 0)


def test_jobs_without_a_thread_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool, may_end = DaemonThreadPool(2, NAME), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(EngineUnavailableError, match="cannot start a thread at the moment: can't start new thread"):
            pool.submit(may_end.set)
    first = pool.submit(lambda: may_end.wait(60))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        second = pool.submit(lambda: 2)
    may_end.set()
    assert (first.result(60), second.result(60)) == (True, 2)  # the only thread runs both
    pool.close()


def test_process_ends_while_a_job_runs() -> None:
    code = "from penstock.engine.daemon_threads import DaemonThreadPool; import threading\nbegun = threading.Event()\n"
    code += "DaemonThreadPool(1, 'a').submit(lambda: begun.set() or threading.Event().wait())\nbegun.wait()"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60, check=False).returncode == 0
