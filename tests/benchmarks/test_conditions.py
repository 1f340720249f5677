"""What the conditions are made of: loads of certain lengths, groups with a quota, and the time that threads take."""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
import time
from pathlib import Path

import processes
import pytest
from conditions import AROUND, SizedLoad


def test_texts_have_the_tokens_that_are_asked_for() -> None:
    load = SizedLoad("sized", 30, 30, 4, 8, ("dam", "gate"))
    assert load.num_tokens == 30 + AROUND
    assert all(len(text.split()) == 30 for texts in load.requests(3) for text in texts)


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_gets_a_quota(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "CGROUPS", tmp_path)
    removed: list[Path] = []
    monkeypatch.setattr(processes, "_remove_group", removed.append)
    (tmp_path / "cpu").mkdir()
    if version == 2:
        (tmp_path / "cgroup.controllers").write_text("cpu memory")
    with processes.quota(1.5) as entering:
        folder = next(path for path in tmp_path.rglob("penstock-bench-*"))
        if version == 2:
            assert (folder / "cpu.max").read_text() == "150000 100000"
        else:
            assert (folder / "cpu.cfs_quota_us").read_text() == "150000"
        command = [*shlex.split(entering), "printf", "%s", "a word"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "a word"
        assert (folder / "cgroup.procs").read_text().strip().isdigit()
    assert removed == [folder]


def test_that_none_can_be_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "CGROUPS", tmp_path / "nowhere")
    with pytest.raises(processes.NoCgroupError, match="no control group with a quota"), processes.quota(1.0):
        pass


def test_the_time_of_each_thread_is_seen() -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            sum(range(1_000))

    thread = threading.Thread(target=work)
    before = processes.thread_seconds(os.getpid())
    thread.start()
    try:
        give_up_s = time.monotonic() + 120
        while sum((after := processes.thread_seconds(os.getpid())).values()) - sum(before.values()) <= 0.05:
            assert time.monotonic() < give_up_s, "no thread has worked"
    finally:
        stop.set()
        thread.join()
    (new,) = after.keys() - before.keys()
    assert new[:2] == (os.getpid(), thread.native_id)
    assert after[new] > 0
