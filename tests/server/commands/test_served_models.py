"""Models that are to be served, where the files of one of them are missing or damaged."""

import json
import shutil
from pathlib import Path

import pytest

from penstock.engine import EngineConfig
from penstock.server.commands.model_plans import ModelPlan
from penstock.server.commands.served_models import served_models
from penstock.server.settings import ServerSettings, UsageError

CONFIG = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
    "vocab_size": 100,
}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:53aa\nsize 90868376\n"


def header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(header(b"{}"))
    return folder


def plan(folder: Path, name: str, *, preload: bool = True) -> ModelPlan:
    return ModelPlan((name,), EngineConfig(model=str(folder), name=name), is_preloaded=preload)


@pytest.mark.parametrize("preload", [True, False])
@pytest.mark.parametrize(
    ("file", "content"),
    [
        *[
            ("model.safetensors", content)
            for content in (
                b"",
                b"abc",
                POINTER,
                header(b"\xff\xfe{"),
                header(b"{nope"),
                header(b"[1]"),
                header(b'{"a": [1]}'),
                header(b'{"a": {"dtype": "F32"}}'),
                header(b'{"a": {"dtype": "F32", "shape": "xy", "data_offsets": [0, 4]}}'),
                header(b"[" * 100_000),
                (1 << 40).to_bytes(8, "little") + b"{}",
                "a folder",
                "a dangling link",
            )
        ],
        *[
            (file, content)
            for file in ("config.json", "modules.json", "tokenizer_config.json", "config_sentence_transformers.json")
            for content in (b"", b"{nope", b"\xff\xfe", b"3", b"null", POINTER, "a folder", "a dangling link")
        ],
    ],
)
def test_damaged_model_keeps_no_other_from_serving(
    file: str, content: bytes | str, preload: bool, tmp_path: Path
) -> None:
    good, bad = model(tmp_path / "good"), model(tmp_path / "bad")
    (bad / "modules.json").write_text("[]")
    (bad / file).unlink(missing_ok=True)
    if content == "a folder":
        (bad / file).mkdir()
    elif content == "a dangling link":
        (bad / file).symlink_to(tmp_path / "nothing")
    else:
        assert isinstance(content, bytes)
        (bad / file).write_bytes(content)
    plans = [plan(bad, "bad", preload=preload), plan(good, "good")]
    models = served_models(plans, ServerSettings(model_memory=2**30), 2)
    assert [served.names for served in models] == [("bad",), ("good",)]
    assert models[1].info is not None


def test_missing_folder_keeps_no_other_from_serving(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plans = [plan(model(tmp_path / "good"), "good"), plan(tmp_path / "nothing", "gone", preload=False)]
    models = served_models(plans, ServerSettings(), 2)
    assert [served.info is None for served in models] == [False, True]
    assert "gone could not be loaded now" in caplog.text


def test_start_is_refused_where_no_model_can_be_used(tmp_path: Path) -> None:
    bad = model(tmp_path / "bad")
    (bad / "config.json").write_text("")
    shutil.copytree(bad, tmp_path / "worse")
    with pytest.raises(UsageError, match=r"bad/config\.json cannot be read"):
        served_models([plan(bad, "bad"), plan(tmp_path / "worse", "worse")], ServerSettings(), 2)


def test_missing_prompt_is_refused(tmp_path: Path) -> None:
    plans = [plan(model(tmp_path / "a"), "a"), plan(model(tmp_path / "b"), "b")]
    plans[1] = ModelPlan(("b",), plans[1].config, default_prompt_name="query")
    with pytest.raises(UsageError, match="b has no prompt 'query'"):
        served_models(plans, ServerSettings(), 2)


def test_model_above_the_memory_limit_names_both_sizes(tmp_path: Path) -> None:
    big = model(tmp_path / "big")
    text = json.dumps({"a": {"dtype": "F32", "shape": [1 << 18], "data_offsets": [0, 1 << 20]}}).encode()
    (big / "model.safetensors").write_bytes(header(text) + bytes(1 << 20))
    with pytest.raises(UsageError, match=r"big alone takes 1\.0 MiB, and the limit is 512\.0 KiB"):
        served_models([plan(big, "big")], ServerSettings(model_memory=2**19), 1)
