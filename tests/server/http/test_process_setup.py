"""Garbage collection and the limit of open files of a process that serves."""

import gc
import resource

import pytest

from penstock.server.http.process_setup import file_limit, freeze_gc, has_free_file, raise_file_limit


def test_objects_of_the_start_are_not_collected() -> None:
    threshold = gc.get_threshold()
    try:
        freeze_gc()
        assert gc.get_freeze_count() > 1_000
        assert (gc.get_threshold()[0] >= 10_000, *gc.get_threshold()[1:]) == (True, 20, 20)
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)


def test_limit_of_open_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1000), hard))
        assert (file_limit(), has_free_file()) == (min(soft, 1000), True)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        assert not has_free_file()
        raise_file_limit()
        assert file_limit() == hard - 16
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert file_limit() == 2**20
