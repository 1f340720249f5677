"""`penstock ray embed`: Parquet through a pool of engines, by Ray Data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import ray
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayError
from tqdm import tqdm

from ..embed_jobs.job_folder import Shard
from ..settings import CommandError
from .connection import connected
from .embedder import Embedder, Recipe
from .settings import RayEmbedSettings

_AT_ONCE: Final = 2
"""Shards that an engine has at once."""
_MOST_BLOCKS: Final = 4096
"""Blocks in which Ray hands the shards out."""


def embed_on_ray(
    shards: Sequence[Shard], recipe: Recipe, identity: Mapping[str, Any], settings: RayEmbedSettings
) -> None:
    """Embeds all shards that are not done yet. Given again after an interruption, it goes on where it was.

    Args:
        shards: Of the whole input.
        recipe: How every row is embedded.
        identity: See JobFolder.begin.
        settings: What the user asked for.

    Raises:
        CommandError: The work could not be finished; the message says why, and what is done is kept.
    """
    recipe.job.begin(identity, overwrite=settings.overwrite)
    left = recipe.job.left(shards)
    num_rows = sum(shard.num_rows for shard in shards)
    num_done = num_rows - sum(shard.num_rows for shard in left)
    with tqdm(total=num_rows, initial=num_done, unit=" rows", dynamic_ncols=True) as bar:
        if left:
            with connected(settings.address, settings.log_level):
                _run(left, recipe, settings, bar)
    if still := recipe.job.left(shards):
        raise CommandError(f"{len(still)} of {len(shards)} shards have no file; give the same command again")
    recipe.job.finish(identity)


def _run(left: Sequence[Shard], recipe: Recipe, settings: RayEmbedSettings, bar: Any) -> None:
    """Embeds shards and counts them as they are done. Ray gives the shards of a lost machine to others."""
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    pool = ActorPoolStrategy(
        min_size=min(settings.min_replicas, len(left)),
        max_size=min(settings.most_replicas, len(left)),
        max_concurrent_calls_per_actor=_AT_ONCE,
        enable_true_multi_threading=True,
    )
    # `from_items` needs no tasks: they would need cores, and the engines may hold all of them.
    indices = ray.data.from_items(list(range(len(left))), override_num_blocks=min(len(left), _MOST_BLOCKS))
    answers = indices.map_batches(
        Embedder,
        fn_constructor_args=(recipe, left),
        batch_size=1,
        compute=pool,
        num_cpus=settings.replica_cpus,
        num_gpus=settings.replica_gpus or None,
    )
    try:
        for answer in answers.iter_rows():
            if answer["error"]:
                raise CommandError(f"{answer['error']}; rows that are done are kept: give the same command again")
            bar.update(answer["num_rows"])
    except RayError as error:
        raise CommandError(
            f"the work could not be finished: {_last_line(error)}; rows that are done are kept"
        ) from error


def _last_line(error: RayError) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
