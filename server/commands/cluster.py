"""`penstock ray`: the same commands on a cluster. What needs Ray is imported when one of them runs."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any, Final

from ..cluster.settings import RayEmbedSettings, RayServeSettings, check_flags
from ..settings import CommandError, UsageError
from .default_model import model_and_names
from .flags import OneLineParser, add_flags, load

_RAY: Final = "Serve models, or embed files, on a Ray cluster (extra `ray`)."
_SERVE: Final = "Deploy models with Ray Serve: replicas of the server that come and go with the work that waits."
_EMBED: Final = "Embed Parquet with Ray Data. An interrupted run continues when the same command is given again."


def add_ray(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Adds the commands of `penstock ray`."""
    ray = commands.add_parser("ray", help=_RAY, description=_RAY)
    its_commands = ray.add_subparsers(title="commands", required=True, metavar="COMMAND")

    usage = "%(prog)s [MODEL ...] [FLAG ...]"
    serve = its_commands.add_parser("serve", help=_SERVE, description=_SERVE, usage=usage)
    serve.add_argument("models", metavar="MODEL", nargs="*", help="Local folders, at one path everywhere, or hub ids.")
    add_flags(serve, RayServeSettings)
    serve.set_defaults(run=_serve)

    usage = "%(prog)s IN OUT [FLAG ...]"
    embed = its_commands.add_parser("embed", help=_EMBED, description=_EMBED, usage=usage)
    embed.add_argument("file", metavar="IN", help="A Parquet file, or a folder of them, that every machine reads.")
    embed.add_argument("output", metavar="OUT", help="Folder to write, one that every machine shares.")
    add_flags(embed, RayEmbedSettings, without=("output",))
    embed.set_defaults(run=_embed)


def _serve(given: dict[str, Any]) -> int:
    models: list[str] = given.pop("models")
    if models:
        given["model"] = models[0]
    settings = load(RayServeSettings, given)
    check_flags(settings, len(models))
    _require_ray()
    from ..cluster.mounts import mounts_of
    from .serve import check_certificate, check_model

    named = [model_and_names(model, settings.served_model_name) for model in models or [settings.model]]
    for model, names in named:
        check_model(settings.engine_config(model, names[0]), settings.default_prompt_name)
    check_certificate(settings.ssl_certfile, settings.ssl_keyfile)
    mounts = mounts_of(named)
    from ..cluster.serving import serve_on_ray

    serve_on_ray(mounts, settings)
    return 0


def _embed(given: dict[str, Any]) -> int:
    source = given.pop("file")
    settings = load(RayEmbedSettings, given)
    check_flags(settings)
    _require_ray()
    model, names = model_and_names(settings.model)
    try:
        _embed_all(source, settings, model, names[0])
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command goes on where it stopped") from None
    return 0


def _embed_all(source: str, settings: RayEmbedSettings, model: str, name: str) -> None:
    from penstock.engine.logs import configure_logging
    from penstock.engine.model_files.resolve import resolve_model
    from penstock.engine.protocol.errors import ModelLoadError

    from ..cluster.embedder import Recipe
    from ..cluster.embedding import embed_on_ray
    from ..cluster.mounts import everywhere
    from ..cluster.pieces import digest_of, list_inputs, pieces_of
    from .embed.run import check_options, model_digest, pooling_params

    configure_logging(settings.log_level, settings.log_format)
    config = settings.engine_config(everywhere(model), name)
    try:
        info = resolve_model(config)
    except ModelLoadError as error:
        raise CommandError(error.message) from error
    check_options(settings, info)
    inputs = list_inputs(source, settings.field)
    recipe = Recipe(
        config,
        settings.field,
        pooling_params(settings),
        settings.prompt_name,
        str(Path(settings.output).resolve()),
        settings.log_level,
        settings.log_format,
    )
    fields = ("field", "dimensions", "normalize", "prompt_name", "piece_rows")
    options = {field: getattr(settings, field) for field in fields}
    identity = {"input": digest_of(inputs), "model": model_digest(info), **options}
    embed_on_ray(pieces_of(inputs, settings.piece_rows), recipe, identity, settings)


def _require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise UsageError("penstock ray needs Ray: run `pip install 'penstock[ray]'`")
