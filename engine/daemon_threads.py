"""Worker threads that do not delay the end of the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from .protocol.errors import EngineUnavailableError, shutting_down

T = TypeVar("T")
_Job = tuple[Future[Any], Callable[[], Any]]


class DaemonThreadPool:
    """Runs jobs in the order of their arrival. Python does not wait for running jobs at the end of the process.

    It waits for those of a ThreadPoolExecutor: seconds for a large image.

    Args:
        num_threads: Maximum number of threads. Each is started when a job needs it.
        name: Name of the threads.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._max_threads = num_threads
        self._name = name
        self._lock = threading.Lock()
        self._num_threads = self._num_unfinished = 0
        self._is_closed = False
        self._jobs = SimpleQueue[_Job | None]()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queues a job.

        Raises:
            EngineUnavailableError: There is no thread and none can be started, or `close` was called.
        """
        future = Future[T]()
        with self._lock:
            if self._is_closed:
                raise shutting_down()
            if self._num_threads <= self._num_unfinished and self._num_threads < self._max_threads:
                self._start_thread()
            self._num_unfinished += 1
            self._jobs.put((future, job))
        return future

    def _start_thread(self) -> None:
        try:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        except RuntimeError as error:
            if not self._num_threads:
                message = f"The server cannot start a thread at the moment: {error}. Please try again later."
                raise EngineUnavailableError(message) from None
        else:
            self._num_threads += 1

    def close(self) -> None:
        """Ends the threads after their running jobs. Waiting jobs fail with EngineUnavailableError."""
        with self._lock:
            self._is_closed = True
            while (waiting := self._next_waiting()) is not None:
                if waiting[0].set_running_or_notify_cancel():
                    waiting[0].set_exception(shutting_down())
            for _ in range(self._num_threads):
                self._jobs.put(None)

    def _next_waiting(self) -> _Job | None:
        try:
            return self._jobs.get_nowait()
        except Empty:
            return None

    def _work(self) -> None:
        while (next_job := self._jobs.get()) is not None:
            _run(*next_job)
            del next_job  # it refers to the input
            with self._lock:
                self._num_unfinished -= 1


def _run(future: Future[T], job: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = job()
    except BaseException as error:  # noqa: BLE001 - the caller gets it from the future
        future.set_exception(error)
        del future  # the traceback of the error refers to this frame
    else:
        future.set_result(result)
