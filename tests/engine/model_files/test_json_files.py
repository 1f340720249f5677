"""JSON that is damaged, or that no model needs, is refused in one line that names the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.engine.model_files.model_folder import as_load_error, read_json, read_object
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import ModelLoadError, WeightError
from penstock.engine.protocol.setting import json_object


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[" * 100_000, "nested more than 50 deep"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested more than 50 deep"),
        (b'{"a":' * 51 + b"1" + b"}" * 51, "nested more than 50 deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "the number 9999999999999999999... is too large"),
        (b'{"a": "\\ud800"}', "half of a character"),
    ],
)
def test_what_is_no_json_within_bounds_is_named(content: bytes, part: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError) as caught:
        read_json(path)
    assert caught.value.message.startswith(f"{path} cannot be read: ")
    assert part in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 300 + len(str(path))


def test_what_files_hold_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert read_json(path) is None
    assert read_object(path) == {}
    path.write_text('{"model_max_length": 1000000000000000019884624838656, "a": -3, "b": "\\ud83d\\ude00", "c": NaN}')
    value = read_object(path)
    assert value["model_max_length"] == 1e30  # transformers' way to say that there is no limit
    assert (value["a"], value["b"]) == (-3, "\U0001f600")
    path.write_text('{"a":' * 49 + "1" + "}" * 49)
    assert read_object(path).keys() == {"a"}


@pytest.mark.parametrize("content", ["[]", "3", '"text"'])
def test_config_is_an_object(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"config\.json must hold a JSON object, not"):
        resolve_model(EngineConfig(model=str(tmp_path)))


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").mkdir()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"modules\.json cannot be read: Is a directory"):
        resolve_model(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("truncate_dim", value) for value in (0, -1, 1.5, True, "x", [1])],
        *[("prompts", value) for value in ([1], "x", 7)],
        *[("default_prompt_name", value) for value in ([], {}, 0, "unknown")],
    ],
)
def test_settings_of_the_wrong_kind_are_named(key: str, value: object, tmp_path: Path) -> None:
    sizes = {"model_type": "bert", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.Transformer", "path": ""}]')
    settings = tmp_path / "config_sentence_transformers.json"
    settings.write_text("{}")
    resolve_model(EngineConfig(model=str(tmp_path)))
    settings.write_text(json.dumps({key: value}))
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(EngineConfig(model=str(tmp_path)))
    assert caught.value.message.startswith(str(settings))
    assert repr(value) in caught.value.message


def test_the_command_line_is_read_within_the_same_bounds() -> None:
    for text in ("[" * 100_000, "{", '{"a": ' + "9" * 5000 + "}"):
        with pytest.raises(ValueError, match=r"nested more than|not valid JSON|too large"):
            json_object(text)


@as_load_error("The files of /m cannot be used")
def fail() -> None:
    raise KeyError("a\nb" * 300)


def test_what_no_check_has_foreseen_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "penstock.engine"), pytest.raises(ModelLoadError) as caught:
        fail()
    assert caught.value.message.startswith("The files of /m cannot be used (KeyError: ")
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 700
    assert caplog.records[0].exc_info is not None
    with pytest.raises(WeightError), as_load_error("anything"):
        raise WeightError("as it is")
