"""Measures memory and CPU time of the processes under test, limits both, and kills the processes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000


class NoCgroupError(Exception):
    """This machine lets nobody make one; the message says why."""


def family(pid: int) -> list[int]:
    """Returns `pid` and all its descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [pid]
    for member in found:
        found.extend(children.get(member, []))
    return found


def memory_bytes(pid: int) -> int:
    """Bytes. Resident memory of the process and all its descendants, shared pages included."""
    return sum(_bytes_of(member, "smaps_rollup", "Rss:") for member in family(pid))


def peak_memory_bytes(pid: int) -> int:
    """Bytes. The most that the process and its descendants have had resident, each at its own time."""
    return sum(_bytes_of(member, "status", "VmHWM:") for member in family(pid))


def processor_seconds(pid: int) -> float:
    """Seconds. Processor time that the process and its living descendants have taken."""
    ticks = 0
    for member in family(pid):
        try:
            fields = Path(f"/proc/{member}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def thread_seconds(pid: int) -> dict[tuple[int, int, str], float]:
    """Seconds. Processor time of each thread of the process and its descendants, finer than the kernel's clock ticks.

    By process, thread and name of the thread.
    """
    found = {}
    for member in family(pid):
        for thread in Path(f"/proc/{member}/task").glob("*"):
            try:
                name = (thread / "comm").read_text().strip()
                found[member, int(thread.name), name] = int((thread / "schedstat").read_text().split()[0]) / 1e9
            except OSError:  # it has ended
                continue
    return found


@contextlib.contextmanager
def quota(cores: float) -> Iterator[str]:
    """Makes a group (version 2, or else 1) and yields words that put a command line into it; it is removed at the end.

    Raises:
        NoCgroupError: None can be made.
    """
    is_v2 = (CGROUPS / "cgroup.controllers").is_file()
    folder = (CGROUPS if is_v2 else CGROUPS / "cpu") / f"penstock-bench-{os.getpid()}"
    limit = str(int(cores * PERIOD_US))
    try:
        if is_v2:
            (CGROUPS / "cgroup.subtree_control").write_text("+cpu")
        folder.mkdir()
        try:
            if is_v2:
                (folder / "cpu.max").write_text(f"{limit} {PERIOD_US}")
            else:
                (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (folder / "cpu.cfs_quota_us").write_text(limit)
        except OSError:
            folder.rmdir()
            raise
    except OSError as error:
        raise NoCgroupError(f"no control group with a quota: {error}") from error
    try:
        yield f'sh -c \'echo $$ > {folder}/cgroup.procs && exec "$0" "$@"\''
    finally:
        _remove_group(folder)


def kill(pid: int) -> None:
    """Kills a process. Does nothing if it has already ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def kill_group(leader: int) -> None:
    """Ends the process group of `leader`. Does nothing if it has ended."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def _bytes_of(pid: int, file: str, field: str) -> int:
    """Bytes. A field of a file of /proc that counts in kB; 0 for a process that has ended."""
    try:
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0


def _remove_group(folder: Path) -> None:
    """Removes a control group of killed processes. Retries, because the kernel removes them with a delay."""
    for _ in range(50):
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.1)
        else:
            return
