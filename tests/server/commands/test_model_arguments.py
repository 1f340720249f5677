import re
import tomllib
from math import inf
from pathlib import Path
from typing import Any

import pytest

from penstock.server.commands import cli, model_arguments
from penstock.server.commands.model_arguments import config_template, read_config
from penstock.server.models.served_model import ServedModel
from penstock.server.settings import ServerSettings, UsageError, declared_settings, load_settings, public_values

from ...tables import cases, table


@pytest.fixture
def settings_and_models(tmp_path: Path):
    """Plan the models of a file and a command line."""

    def plan(text: str | None = None, **given: Any) -> tuple[ServerSettings, list[ServedModel]]:
        if text is not None:
            given["config"] = str(tmp_path / "penstock.toml")
            Path(given["config"]).write_text(text)
        return model_arguments.settings_and_models(given, ServerSettings)

    return plan


def test_first_models_of_the_command_line_are_preloaded(settings_and_models) -> None:
    _, plans = settings_and_models(model=["owner/a", "owner/b"], max_loaded_models="1")
    assert {plan.config.model_source for plan in plans} == {"--model"}
    assert [(plan.config.model, plan.names, plan.is_preloaded) for plan in plans] == [
        ("owner/a", ("owner/a",), True),
        ("owner/b", ("owner/b",), False),
    ]


def test_one_model_needs_no_file(settings_and_models) -> None:
    given = {"served_model_name": ["x,y"], "default_prompt_name": "query", "adapter": ["x=/a"]}
    settings, (plan,) = settings_and_models(model=["owner/a"], **given)
    assert (plan.names, plan.default_prompt_name) == (("x", "y"), "query")
    assert plan.config == settings.engine_config("owner/a", "x")
    assert (plan.is_preloaded, plan.is_pinned, plan.ttl_s) == (True, False, inf)
    _, (default,) = settings_and_models()
    assert (default.names, default.is_preloaded) == (model_arguments.DEFAULT_NAMES, True)


def test_models_of_a_file(settings_and_models) -> None:
    file = "\n".join(table(__file__, "test_models_of_a_file"))
    settings, (first, second) = settings_and_models(file, num_threads="3")
    assert (settings.port, settings.api_key) == (9000, ("k",))
    assert (first.names, first.is_pinned, first.is_preloaded) == (("a", "text-embedding-3-small", "b"), True, True)
    assert (first.config.dtype, first.config.max_model_len, first.config.num_threads) == ("bfloat16", 128, 3)
    assert first.config.pooler_config.pooling_type == "CLS"
    assert (second.names, second.config.dtype, second.config.num_threads) == (("owner/c",), "float32", 3)
    assert (second.is_preloaded, second.ttl_s, second.default_prompt_name) == (False, 0.5, "query")


def test_flag_overrides_variable_overrides_file(settings_and_models, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_and_models("port = 1\n", model=["a/b"])[0].port == 1
    monkeypatch.setenv("PENSTOCK_PORT", "")
    assert settings_and_models("port = 1\n", model=["a/b"])[0].port == 1
    monkeypatch.setenv("PENSTOCK_PORT", "2")
    assert settings_and_models("port = 1\n", model=["a/b"])[0].port == 2
    assert settings_and_models("port = 1\n", model=["a/b"], port="3")[0].port == 3


@cases(__file__, "text", "message")
def test_invalid_file_is_rejected_with_the_key(settings_and_models, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        settings_and_models(text)


def test_models_in_file_and_command_line_are_rejected(settings_and_models, tmp_path: Path, monkeypatch) -> None:
    tables = "[[models]]\nmodel = 'a/b'\n"
    for words in (["c/d"], ["c/d", "e/f"]):
        with pytest.raises(UsageError, match=r"^MODEL: \S+/penstock.toml has tables of models"):
            settings_and_models(tables, model=words)
    with monkeypatch.context() as patched:
        patched.setenv("PENSTOCK_MODEL", "c/d")
        with pytest.raises(UsageError, match="has tables of models"):
            settings_and_models(tables)
    with pytest.raises(UsageError, match="--served-model-name"):
        settings_and_models(tables, served_model_name=["x"])
    with pytest.raises(UsageError, match="--served-model-name"):
        settings_and_models(model=["a/b", "c/d"], served_model_name=["x"])
    with pytest.raises(UsageError, match=r"^--adapter: there are several models; set `adapter` in the table of each"):
        settings_and_models(model=["a/b", "c/d"], adapter=["x=/a"])
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        settings_and_models(config=str(tmp_path / "none.toml"), model=["a/b"])


def test_environment_does_not_change_tables_of_models(settings_and_models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_NAME", "x")
    monkeypatch.setenv("PENSTOCK_TTL", "1")
    monkeypatch.setenv("PENSTOCK_DTYPE", "float32")
    _, (plan,) = settings_and_models("[[models]]\nmodel = 'a/b'\npin = true\n")
    assert (plan.names, plan.ttl_s, plan.config.dtype) == (("a/b",), inf, "float32")


def test_printed_file_has_all_settings_with_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config"]) == 0
    text = capsys.readouterr().out
    assert text == config_template()
    assert tomllib.loads(text) == {}  # all lines are comments
    widths = {line.startswith("# ---- "): len(line) for line in sorted(text.splitlines(), key=len)}
    assert widths[True] == 120 >= widths[False] > 110
    settings = {
        name for name in declared_settings(ServerSettings) if name not in ("model", "config", "served_model_name")
    }
    assert settings == set(re.findall(r"^# (\w+) = ", text.partition("[[models]]")[0], re.MULTILINE))
    lines = [line[2:] for line in text.splitlines() if re.match(r"# (\w+ = [^<]|\[\[models)", line)]
    (tmp_path / "penstock.toml").write_text("\n".join(lines))
    read = read_config(tmp_path / "penstock.toml")
    assert public_values(load_settings(ServerSettings, {}, file=read.settings)) == public_values(ServerSettings())
    (table,) = read.models
    assert set(table) == {"model", "name", "aliases", "preload", "pin", "ttl"}
