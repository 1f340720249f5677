"""`penstock ray embed`: embeds Parquet with a pool of engines, using Ray Data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayError
from tqdm import tqdm

from penstock.engine import EngineConfig, PoolingParams
from penstock.engine.llm import LLM
from penstock.engine.logs import configure_logging
from penstock.engine.protocol.errors import InvalidRequestError

from ..embed_jobs.input_file import BadRow
from ..embed_jobs.job_folder import JobFolder, Shard
from ..embed_jobs.parquet_file import ParquetRows, append_vectors
from ..settings import CommandError, UsageError
from .ray_connection import connected
from .ray_settings import RayEmbedSettings

_AT_ONCE: Final = 2
"""Number of shards that an engine embeds at once."""
_CONTINUE: Final = "finished rows are kept: run the same command again"
_MAX_BLOCKS: Final = 4096
"""Number of blocks in which Ray distributes the shards."""


class EmbedderConfig(NamedTuple):
    """The parameters of the job for all actors.

    Attributes:
        field: The column with the text or the image.
        has_images: The column has images.
        prompt_name: Name of a prompt of the model, which is put before every text.
        job: The output folder with the finished shards.
    """

    config: EngineConfig
    field: str
    has_images: bool
    params: PoolingParams
    prompt_name: str | None
    job: JobFolder
    log_level: str
    log_format: str


class Embedder:
    """Embeds shards, two at once so that the engine does not wait for the disk. Ray creates it in its own process.

    Args:
        shards: All unfinished shards. Calls contain indices into this list.
    """

    def __init__(self, config: EmbedderConfig, shards: Sequence[Shard]) -> None:
        configure_logging(config.log_level, config.log_format)
        self._config = config
        self._shards = shards
        fields = dataclasses.fields(EngineConfig)
        engine_config = {field.name: getattr(config.config, field.name) for field in fields}
        self._llm = LLM(**engine_config, log_level=config.log_level.upper())

    def __call__(self, batch: dict[str, NDArray[Any]]) -> dict[str, list[Any]]:
        """Embeds the shards of a batch.

        Args:
            batch: `item`: indices of the shards.

        Returns:
            `num_rows` of each shard, and `error`: the reason of a failure, or "".
        """
        shards = [self._shards[index] for index in batch["item"].tolist()]
        return {
            "num_rows": [shard.num_rows for shard in shards],
            "error": [self._embed_shard(shard) for shard in shards],
        }

    def _embed_shard(self, shard: Shard) -> str:
        if self._config.job.is_finished(shard):  # written by a lost machine
            return ""
        source = ParquetRows(Path(shard.path), self._config.field, has_images=self._config.has_images)
        table = source.table(shard)
        inputs: list[str | bytes | Path] = []
        for number, value in enumerate(table.column(self._config.field).to_pylist()):
            row = source.row(number, value, {})
            if isinstance(row, BadRow):
                return self._bad_row(shard, row.line, row.reason)
            inputs.append(row.content)
        try:
            vectors = self._embed(inputs)
        except InvalidRequestError:
            return self._first_rejection(shard, inputs)
        try:
            self._config.job.write_table(shard, append_vectors(table, vectors))
        except UsageError as error:
            return str(error)
        return ""

    def _first_rejection(self, shard: Shard, inputs: Sequence[str | bytes | Path]) -> str:
        """Returns the message for the first row that the engine rejects."""
        for row, item in enumerate(inputs):
            try:
                self._embed([item])
            except InvalidRequestError as error:
                return self._bad_row(shard, row, error.message)
        rows = f"rows {shard.start + 1} to {shard.start + shard.num_rows}"
        return f"{shard.path}: the engine rejects {rows} together; {_CONTINUE}"

    def _embed(self, inputs: Sequence[str | bytes | Path]) -> NDArray[np.float32]:
        config = self._config
        outputs = self._llm.embed(inputs, pooling_params=config.params, prompt_name=config.prompt_name, use_tqdm=False)
        return np.stack([np.asarray(output.outputs.embedding, np.float32) for output in outputs])

    def _bad_row(self, shard: Shard, row: int, reason: str) -> str:
        return f"{shard.path}, row {shard.start + row + 1}: {reason}; {_CONTINUE}"


def embed_on_ray(
    shards: Sequence[Shard], config: EmbedderConfig, identity: Mapping[str, Any], settings: RayEmbedSettings
) -> None:
    """Embeds all unfinished shards. Call it again to continue after an interruption.

    Args:
        shards: All shards of the input.
        config: Parameters of the job.
        identity: All values that affect the output. A job continues only if all are equal.
        settings: Settings of the command.

    Raises:
        CommandError: The job failed. The message has the reason. Finished shards are kept.
    """
    config.job.begin(identity, overwrite=settings.overwrite)
    unfinished = config.job.unfinished_shards(shards)
    num_rows = sum(shard.num_rows for shard in shards)
    num_done = num_rows - sum(shard.num_rows for shard in unfinished)
    with tqdm(total=num_rows, initial=num_done, unit=" rows", dynamic_ncols=True) as bar:
        if unfinished:
            with connected(settings.address, settings.log_level):
                _run(unfinished, config, settings, bar)
    if missing := config.job.unfinished_shards(shards):
        raise CommandError(f"{len(missing)} of {len(shards)} shards have no file; run the same command again")
    config.job.finish(identity)


def _run(shards: Sequence[Shard], config: EmbedderConfig, settings: RayEmbedSettings, bar: Any) -> None:
    """Embeds shards and updates the progress bar. Ray gives the shards of a lost machine to other machines."""
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    pool = ActorPoolStrategy(
        min_size=min(settings.min_replicas, len(shards)),
        max_size=min(settings.replica_limit, len(shards)),
        max_concurrent_calls_per_actor=_AT_ONCE,
        enable_true_multi_threading=True,
    )
    # `from_items` starts no tasks. Tasks need cores, but the engines may use all cores.
    indices = ray.data.from_items(list(range(len(shards))), override_num_blocks=min(len(shards), _MAX_BLOCKS))
    shards_done = indices.map_batches(
        Embedder,
        fn_constructor_args=(config, shards),
        batch_size=1,
        compute=pool,
        num_cpus=settings.replica_cpus,
        num_gpus=settings.replica_gpus or None,
    )
    try:
        for shard in shards_done.iter_rows():
            if shard["error"]:
                raise CommandError(shard["error"])
            bar.update(shard["num_rows"])
    except RayError as error:
        raise CommandError(f"the job could not be finished: {_last_line(error)}; finished rows are kept") from error


def _last_line(error: RayError) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
