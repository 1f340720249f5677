"""Threads that do not delay the end of the process: a pool of threads, and a thread with an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
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


class EventLoopThread:
    """An event loop in its own thread, for callers without one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="penstock-llm", daemon=True)
        self._last_task: asyncio.Task[None] | None = None
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        with self._lock:
            self._has_ended = True
        self._loop.run_until_complete(_cancel_tasks())
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the loop and returns its result; an interrupted wait cancels it.

        Raises:
            EngineUnavailableError: The thread has ended, or ends before `work`.
        """
        with self._lock:
            if self._has_ended:
                work.close()
                raise EngineUnavailableError("The engine was closed.")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise EngineUnavailableError("The engine was closed.") from None
        except BaseException:  # such as KeyboardInterrupt
            future.cancel()
            raise

    def stop(self) -> None:
        """Stops the event loop and waits until the thread has ended. Work that still runs is not completed."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def stop_after(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `work` and then ends the thread. Returns at once.

        The garbage collector runs finalizers in any thread. In the thread of an engine, a wait would block both.
        """
        self._loop.call_soon_threadsafe(self._run_last, work)

    def _run_last(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._last_task = self._loop.create_task(work())
        self._last_task.add_done_callback(lambda _: self._loop.stop())


async def _cancel_tasks() -> None:
    """Cancels the other tasks of the event loop and waits for their ends."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
