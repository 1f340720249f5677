"""Prepares the configured models: checks the files of local models, and adds the function that starts the engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.engine import AsyncEngine, EngineConfig, ModelInfo
from penstock.engine.client.engine_process import EngineProcess
from penstock.engine.client.replica_group import replica_configs
from penstock.engine.client.vector_cache.cache import VectorCache
from penstock.engine.model_files.model_folder import is_local
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.protocol.errors import ModelLoadError

from ..models.served_model import ServedModel, check_prompt_name
from ..models.weight_files import WeightSummary
from ..settings import ServerSettings, UsageError

logger = logging.getLogger(__name__)


class UnusableModelError(UsageError):
    """The files of a local model are missing, damaged, or inconsistent with its settings."""


def served_models(
    configured_models: Sequence[ServedModel],
    settings: ServerSettings,
    num_engines: int,
    process: EngineProcess | None = None,
    cache: VectorCache | None = None,
) -> list[ServedModel]:
    """Returns the models for the application.

    If one of several models has damaged files, the others are served. Loading the damaged model fails, and its requests
    get a 503. If it is not loaded at the start, its error is logged now.

    Args:
        configured_models: One for each model to serve.
        settings: Of the server.
        num_engines: Number of engines that share the machine.
        process: Engine process of the first model, if it is already started. The first load uses it.
        cache: Cache of embeddings, which all models share, or None.

    Raises:
        UsageError: No model can be used, a model lacks its prompt, a device of a replica does not exist, or a model is
            larger than --model-memory.
    """
    models: list[ServedModel] = []
    unusable: list[UnusableModelError] = []
    for model in configured_models:
        config = replace(model.config, num_engines=num_engines)
        try:
            info = resolve_local_model(config, model.default_prompt_name)
        except UnusableModelError as error:
            info = None
            unusable.append(error)
            if not model.is_preloaded:
                logger.error("%s could not be loaded now: %s", model.names[0], error)
        models.append(
            _served_model(
                model,
                config,
                info,
                settings,
                process if model is configured_models[0] else None,
                cache,
            )
        )
    if len(unusable) == len(configured_models):
        raise unusable[0]
    return models


def _served_model(
    model: ServedModel,
    config: EngineConfig,
    info: ModelInfo | None,
    settings: ServerSettings,
    process: EngineProcess | None,
    cache: VectorCache | None,
) -> ServedModel:
    num_bytes = 0 if info is None else _num_bytes(info) * len(replica_configs(config))
    if settings.model_memory is not None and num_bytes > settings.model_memory:
        raise UsageError(
            f"--model-memory: {model.names[0]} alone needs {num_bytes / 2**20:.1f} MiB, but the limit is "
            f"{settings.model_memory / 2**20:.1f} MiB; raise the limit, or leave the model out"
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

    paths = {model.config.model} & set(model.names[1:]) if is_local(model.config.model) else ()
    return replace(model, start=start, info=info, num_bytes=num_bytes, hidden_names=frozenset(paths))


def single_core_config(model: ServedModel, num_engines: int) -> EngineConfig:
    """Returns the configuration of a model with one engine core, on one device or set of CPU cores.

    Raises:
        UsageError: The device or the set of cores does not exist.
    """
    try:
        (config,) = replica_configs(replace(model.config, num_engines=num_engines))
    except ModelLoadError as error:
        raise UsageError(error.message) from error
    return config


def resolve_local_model(config: EngineConfig, default_prompt_name: str | None) -> ModelInfo | None:
    """Checks the devices of replicas and reads the JSON files of a local model. Takes milliseconds.

    Hub ids are not checked here; the engine may download the model.

    Raises:
        UnusableModelError: The engine cannot load the model.
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
    """Returns the bytes of the loaded weights and adapters, from the files.

    An upper bound if the dtype is chosen by measurement.
    """
    folders = [info.path, *(adapter.folder for adapter in info.adapters if adapter.folder is not None)]
    # A folder inside that of the model is counted with it.
    outside = [folder for folder in folders[1:] if not Path(folder).is_relative_to(info.path)]
    dtype = "float32" if info.dtype == "auto" else info.dtype
    return sum(
        files.bytes_by_dtype().get(dtype, files.num_bytes) for files in map(WeightSummary.of, [info.path, *outside])
    )
