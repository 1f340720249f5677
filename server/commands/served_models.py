"""From what is asked for to what is served: each model's engine, as it is to be started, and what its files say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from penstock.engine import AsyncEngine, EngineConfig, ModelInfo
from penstock.engine.frontend.engine_process import EngineProcess
from penstock.engine.frontend.replicas.places import replica_configs
from penstock.engine.frontend.vector_cache.cache import VectorCache
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.protocol.errors import ModelLoadError

from ..calls.weight_files import WeightFiles
from ..models.served_model import ServedModel, check_prompt_name
from ..settings import ServerSettings, UsageError
from .model_plans import ModelPlan

_MAYBE_HUB_ID: Final = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def served_model(
    plan: ModelPlan,
    settings: ServerSettings,
    num_engines: int,
    process: EngineProcess | None = None,
    cache: VectorCache | None = None,
) -> ServedModel:
    """Returns a model as the application serves it.

    Args:
        plan: What is asked for.
        settings: Of the server.
        num_engines: Engines that share the machine.
        process: Of its engine, where it has been started already; the first start takes it.
        cache: Of embeddings, which all models share; None for none.

    Raises:
        UsageError: The engine would refuse the model, it lacks the prompt, or it is larger than all models may be.
    """
    config = engine_config(plan, num_engines)
    info = resolved(config, plan.default_prompt_name)
    num_bytes = 0 if info is None else _num_bytes(info) * len(replica_configs(config))
    if settings.model_memory is not None and num_bytes > settings.model_memory:
        raise UsageError(f"--model-memory: {plan.names[0]} alone takes {num_bytes} bytes")
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
        plan.settings,
        info,
        plan.is_preloaded,
        plan.is_pinned,
        plan.ttl_s,
        num_bytes,
    )


def engine_config(plan: ModelPlan, num_engines: int) -> EngineConfig:
    """Returns the configuration of a model's engine, one of `num_engines` that share the machine."""
    return plan.settings.engine_config(plan.model, plan.names[0], num_engines=num_engines)


def kept_config(plan: ModelPlan, num_engines: int) -> EngineConfig:
    """Returns the configuration of a model's one core, with the place where it runs: a device, or cores.

    Raises:
        UsageError: There is no such place.
    """
    try:
        (config,) = replica_configs(engine_config(plan, num_engines))
    except ModelLoadError as error:
        raise UsageError(error.message) from error
    return config


def resolved(config: EngineConfig, default_prompt_name: str | None) -> ModelInfo | None:
    """Looks for the places of replicas, and reads the JSON files of a local model, in milliseconds.

    A hub id is left to the engine, which may download it.

    Raises:
        UsageError: The engine would refuse the model or a place, or the model lacks the prompt.
    """
    try:
        replica_configs(config)
        if _MAYBE_HUB_ID.fullmatch(config.model) and not Path(config.model).exists():
            return None
        info = resolve_model(config)
        check_prompt_name(default_prompt_name, info)
    except ModelLoadError as error:
        raise UsageError(error.message) from error
    return info


def _num_bytes(info: ModelInfo) -> int:
    """Returns the Bytes that the weights take, as far as the files say; where the dtype is measured, at most."""
    files = WeightFiles.of(info.path)
    return files.memory().get("float32" if info.dtype == "auto" else info.dtype, files.num_bytes)
