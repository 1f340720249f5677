"""What processes under test hold of memory and take of the processor, and how they are ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path


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


def kill(pid: int) -> None:
    """Ends a process at once; one that has ended already is fine."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def kill_group(leader: int) -> None:
    """Ends what is left of the process group that `leader` began; that nothing is left is fine."""
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
