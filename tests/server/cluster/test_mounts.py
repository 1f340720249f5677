"""Where models are served on a cluster, without Ray."""

from pathlib import Path

import pytest

from penstock.engine import EngineConfig
from penstock.server.cluster.mounts import everywhere, mounts_of
from penstock.server.settings import UsageError


def config(model: str) -> EngineConfig:
    return EngineConfig(model=model)


def test_a_single_model_is_at_the_root() -> None:
    (mount,) = mounts_of([(config("owner/name"), ("owner/name",), None)])
    assert (mount.prefix, mount.app) == ("/", "penstock-name")


def test_several_are_below_the_last_part_of_their_names() -> None:
    models = [(config("owner/bge m3"), ("owner/bge m3", "x"), "query"), (config("b"), ("/models/b/",), None)]
    mounts = mounts_of(models)
    assert [mount.prefix for mount in mounts] == ["/bge-m3", "/b"]
    assert mounts[0].names == ("owner/bge m3", "x")
    assert mounts[0].default_prompt_name == "query"


def test_no_two_are_at_one_place() -> None:
    with pytest.raises(UsageError, match="two models would be served at /name"):
        mounts_of([(config("a/name"), ("a/name",), None), (config("b/name"), ("b/name",), None)])


def test_a_local_folder_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert everywhere("model") == str(tmp_path / "model")
    assert everywhere("owner/model") == "owner/model"
