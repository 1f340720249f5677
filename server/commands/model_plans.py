"""What `penstock serve` is asked to serve: models of the command line or of a file, each with settings of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from ..settings import EngineSettings, ServerSettings, UsageError
from ..settings.types import Names, Seconds
from .config_file import ELSEWHERE, ConfigFile, read_config, suggestion
from .default_model import model_and_names
from .flags import load, reason_of

Settings = TypeVar("Settings", bound=ServerSettings)
_FOR_ALL: Final = ("log_level", "log_format")


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model that is to be served.

    Attributes:
        model: Local folder or hub id.
        names: Served names, the shown one first.
        settings: Of its engine.
        default_prompt_name: As the setting of that name.
        is_preloaded: It is loaded when the server starts.
        is_pinned: It is not unloaded for others.
        ttl_s: Seconds without a request after which it is unloaded; infinity: never.
    """

    model: str
    names: tuple[str, ...]
    settings: EngineSettings
    default_prompt_name: str | None = None
    is_preloaded: bool = True
    is_pinned: bool = False
    ttl_s: float = inf


class ModelSettings(EngineSettings):
    """A table [[models]]: what there is to say of one model. The environment says nothing here."""

    model_config = SettingsConfigDict(extra="forbid")

    name: str | None = Field(None, description="The name that is shown; default: the model's own.")
    aliases: Names = Field((), description="More names that requests may use.")
    preload: bool | None = Field(
        None, description="Load it at the start; default: yes, for as many as --max-loaded-models allows."
    )
    pin: bool = Field(False, description="Never unload it to make room for another one.")
    ttl: Seconds | None = Field(
        None, description="Seconds without a request after which it is unloaded; default: it stays."
    )
    default_prompt_name: str | None = Field(None, description="As the setting of the server, for this model.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Takes what the table says, and nothing else."""
        return (init_settings,)


def planned(given: dict[str, Any], kind: type[Settings]) -> tuple[Settings, list[ModelPlan]]:
    """Returns what the command line, the environment and the file say of the server, and of its models.

    Args:
        given: Of the command line; `model` has a list of models.
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
        settings = load(kind, given, positional=("model",), file=file.settings, file_name=str(file.path))
    return settings, plan_models(settings, words if len(words) > 1 else (), file)


def plan_models(settings: ServerSettings, words: Sequence[str | None], file: ConfigFile | None) -> list[ModelPlan]:
    """Returns the models that are to be served, in their order.

    Args:
        settings: Of the server; what they say of engines holds for every model whose table does not say otherwise.
        words: Models of the command line, where it names several.
        file: Of --config.

    Raises:
        UsageError: A table is wrong, two models have one name, or more is to stay in memory than may be there.
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
        _check_room(plans, most)
    _check_names(plans)
    return plans


def _of_word(settings: ServerSettings, word: str | None) -> ModelPlan:
    model, names = model_and_names(word, settings.served_model_name)
    return ModelPlan(model, names, settings, settings.default_prompt_name)


def _of_table(settings: ServerSettings, table: Mapping[str, Any], place: str, has_room: bool) -> ModelPlan:
    shared = {*EngineSettings.model_fields, "default_prompt_name"} - {"model"}
    base = {field: getattr(settings, field) for field in shared & settings.model_fields_set}
    for key in table:
        if key in ELSEWHERE and key not in ModelSettings.model_fields:
            raise UsageError(f"{place}.{key}: has no place in a table: {ELSEWHERE[key]}")
        if key in _FOR_ALL or (key not in ModelSettings.model_fields and key in ServerSettings.model_fields):
            raise UsageError(f"{place}.{key}: is a setting of the server; write it above the tables")
        if key not in ModelSettings.model_fields:
            raise UsageError(f"{place}.{key}: is no setting of a model{suggestion(key, ModelSettings.model_fields)}")
    try:
        own = ModelSettings(**{**base, **table})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0])
        raise UsageError(f"{place}.{key}: {reason_of(first)}") from error
    if own.model is None:
        raise UsageError(f"{place}.model: is missing; name a local folder or a hub id")
    if own.pin and own.ttl is not None:
        raise UsageError(f"{place}.ttl: the model is pinned, so that it stays; leave pin or ttl out")
    model, names = model_and_names(own.model)
    names = (own.name, *own.aliases) if own.name else (*names, *own.aliases)
    return ModelPlan(
        model,
        tuple(dict.fromkeys(names)),
        own,
        own.default_prompt_name,
        is_preloaded=has_room if own.preload is None else own.preload,
        is_pinned=own.pin,
        ttl_s=inf if own.ttl is None else own.ttl,
    )


def _check_names(plans: Sequence[ModelPlan]) -> None:
    seen: dict[str, str] = {}
    for plan in plans:
        for name in plan.names:
            if name in seen:
                raise UsageError(
                    f"two models are served as {name!r}: {seen[name]} and {plan.model}; give one another `name` in its "
                    "table of --config FILE"
                )
        seen.update(dict.fromkeys(plan.names, plan.model))


def _check_room(plans: Sequence[ModelPlan], most: int) -> None:
    for what, chosen in (
        ("preload", [plan for plan in plans if plan.is_preloaded]),
        ("pin", [plan for plan in plans if plan.is_pinned]),
    ):
        if len(chosen) > most:
            raise UsageError(f"--max-loaded-models: {most} have room, but {len(chosen)} models say {what} = true")
    if len(plans) > most and sum(plan.is_pinned for plan in plans) == most:
        raise UsageError("--max-loaded-models: pinned models take all the room; no other could ever be loaded")
