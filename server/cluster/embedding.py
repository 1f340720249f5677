"""`penstock ray embed`: Parquet through a pool of engines, by Ray Data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import ray
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayError
from tqdm import tqdm

from ..settings import CommandError
from .connection import connected
from .embedder import Embedder, Recipe
from .manifest import Output
from .pieces import Piece
from .settings import RayEmbedSettings

_AT_ONCE: Final = 2
"""Pieces that an engine has at once."""
_MOST_BLOCKS: Final = 4096
"""Parts in which Ray hands the pieces out."""


def embed_on_ray(
    pieces: Sequence[Piece], recipe: Recipe, identity: Mapping[str, Any], settings: RayEmbedSettings
) -> None:
    """Embeds all pieces that are not done yet. Given again after an interruption, it goes on where it was.

    Args:
        pieces: Of the whole input.
        recipe: What becomes of every row.
        identity: See Output.begin.
        settings: What the user asked for.

    Raises:
        CommandError: The work could not be finished; the message says why, and what is done is kept.
    """
    output = Output(Path(recipe.folder))
    output.begin(identity, overwrite=settings.overwrite)
    left = output.left(pieces)
    num_rows = sum(piece.num_rows for piece in pieces)
    num_done = num_rows - sum(piece.num_rows for piece in left)
    with tqdm(total=num_rows, initial=num_done, unit=" rows", dynamic_ncols=True) as bar:
        if left:
            with connected(settings.address, settings.log_level):
                _run(left, recipe, settings, bar)
    if still := output.left(pieces):
        raise CommandError(f"{len(still)} of {len(pieces)} pieces have no file; give the same command again")
    output.finish(identity)


def _run(left: Sequence[Piece], recipe: Recipe, settings: RayEmbedSettings, bar: Any) -> None:
    """Embeds pieces and counts them as they are done. Where machines are lost, Ray gives theirs to others."""
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    pool = ActorPoolStrategy(
        min_size=min(settings.min_replicas, len(left)),
        max_size=min(settings.most_replicas, len(left)),
        max_concurrent_calls_per_actor=_AT_ONCE,
        enable_true_multi_threading=True,
    )
    # Of items that are here: to make them in tasks would take cores, and where the engines have all there are none.
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
