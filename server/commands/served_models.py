"""Converts plans of models to the list of served models, and reads the files of local models."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from penstock.engine import AsyncEngine, EngineConfig, ModelInfo
from penstock.engine.client.engine_process import EngineProcess
from penstock.engine.client.replica_group import replica_configs
from penstock.engine.client.vector_cache.cache import VectorCache
from penstock.engine.model_files.hub import is_local
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.protocol.errors import ModelLoadError

from ..models.served_model import ServedModel, check_prompt_name
from ..models.weight_files import WeightFiles
from ..settings import ServerSettings, UsageError
from ..wire.shown_values import shown_bytes
from .model_plans import ModelPlan

logger = logging.getLogger(__name__)


class UnusableModelError(UsageError):
    """The files of a local model are missing or damaged, or do not fit its settings."""


def served_models(
    plans: Sequence[ModelPlan],
    settings: ServerSettings,
    num_engines: int,
    process: EngineProcess | None = None,
    cache: VectorCache | None = None,
) -> list[ServedModel]:
    """Returns the models as the application serves them.

    The other models are served if one has damaged files: loading it fails, and requests for it get 503. If it is not
    loaded at the start, a log line says why now.

    Args:
        plans: The models.
        settings: Of the server.
        num_engines: Engines that share the machine.
        process: Engine process of the first model, if it has been started already; the first start takes it.
        cache: Cache of embeddings, which all models share; None for none.

    Raises:
        UsageError: None of the models can be used, a model lacks its prompt, a device of replicas does not exist, or a
            model is larger than --model-memory.
    """
    models: list[ServedModel] = []
    unusable: list[UnusableModelError] = []
    for plan in plans:
        config = replace(plan.config, num_engines=num_engines)
        try:
            info = resolved(config, plan.default_prompt_name)
        except UnusableModelError as error:
            info = None
            unusable.append(error)
            if not plan.is_preloaded:
                logger.error("%s could not be loaded now: %s", plan.names[0], error)
        models.append(_served_model(plan, config, info, settings, process if plan is plans[0] else None, cache))
    if len(unusable) == len(plans):
        raise unusable[0]
    return models


def _served_model(
    plan: ModelPlan,
    config: EngineConfig,
    info: ModelInfo | None,
    settings: ServerSettings,
    process: EngineProcess | None,
    cache: VectorCache | None,
) -> ServedModel:
    num_bytes = 0 if info is None else _num_bytes(info) * len(replica_configs(config))
    if settings.model_memory is not None and num_bytes > settings.model_memory:
        raise UsageError(
            f"--model-memory: {plan.names[0]} alone takes {shown_bytes(num_bytes)}, and the limit is "
            f"{shown_bytes(settings.model_memory)}; raise the limit, or leave the model out"
        )
    started = [] if process is None else [process]

    async def start() -> AsyncEngine:
        return await AsyncEngine.start(
            config,
            log_level=settings.log_level.upper(),
            log_format=settings.log_format,
            process=started.pop() if started else None,
            cache=cache,
        )

    return ServedModel(
        plan.names,
        start,
        plan.default_prompt_name,
        plan.config,
        info,
        plan.is_preloaded,
        plan.is_pinned,
        plan.ttl_s,
        num_bytes,
        frozenset({plan.config.model} & set(plan.names[1:])) if is_local(plan.config.model) else frozenset(),
    )


def kept_config(plan: ModelPlan, num_engines: int) -> EngineConfig:
    """Returns the configuration of a model's one core, with the place where it runs: a device, or cores.

    Raises:
        UsageError: There is no such place.
    """
    try:
        (config,) = replica_configs(replace(plan.config, num_engines=num_engines))
    except ModelLoadError as error:
        raise UsageError(error.message) from error
    return config


def resolved(config: EngineConfig, default_prompt_name: str | None) -> ModelInfo | None:
    """Checks the devices of replicas, and reads the JSON files of a local model, in milliseconds.

    A hub id is left to the engine, which may download it.

    Raises:
        UnusableModelError: The engine would refuse the model.
        UsageError: A device does not exist, or the model lacks the prompt.
    """
    try:
        replica_configs(config)
        if not is_local(config.model, config.revision):
            return None
    except ModelLoadError as error:
        raise UsageError(error.message) from error
    try:
        info = resolve_model(config)
    except ModelLoadError as error:
        raise UnusableModelError(error.message) from error
    try:
        check_prompt_name(default_prompt_name, info)
    except ModelLoadError as error:
        raise UsageError(error.message) from error
    return info


def _num_bytes(info: ModelInfo) -> int:
    """Returns the Bytes of the weights according to the files; an upper bound if the dtype is measured."""
    files = WeightFiles.of(info.path)
    return files.memory().get("float32" if info.dtype == "auto" else info.dtype, files.num_bytes)
