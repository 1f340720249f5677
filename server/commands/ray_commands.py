"""`penstock ray serve` and `penstock ray embed`. Ray is imported only when one of them runs."""

from __future__ import annotations

import argparse
import logging
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ..cluster.ray_settings import RayEmbedSettings, RayServeSettings, check_flags
from ..models.served_model import load_failure
from ..settings import UsageError, load_settings
from .flags import OneLineParser, add_flags
from .model_arguments import model_and_names, settings_and_models

logger = logging.getLogger(__name__)

_RAY: Final = "Serve models, or embed files, on a Ray cluster (extra `ray`)."
_RAY_SERVE: Final = "Deploy models with Ray Serve: replicas of the server are added and removed with the queued work."
_RAY_EMBED: Final = "Embed Parquet with Ray Data. To continue after an interruption, run the same command again."


def add_ray_commands(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Adds both commands to the parser."""
    ray = commands.add_parser("ray", help=_RAY, description=_RAY)
    its_commands = ray.add_subparsers(title="commands", required=True, metavar="COMMAND")

    usage = "%(prog)s [MODEL ...] [FLAG ...]"
    serve = its_commands.add_parser("serve", help=_RAY_SERVE, description=_RAY_SERVE, usage=usage)
    add_flags(serve, RayServeSettings, positional="model", nargs="*")
    serve.set_defaults(run=_ray_serve)

    usage = "%(prog)s IN OUT [FLAG ...]"
    embed = its_commands.add_parser("embed", help=_RAY_EMBED, description=_RAY_EMBED, usage=usage)
    embed.add_argument(
        "file", metavar="IN", help="A Parquet file or a folder of Parquet files, readable on every machine."
    )
    add_flags(embed, RayEmbedSettings, positional="output")
    embed.set_defaults(run=_ray_embed)


def _ray_serve(arguments: dict[str, Any]) -> int:
    settings, configured_models = settings_and_models(arguments, RayServeSettings)
    check_flags(settings)
    for model in configured_models:
        if model.is_pinned or model.ttl_s < math.inf:
            raise UsageError(f"pin, ttl: {model.names[0]} stays loaded on Ray while it is deployed; leave both out")
    require_ray()
    from penstock.engine.logs import configure_logging

    from ..cluster.ray_replica import applications_of
    from .model_start import resolve_local_model
    from .serve import check_certificate

    configure_logging(settings.log_level, settings.log_format)
    for note in settings.env_notes:
        logger.info("%s", note)
    models = [
        (settings.on_replica(model.config), model.names, model.default_prompt_name) for model in configured_models
    ]
    for config, _, default_prompt_name in models:
        resolve_local_model(config, default_prompt_name)
    check_certificate(settings.ssl_certfile, settings.ssl_keyfile)
    applications = applications_of(models)
    from ..cluster.ray_serve import serve_on_ray

    serve_on_ray(applications, settings)
    return 0


def _ray_embed(arguments: dict[str, Any]) -> int:
    source = arguments.pop("file")
    settings = load_settings(RayEmbedSettings, arguments, positional=("output",))
    check_flags(settings)
    require_ray("pyarrow", "pandas", "fsspec")  # of ray[data]
    model, names = model_and_names(settings.model)
    try:
        _embed_on_ray(source, settings, model, names[0])
    except KeyboardInterrupt:
        raise KeyboardInterrupt("run the same command again to continue") from None
    return 0


def _embed_on_ray(source: str, settings: RayEmbedSettings, model: str, name: str) -> None:
    from penstock.engine.logs import configure_logging
    from penstock.engine.model_files.resolve import resolve_model
    from penstock.engine.protocol.errors import ModelLoadError

    from ..embed_jobs.input_file import stat_digest
    from ..embed_jobs.job_folder import JobFolder, Shard, model_digest
    from ..embed_jobs.parquet_file import parquet_inputs
    from ..embed_jobs.run import check_options, pooling_params

    configure_logging(settings.log_level, settings.log_format)
    config = settings.on_replica(settings.engine_config(model, name))
    try:
        info = resolve_model(config)
    except ModelLoadError as error:
        raise load_failure(error, config.model, config.revision) from error
    field = settings.image_field or settings.field
    has_images = settings.image_field is not None
    check_options(settings, info, has_images=has_images)
    inputs = parquet_inputs(source, field)
    folder = Path(settings.output).resolve()
    inside = [rows.path for rows in inputs if rows.path.resolve().is_relative_to(folder)]
    if inside:  # --overwrite would delete it
        raise UsageError(f"OUT: {settings.output} holds the input {inside[0]}; name another folder")
    shards: list[Shard] = []
    for rows in inputs:
        shards += rows.shards(settings.shard_rows, len(shards))
    from ..cluster.ray_embed import EmbedderConfig, embed_on_ray

    embedder_config = EmbedderConfig(
        config,
        field,
        has_images,
        pooling_params(settings),
        settings.prompt_name,
        JobFolder(folder, ".parquet", "give --overwrite"),
        settings.log_level,
        settings.log_format,
    )
    numbers = {"dtype": config.dtype, "arithmetic": config.arithmetic}  # as configured, because no engine runs yet
    options = {**settings.row_options(), "shard_rows": settings.shard_rows}
    identity = {"input": stat_digest(inputs), "model": model_digest(info), **numbers, **options}
    embed_on_ray(shards, embedder_config, identity, settings)


def require_ray(*packages: str) -> None:
    """Raises UsageError with the command to install Ray if it or one of `packages` is missing."""
    for package in ("ray", *packages):
        if find_spec(package) is None:
            name = "Ray" if package == "ray" else package
            raise UsageError(f"penstock ray needs {name}: run `pip install 'penstock[ray]'`")
