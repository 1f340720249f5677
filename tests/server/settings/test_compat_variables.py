"""Variables of TEI and Infinity set settings of penstock."""

from typing import Any

import pytest

from penstock.server.commands.model_arguments import settings_and_models
from penstock.server.models.served_model import ServedModel
from penstock.server.settings import ServerSettings, UsageError, public_values

from ...tables import cases, table

TEI = table(__file__, "tei")


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("HOSTNAME", raising=False)  # Docker sets it

    def plan(variables: dict[str, str], **given: Any) -> tuple[ServerSettings, list[ServedModel]]:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return settings_and_models(given, ServerSettings)

    return plan


def test_variables_of_tei_set_settings(plan: Any) -> None:
    settings, (model,) = plan(TEI, env_compat="tei")
    expected = {**table(__file__, "test_variables_of_tei_set_settings"), "cors_origins": ("https://a.example",)}
    assert expected.items() <= public_values(settings).items()
    assert (settings.api_key, model.names) == (("secret",), ("bge",))
    assert settings.engine.pooler_config.pooling_type == "LAST"
    notes = {note.partition(" ")[0].partition("=")[0]: note for note in settings.env_notes}
    assert set(notes) == set(TEI)
    assert notes["MAX_BATCH_TOKENS"] == "MAX_BATCH_TOKENS=1024 sets --max-num-batched-tokens"
    assert notes["API_KEY"] == "API_KEY sets --api-key"
    assert "has no effect: it is no IP address" in notes["HOSTNAME"]
    assert "has no effect" in notes["UDS_PATH"]
    assert "secret" not in "".join(settings.env_notes)


def test_variables_are_read_on_request_only(plan: Any) -> None:
    settings, _ = plan(TEI, model=["a/b"])
    assert public_values(settings) == public_values(ServerSettings(model="a/b"))


def test_flags_and_own_variables_have_precedence(plan: Any) -> None:
    variables = {"MODEL_ID": "a/b", "PORT": "1", "DTYPE": "float16", "PENSTOCK_PORT": "2", "PENSTOCK_ENV_COMPAT": "tei"}
    settings, (model,) = plan(variables, model=["c/d"], dtype="float32")
    assert (settings.port, model.config.dtype, model.config.model) == (2, "float32", "c/d")
    assert len(settings.env_notes) == 3
    assert all("has precedence" in note for note in settings.env_notes)


def test_variables_of_infinity_set_settings(plan: Any) -> None:
    variables = table(__file__, "test_variables_of_infinity_set_settings")
    settings, (model,) = plan(variables, env_compat="infinity")
    assert (settings.port, settings.api_key, settings.root_path, settings.log_level) == (7997, ("k",), "/api", "debug")
    assert (model.config.model, model.config.devices) == ("a/b", ("cuda:0", "cuda:1"))
    assert model.config.scheduler.max_num_seqs == 64
    assert len(settings.env_notes) == len(variables)
    assert settings.env_notes[-1].endswith("Infinity has no such variable; did you mean QUEUE_SIZE?")


def test_variables_without_effect_are_noted(plan: Any) -> None:
    variables = {"MODEL_ID": "a/b", "URL_PREFIX": "/v1/", "PRELOAD_ONLY": "false", "PERMISSIVE_CORS": "0"}
    settings, _ = plan({f"INFINITY_{name}": value for name, value in variables.items()}, env_compat="infinity")
    assert (settings.root_path, settings.cors_origins) == ("", ())
    assert sorted(note.partition("=")[0] for note in settings.env_notes if "has no effect: it is off" in note) == [
        "INFINITY_PERMISSIVE_CORS", "INFINITY_PRELOAD_ONLY"
    ]  # fmt: skip
    assert "INFINITY_URL_PREFIX=/v1/ has no effect: the routes exist with and without /v1" in settings.env_notes
    settings, _ = plan({"MODEL_ID": "a/b", "HOSTNAME": "10.0.0.1", "AUTO_TRUNCATE": "false"}, env_compat="tei")
    assert settings.host == "10.0.0.1"
    assert any(note.startswith("AUTO_TRUNCATE=false has no effect: TEI's routes") for note in settings.env_notes)


def test_two_variables_for_one_setting_are_rejected(plan: Any) -> None:
    variables = {"INFINITY_MODEL_ID": "a/b", "INFINITY_URL_PREFIX": "/a", "INFINITY_PROXY_ROOT_PATH": "/b"}
    with pytest.raises(UsageError, match=r"^INFINITY_PROXY_ROOT_PATH: INFINITY_URL_PREFIX also sets"):
        plan(variables, env_compat="infinity")


def test_lists_of_infinity_name_several_models(plan: Any) -> None:
    variables = table(__file__, "test_lists_of_infinity_name_several_models")
    with pytest.raises(UsageError, match="served as 'x'"):
        plan(variables, env_compat="infinity")
    settings, models = plan({"INFINITY_SERVED_MODEL_NAME": "x;y"}, env_compat="infinity")
    found = [(m.names, m.config.model, m.config.revision, m.config.trust_remote_code, m.config.dtype) for m in models]
    assert found == [(("x",), "a/b", None, True, "float32"), (("y",), "c/d", "main", False, "float32")]
    assert settings.port == 1
    with pytest.raises(UsageError, match="INFINITY_MODEL_ID"):
        plan({}, env_compat="infinity", model=["e/f"])
    with pytest.raises(UsageError, match="INFINITY_DTYPE: must have one value, or one for each model"):
        plan({"INFINITY_DTYPE": "auto;auto;auto"}, env_compat="infinity")


@cases(__file__, "variable", "value", "message")
def test_impossible_value_is_an_error(plan: Any, variable: str, value: str, message: str) -> None:
    server = "infinity" if variable.startswith("INFINITY_") else "tei"
    with pytest.raises(UsageError) as error:
        plan({variable: value}, model=["a/b"], env_compat=server)
    assert str(error.value).startswith(message)
    assert ("(got" in str(error.value)) is (variable != "API_KEY")


def test_two_prompts_are_an_error(plan: Any) -> None:
    with pytest.raises(UsageError, match="--default-prompt"):
        plan({"DEFAULT_PROMPT": "a", "DEFAULT_PROMPT_NAME": "query", "MODEL_ID": "a/b"}, env_compat="tei")
