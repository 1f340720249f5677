"""A simulated device: forwards with a fixed duration, one after the other, and its idle time.

    python benchmarks/simulated_device.py FORWARD_MS JOBS DONE BELL

So started it is the device itself, by the wall clock, with descriptors to read jobs from and to say their ends to.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import subprocess
import sys
import time
from typing import Final

_FORWARD: Final = b"f"
_RESET: Final = b"r"


def simulate(forward_ms: float, jobs: int, done: int, wakeup_fd: int) -> None:
    """The device: runs the forwards that come through `jobs`, says each one's end, and at the end prints its times."""
    with contextlib.suppress(PermissionError):
        os.nice(-20)  # a device waits for no processor
    busy_s = idle_s = 0.0
    num_forwards = 0
    ended_s: float | None = None
    while job := os.read(jobs, 1):
        began_s = time.perf_counter()
        if job == _RESET:
            busy_s, idle_s, num_forwards, ended_s = 0.0, 0.0, 0, None
            continue
        idle_s += 0.0 if ended_s is None else began_s - ended_s
        time.sleep(forward_ms / 1000)
        ended_s = time.perf_counter()
        busy_s += ended_s - began_s
        num_forwards += 1
        os.write(done, b"d")
        os.write(wakeup_fd, b"\0")
    print(json.dumps({"busy_s": busy_s, "idle_s": idle_s, "num_forwards": num_forwards}))


class WallDevice:
    """A device in a process of its own, which sleeps for as long as a forward lasts.

    Args:
        forward_ms: Of every forward.
    """

    def __init__(self, forward_ms: float) -> None:
        self._forward_ms = forward_ms
        self._num_ended = 0
        self._process: subprocess.Popen[str] | None = None

    def open(self, wakeup_fd: int) -> None:
        """Starts it; it rings when a forward ends."""
        jobs, self._jobs = os.pipe()
        self._done, done = os.pipe()
        arguments = [str(self._forward_ms), *map(str, (jobs, done, wakeup_fd))]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments], pass_fds=(jobs, done, wakeup_fd), stdout=subprocess.PIPE, text=True
        )
        os.close(jobs)
        os.close(done)
        os.set_blocking(self._done, False)

    def close(self) -> dict[str, float]:
        """Ends it; returns its times."""
        assert self._process is not None
        os.close(self._jobs)
        figures: dict[str, float] = json.loads(self._process.communicate()[0])
        os.close(self._done)
        return figures

    def reset(self) -> None:
        """Has it forget its times."""
        os.write(self._jobs, _RESET)

    def submit(self) -> None:
        """Queues a forward."""
        os.write(self._jobs, _FORWARD)

    def num_ended(self) -> int:
        """Returns the forwards that have ended."""
        with contextlib.suppress(BlockingIOError):  # none since the last look
            self._num_ended += len(os.read(self._done, 1 << 10))
        return self._num_ended

    def await_end(self, number: int) -> None:
        """Sleeps until a forward has ended."""
        os.set_blocking(self._done, True)
        while self._num_ended <= number:
            self._num_ended += len(os.read(self._done, 1 << 10))
        os.set_blocking(self._done, False)

    def spend(self, seconds: float) -> None:
        """Has the host compute for so long."""
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            pass


class CountedDevice:
    """A device that keeps to the processor time of this thread, and to the time that it has slept or been given work.

    Args:
        forward_ms: Of every forward.
    """

    def __init__(self, forward_ms: float) -> None:
        self._forward_s = forward_ms / 1000
        self._added_s = 0.0
        self._ends_s: list[float] = []
        self._first = 0  # index of the first forward that is measured
        self._idle_s = 0.0

    def now_s(self) -> float:
        """Returns the time."""
        return time.thread_time() + self._added_s

    def reset(self) -> None:
        """Forgets its times."""
        self._first, self._idle_s = len(self._ends_s), 0.0

    def close(self) -> dict[str, float]:
        """Returns its times."""
        num_forwards = len(self._ends_s) - self._first
        return {"busy_s": num_forwards * self._forward_s, "idle_s": self._idle_s, "num_forwards": num_forwards}

    def submit(self) -> None:
        """Queues a forward."""
        now_s = self.now_s()
        free_s = self._ends_s[-1] if self._ends_s else now_s
        self._idle_s += max(now_s - free_s, 0.0)
        self._ends_s.append(max(now_s, free_s) + self._forward_s)

    def num_ended(self) -> int:
        """Returns the forwards that have ended."""
        return bisect.bisect_right(self._ends_s, self.now_s())

    def await_end(self, number: int) -> None:
        """Sleeps until a forward has ended."""
        self._added_s += max(self._ends_s[number] - self.now_s(), 0.0)

    def sleep(self) -> None:
        """Sleeps until the next forward ends."""
        self.await_end(self.num_ended())

    def spend(self, seconds: float) -> None:
        """Has the host compute for so long."""
        self._added_s += seconds


if __name__ == "__main__":
    simulate(float(sys.argv[1]), *map(int, sys.argv[2:]))
