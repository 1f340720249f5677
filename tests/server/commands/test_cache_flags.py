"""The flags of the cache of embeddings: off by default; missing extras are errors before a model is loaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from penstock.server.commands.serve import open_cache
from penstock.server.settings import ServerSettings, UsageError


def tiers(settings: ServerSettings) -> list[str]:
    cache = open_cache(settings)
    if cache is None:
        return []
    names = [tier.name for tier in cache.figures()]
    cache.close()
    return names


def test_it_is_off_unless_it_has_room(tmp_path: Path) -> None:
    assert tiers(ServerSettings()) == []
    assert tiers(ServerSettings(cache=2**30)) == ["memory"]
    assert tiers(ServerSettings(cache_dir=tmp_path, cache_dir_size=2**20)) == ["memory", "disk"]
    assert (tmp_path / "vectors-1" / "data.mdb").stat().st_size == 2**20


def test_several_http_processes_have_none(tmp_path: Path) -> None:
    for given in ({"cache": 2**30}, {"cache_dir": tmp_path}):
        with pytest.raises(UsageError, match="--api-workers: with more than one, there is no cache"):
            open_cache(ServerSettings(api_workers=2, **given))
    assert open_cache(ServerSettings(api_workers=2)) is None


def test_cache_dir_needs_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--cache-dir: needs lmdb; .*penstock\[cache\]"):
        open_cache(ServerSettings(cache_dir=tmp_path))
