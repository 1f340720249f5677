"""The models of `penstock serve`, from the command line or the TOML file of `--config`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Final, TypeVar

from penstock.engine import EngineConfig

from ..settings import ModelSettings, ServerSettings, UsageError, declared_settings, load, near_name
from .default_model import model_and_names

Settings = TypeVar("Settings", bound=ServerSettings)
MODELS: Final = "models"
ELSEWHERE: Final = {
    "config": "a file names no other file",
    "model": "write a [[models]] table with `model` in it",
    "served_model_name": "write `name` and `aliases` in the [[models]] table",
}
"""Settings that have no place in a file, and what to write instead."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A TOML file: settings at its top, and a table for each model.

    Attributes:
        path: Of the file.
        settings: Values of ServerSettings, as TOML has them.
        models: The tables of models, not checked yet.
    """

    path: Path
    settings: Mapping[str, Any]
    models: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model to serve.

    Attributes:
        names: Served names, the shown one first.
        config: Of its engine.
        default_prompt_name: As the setting of that name.
        is_preloaded: Whether it is loaded when the server starts.
        is_pinned: Whether it stays when memory is needed for others.
        ttl_s: Seconds without a request after which it is unloaded; infinity: never.
    """

    names: tuple[str, ...]
    config: EngineConfig
    default_prompt_name: str | None = None
    is_preloaded: bool = True
    is_pinned: bool = False
    ttl_s: float = inf


def planned(given: dict[str, Any], kind: type[Settings]) -> tuple[Settings, list[ModelPlan]]:
    """Returns the settings of the server and its models, from the command line, the environment and the file.

    Args:
        given: Values of flags; `model` is a list of models.
        kind: The settings of the command.

    Raises:
        UsageError: As `load`, `read_config` and `plan_models` do.
    """
    words = given.pop("model", [])
    if len(words) == 1:
        given["model"] = words[0]
    settings, file = load(kind, given, positional=("model",)), None
    if settings.config is not None:
        file = read_config(settings.config)
        settings = load(kind, given, positional=("model",), file=file.settings, file_place=f"{file.path}: ")
    return settings, plan_models(settings, words if len(words) > 1 else (), file)


def read_config(path: Path) -> ConfigFile:
    """Reads a file.

    Raises:
        UsageError: It cannot be read, is no TOML, or has a key that is no setting.
    """
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"--config: {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config: {path} is no TOML: {error}") from error
    models = content.pop(MODELS, [])
    if not isinstance(models, list) or not all(isinstance(table, dict) for table in models):
        raise UsageError(f"{path}: {MODELS} must be tables: begin each with a line [[{MODELS}]]")
    known = declared_settings(ServerSettings)
    for key in content:
        if key in ELSEWHERE:
            raise UsageError(f"{path}: {key} has no place at the top: {ELSEWHERE[key]}")
        if key not in known:
            raise UsageError(f"{path}: {key} is no setting{near_name(key, known)}")
    return ConfigFile(path, content, tuple(models))


def plan_models(settings: ServerSettings, words: Sequence[str | None], file: ConfigFile | None) -> list[ModelPlan]:
    """Returns the models to serve, in their order.

    Args:
        settings: Of the server. Their engine settings hold for every model, unless its table says otherwise.
        words: Models of the command line, if there are several.
        file: Of --config.

    Raises:
        UsageError: A table is wrong, two models have one name, or more models are preloaded or pinned than fit.
    """
    tables = () if file is None else file.models
    if tables and (words or settings.model is not None):
        raise UsageError(f"MODEL: {file.path if file else ''} has tables of models; name them there, or only here")
    if tables and settings.served_model_name:
        raise UsageError("--served-model-name: give `name` and `aliases` in the table of the model")
    most = settings.max_loaded_models or max(len(tables), len(words), 1)
    if len(words) > 1 and settings.served_model_name:
        raise UsageError("--served-model-name: of several models; give each a table with `name` in --config FILE")
    if file is None or not tables:
        plans = [_of_word(settings, word) for word in words or (settings.model,)]
        plans = [replace(plan, is_preloaded=i < most) for i, plan in enumerate(plans)]
    else:
        plans = [_of_table(settings, table, f"{file.path}: models[{i}]", i < most) for i, table in enumerate(tables)]
        _check_places(plans, most)
    _check_names(plans)
    return plans


def _of_word(settings: ServerSettings, word: str | None) -> ModelPlan:
    model, names = model_and_names(word, settings.served_model_name)
    config = replace(settings, model=word).engine_config(model, names[0])
    return ModelPlan(names, config, settings.default_prompt_name)


def _of_table(settings: ServerSettings, table: Mapping[str, Any], place: str, is_among_first: bool) -> ModelPlan:
    own_keys, server_keys = declared_settings(ModelSettings), declared_settings(ServerSettings)
    for key in table:
        if key in ELSEWHERE and key not in own_keys:
            raise UsageError(f"{place}.{key}: has no place in a table: {ELSEWHERE[key]}")
        if key not in own_keys and key in server_keys:
            raise UsageError(f"{place}.{key}: is a setting of the server; write it above the tables")
        if key not in own_keys:
            raise UsageError(f"{place}.{key}: is no setting of a model{near_name(key, own_keys)}")
    base = ModelSettings(engine=settings.engine, default_prompt_name=settings.default_prompt_name)
    own = load(ModelSettings, {}, file=table, file_place=f"{place}.", base=base)
    if own.model is None:
        raise UsageError(f"{place}.model: is missing; name a local folder or a hub id")
    if own.pin and own.ttl is not None:
        raise UsageError(f"{place}.ttl: the model is pinned, so that it stays; leave pin or ttl out")
    model, names = model_and_names(own.model)
    names = tuple(dict.fromkeys((own.name, *own.aliases) if own.name else (*names, *own.aliases)))
    return ModelPlan(
        names,
        replace(own.engine, model=model, name=names[0]),
        own.default_prompt_name,
        is_preloaded=is_among_first if own.preload is None else own.preload,
        is_pinned=own.pin,
        ttl_s=inf if own.ttl is None else own.ttl,
    )


def _check_names(plans: Sequence[ModelPlan]) -> None:
    seen: dict[str, str] = {}
    for plan in plans:
        for name in plan.names:
            if name in seen:
                raise UsageError(
                    f"two models are served as {name!r}: {seen[name]} and {plan.config.model}; give one another "
                    "`name` in its table of --config FILE"
                )
        seen.update(dict.fromkeys(plan.names, plan.config.model))


def _check_places(plans: Sequence[ModelPlan], most: int) -> None:
    for key, chosen in (
        ("preload", [plan for plan in plans if plan.is_preloaded]),
        ("pin", [plan for plan in plans if plan.is_pinned]),
    ):
        if len(chosen) > most:
            raise UsageError(f"--max-loaded-models: at most {most}, but {len(chosen)} models say {key} = true")
    if len(plans) > most and sum(plan.is_pinned for plan in plans) == most:
        raise UsageError("--max-loaded-models: pinned models take all places; no other model could ever be loaded")
