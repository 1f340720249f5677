"""Folders of models: JSON files, local folders and the hub cache."""

from pathlib import Path
from typing import Any

import pytest

from penstock.engine.model_files import model_folder
from penstock.engine.model_files.model_folder import EMBEDDED_MODEL, as_load_error, locate_model, read_json, read_object
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import ModelLoadError, WeightError

from ...tables import cases
from .folders import BERT, MEAN, TRANSFORMER, resolve, write


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[" * 100_000, "nested more than 50 deep"),
        (b'{"a":' * 51 + b"1" + b"}" * 51, "nested more than 50 deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "the number 9999999999999999999... is too large"),
        (b'{"a": "\\ud800"}', "half of a character"),
    ],
)
def test_damaged_json_is_named_in_one_line(content: bytes, part: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError) as caught:
        read_json(path)
    assert caught.value.message.startswith(f"{path} cannot be read: ")
    assert part in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 300 + len(str(path))


def test_json_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert read_json(path) is None
    assert read_object(path) == {}
    path.write_text('{"model_max_length": 1000000000000000019884624838656, "a": -3, "b": "\\ud83d\\ude00", "c": NaN}')
    value = read_object(path)
    assert value["model_max_length"] == 1e30  # transformers writes this for no limit
    assert (value["a"], value["b"]) == (-3, "\U0001f600")
    path.write_text('{"a":' * 49 + "1" + "}" * 49)
    assert read_object(path).keys() == {"a"}
    path.unlink()
    path.symlink_to(tmp_path / "not downloaded")
    with pytest.raises(ModelLoadError, match="is a link to a file that does not exist; download the model"):
        read_json(path)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileNotFoundError(2, "No such file", "a.bin"), r"^the head cannot be read: a\.bin: No such file\.$"),
        (KeyError("weight"), r"^the head cannot be read \(KeyError: 'weight'\): a value is damaged"),
        (WeightError("no weight"), "^no weight$"),
    ],
)
def test_errors_of_broken_files_become_load_errors(error: Exception, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message), as_load_error("the head cannot be read"):
        raise error
    full = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space"), as_load_error("the head cannot be read"):
        raise full


@cases(__file__, "file", "content", "reason")
def test_file_without_a_json_object_is_named(file: str, content: str | None, reason: str, tmp_path: Path) -> None:
    write(tmp_path, {"config.json": BERT})
    if content is None:
        (tmp_path / file).mkdir()
    else:
        (tmp_path / file).write_text(content)
    with pytest.raises(ModelLoadError, match=reason):
        resolve_model(EngineConfig(model=str(tmp_path)))


# Places of models ----------------------------------------------------------------------------------------------------


def test_local_folder_of_a_model_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"model/config.json": BERT, "st/modules.json": [TRANSFORMER], "empty/readme.txt": "", "file": ""})
    assert locate_model(str(tmp_path / "model")) == (tmp_path / "model").resolve()
    assert locate_model(str(tmp_path / "st")) == (tmp_path / "st").resolve()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate_model("~/model") == (tmp_path / "model").resolve()
    with pytest.raises(ModelLoadError, match=r"neither config\.json nor modules\.json"):
        locate_model(str(tmp_path / "empty"))
    with pytest.raises(ModelLoadError, match="is a file"):
        locate_model(str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match=r"no folder .* not a hub id"):
        locate_model(str(tmp_path / "nowhere"))


def hub_cache(cache: Path, name: str, files: dict[str, Any]) -> Path:
    """A repository in the hub's cache, as huggingface_hub lays it out."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = cache / f"models--{name.replace('/', '--')}"
    write(repo, {"refs/main": commit, **{f"snapshots/{commit}/{path}": content for path, content in files.items()}})
    return repo / "snapshots" / commit


def test_model_in_the_hub_cache_is_found_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = hub_cache(tmp_path, "owner/tiny", {"config.json": BERT, "pytorch_model.bin": ""})
    assert locate_model("owner/tiny") == snapshot
    with pytest.raises(
        ModelLoadError, match=r"'owner/absent' could not be loaded\. Tried the folder .*owner/absent', the hub"
    ):
        locate_model("owner/absent")
    with pytest.raises(ModelLoadError, match="at revision 'v2'"):
        locate_model("owner/tiny", "v2")
    info = resolve(Path("owner/tiny"))
    (tmp_path / "models--owner--tiny" / "refs" / "main").write_text("f" * 40)
    assert (info.folder, resolve(Path(info.folder)).path) == (str(snapshot), info.path)
    monkeypatch.setattr(model_folder, "embedded_model_folder", lambda: snapshot)
    assert locate_model(EMBEDDED_MODEL) == snapshot
    for revision, installed in (("main", snapshot), (None, None)):
        monkeypatch.setattr(model_folder, "embedded_model_folder", lambda found=installed: found)
        with pytest.raises(ModelLoadError, match="the hub and its local cache"):
            locate_model(EMBEDDED_MODEL, revision)
    hub_cache(tmp_path, "owner/dataset", {"notes.json": {}})
    with pytest.raises(ModelLoadError, match=r"not a model.*give its path\.$"):
        locate_model("owner/dataset")


def test_bin_files_are_fetched_only_for_dense_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"config.json": BERT, "model.safetensors": "", "1_Pooling/config.json": MEAN, "2_Dense/config.json": {}}
    snapshot = write(tmp_path / "snapshot", files)
    calls: list[dict[str, Any]] = []

    def fetch(name: str, **kwargs: Any) -> str:
        calls.append({"name": name, **kwargs})
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert locate_model("owner/tiny", "v1") == snapshot
    assert [c["revision"] for c in calls] == ["v1", "v1"]
    assert "*.bin" not in calls[0]["allow_patterns"]
    assert calls[1]["allow_patterns"] == ["2_Dense/pytorch_model*.bin"]


@pytest.mark.parametrize("has_response", [False, True])
def test_error_of_the_hub_library_becomes_a_load_error(has_response: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class HubError(Exception):
        response = object() if has_response else None

    def fail(name: str, **_: Any) -> str:
        raise HubError("connection lost\nlong story")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    advice = "" if has_response else r"\. Without access to the hub, copy the model .*"
    with pytest.raises(ModelLoadError, match=rf"local cache in '.*': connection lost{advice}$") as caught:
        locate_model("owner/tiny")
    assert isinstance(caught.value.__cause__, HubError)
