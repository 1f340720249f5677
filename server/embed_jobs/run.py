"""`penstock embed`: reads texts or images and writes a file of embeddings, in bounded memory."""

from __future__ import annotations

import asyncio
import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.engine import AsyncEngine, EngineConfig, ModelInfo, PoolingParams, PoolingTask, RequestOptions
from penstock.engine.logs import configure_logging
from penstock.engine.protocol.errors import (
    EngineError,
    EngineOverloadedError,
    InvalidRequestError,
    ModelLoadError,
    RequestTooLongError,
)
from penstock.engine.protocol.images import ImageInput

from ..models.served_model import load_failure
from ..settings import CommandError, EmbedSettings, UsageError, declared_settings, flag_of
from .input_file import BadRow, BadRowError, InputFile, InputSummary, Row
from .input_formats import open_input
from .job_folder import JobFolder, Shard, ShardVectorReader, model_digest
from .output_file import (
    JobResult,
    Writer,
    check_no_embedding_field,
    json_columns_for,
    report_path,
    write_output,
    writer_for,
)
from .parquet_file import JsonColumns
from .progress import Progress

logger = logging.getLogger(__name__)

MAX_WAIT_S: Final = 1.0
"""Maximum seconds before a request that a full engine rejected is sent again."""
REQUEST_ROWS: Final = 32
REQUEST_CHARS: Final = 8_000
"""Maximum size of one request to the engine: about one forward on a CPU, so that no row waits for many others."""
IN_FLIGHT_CHARS: Final = 400_000
"""Size of the rows in flight from which no further request is sent: at most 128 MiB of image files."""


class ShardResult:
    """The vectors of a shard while it runs, and the reasons of its rejected rows.

    Args:
        shard: Rows of the input that this object collects vectors for.
        num_pending_rows: Number of rows that have not been embedded.

    Attributes:
        vectors: [N, D] float32, one row per row of the shard, NaN without a vector. D is 0 before the first `add`.
        rejected: Index in the shard to the reason why the model rejected the row.
    """

    def __init__(self, shard: Shard, num_pending_rows: int) -> None:
        self.shard = shard
        self.num_pending_rows = num_pending_rows
        self.vectors = np.zeros((shard.num_rows, 0), np.float32)
        self.rejected: dict[int, str] = {}

    def add(self, indices: Sequence[int], vectors: NDArray[np.float32]) -> None:
        """Adds the vectors of rows."""
        if not self.vectors.shape[1]:
            self.vectors = np.full((self.shard.num_rows, vectors.shape[1]), np.nan, np.float32)
        self.vectors[indices] = vectors


class EmbedRequest(NamedTuple):
    """Rows of one shard for one request to the engine.

    Attributes:
        indices: Indices of the rows in the shard.
        rows: Rows to embed, in the order of `indices`.
    """

    result: ShardResult
    indices: list[int]
    rows: list[Row]


def embed_file(file: str, settings: EmbedSettings, model: str, name: str | None = None) -> None:
    """Embeds the rows of `file`. After an interruption, call it again: it continues.

    Args:
        file: Texts or images: .txt, .jsonl, .csv, .tsv or .parquet. Or a folder of images.
        settings: Settings of the command.
        model: Local folder or hub id.
        name: Name of the model in messages; None: `model`.

    Raises:
        UsageError: The file or the output cannot be used.
        CommandError: The job failed. The message has the reason. Finished shards are kept.
    """
    configure_logging(settings.log_level, settings.log_format)
    try:
        has_images = settings.image_field is not None
        source = open_input(Path(file), settings.image_field or settings.field, has_images=has_images)
        output = Path(settings.output)
        write = writer_for(output)
        columns = json_columns_for(source, output)
        if output.is_dir():
            raise UsageError(f"--output: {output} is a folder; name a file")
        if output.exists() and output.samefile(file):
            raise UsageError(f"--output: {output} is the input; name another file")
        if output.exists() and not settings.overwrite:
            raise UsageError(f"--output: {output} exists; use --overwrite to replace it")
        asyncio.run(_run(source, output, write, columns, settings, settings.engine_config(model, name)))
    except ModelLoadError as error:
        raise load_failure(error, model, settings.engine.revision) from error
    except (EngineError, OSError) as error:
        raise CommandError(str(error)) from error


async def _run(
    source: InputFile,
    output: Path,
    write: Writer,
    columns: JsonColumns | None,
    settings: EmbedSettings,
    config: EngineConfig,
) -> None:
    summary = _summarize(source, output, columns, settings)
    engine = await AsyncEngine.start(config, log_level=settings.log_level.upper(), log_format=settings.log_format)
    try:
        check_options(settings, engine.info, has_images=source.has_images)
        files = {"files": summary.files} if summary.files else {}
        identity = {"input": source.digest(), **files, "model": model_digest(engine.info), **settings.row_options()}
        job = JobFolder(output.with_name(output.name + ".partial"), ".npy", "delete the folder")
        with job.locked():
            job.begin(identity)
            with Progress(summary.sizes, engine.info) as progress:
                await _embed_shards(engine, source, job, summary.shards, progress, settings)
            rejected = job.rejected(summary.shards)
            num_kept = summary.sizes.total() - len(rejected)
            if not num_kept:
                job.remove()
                line, reason = _first_rejected(source, rejected)
                raise source.row_error(line, f"{reason}; no row of the file can be embedded")
            vectors = ShardVectorReader(job, summary.shards)
            num_skipped = summary.num_rows - num_kept
            write_output(output, write, source, JobResult(vectors, rejected, num_skipped, columns))
            job.remove()
    finally:
        await engine.close()
    left_out = f"; {num_skipped} bad rows were skipped, see {report_path(output)}" if num_skipped else ""
    logger.info("wrote %d rows to %s%s", num_kept, output, left_out)


def _summarize(source: InputFile, output: Path, columns: JsonColumns | None, settings: EmbedSettings) -> InputSummary:
    """Reads the input once. Raises CommandError if it has no good row, or rows that the output does not support."""

    def visit(row: Row) -> None:
        if not is_npy:
            check_no_embedding_field(source, row)
        if columns is not None:
            columns.add(row)

    is_npy = output.suffix.lower() == ".npy"
    summary = source.summarize(visit, skip_bad=settings.on_bad_row == "skip")
    if not summary.num_rows:
        raise BadRowError(f"{source.path} holds no {'images' if source.path.is_dir() else 'rows'}")
    if not summary.sizes:
        line, reason = _first_rejected(source, {})
        raise source.row_error(line, f"{reason}; no row of the file can be embedded")
    if columns is not None:
        columns.fields()
    return summary


def _first_rejected(source: InputFile, rejected: Mapping[int, str]) -> tuple[int, str]:
    return next(
        (row.line, row.reason if isinstance(row, BadRow) else rejected[number])
        for number, row in enumerate(source.rows())
        if isinstance(row, BadRow) or number in rejected
    )


async def _embed_shards(
    engine: AsyncEngine,
    source: InputFile,
    job: JobFolder,
    shards: Sequence[Shard],
    progress: Progress,
    settings: EmbedSettings,
) -> None:
    """Embeds the unfinished shards with at most `batch_size` rows in flight, and little more than IN_FLIGHT_CHARS.

    If a row fails, no further rows are sent. The rows in flight are awaited, and finished shards are kept.
    """
    requests = _requests(source, job, shards, progress, settings.batch_size)
    in_flight: dict[asyncio.Task[tuple[int, Exception] | None], list[int]] = {}  # task to the sizes of its rows
    failed: list[tuple[int, Exception]] = []
    try:
        while True:
            while (
                not failed
                and sum(map(len, in_flight.values())) < settings.batch_size
                and sum(map(sum, in_flight.values())) < IN_FLIGHT_CHARS
            ):
                if (request := next(requests, None)) is None:
                    break
                task = asyncio.create_task(_embed(engine, source, job, request, progress, settings))
                in_flight[task] = [row.size for row in request.rows]
            if not in_flight:
                break
            ended, _ = await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                del in_flight[task]
                if (failure := task.result()) is not None:
                    failed.append(failure)
    finally:
        for task in in_flight:
            task.cancel()
        await asyncio.gather(*in_flight, return_exceptions=True)
    if failed:
        raise min(failed, key=operator.itemgetter(0))[1]


def _requests(
    source: InputFile, job: JobFolder, shards: Sequence[Shard], progress: Progress, batch_size: int
) -> Iterator[EmbedRequest]:
    """Yields the rows of unfinished shards, in requests of at most REQUEST_ROWS and REQUEST_CHARS."""
    max_rows = min(max(batch_size // 2, 1), REQUEST_ROWS)
    unfinished = {shard.number for shard in job.unfinished_shards(shards)}
    for shard, rows in source.read_shards(shards):
        good = [(index, row) for index, row in enumerate(rows) if isinstance(row, Row)]
        if shard.number not in unfinished:
            progress.skip(row.size for _, row in good)
            continue
        request = EmbedRequest(ShardResult(shard, len(good)), [], [])
        if not good:
            _save(job, request.result)
        num_chars = 0
        for index, row in good:
            if request.rows and (len(request.rows) == max_rows or num_chars + row.size > REQUEST_CHARS):
                yield request
                request = EmbedRequest(request.result, [], [])
                num_chars = 0
            request.indices.append(index)
            request.rows.append(row)
            num_chars += row.size
        if request.rows:
            yield request


async def _embed(
    engine: AsyncEngine,
    source: InputFile,
    job: JobFolder,
    request: EmbedRequest,
    progress: Progress,
    settings: EmbedSettings,
) -> tuple[int, Exception] | None:
    """Embeds the rows of a request, one by one if the engine rejects the request. Saves the shard when it is complete.

    Returns:
        The index of the first row that failed, and the error. None if all rows are finished or skipped.
    """
    params = pooling_params(settings)
    options = RequestOptions(prompt_name=settings.prompt_name)
    result = request.result
    start = result.shard.start
    index = request.indices[0]
    try:
        try:
            result.add(request.indices, await _embed_rows(engine, request.rows, params, options))
        except InvalidRequestError:
            for index, row in zip(request.indices, request.rows, strict=True):
                try:
                    result.add([index], await _embed_rows(engine, [row], params, options))
                except InvalidRequestError as rejection:
                    if settings.on_bad_row == "fail":
                        return start + index, source.skippable_row_error(row.line, _reason(rejection))
                    result.rejected[index] = _reason(rejection)
    except (EngineError, OSError) as failure:
        return start + index, failure
    progress.update(row.size for row in request.rows)
    result.num_pending_rows -= len(request.rows)
    if not result.num_pending_rows:
        _save(job, result)
    return None


def _save(job: JobFolder, result: ShardResult) -> None:
    """Writes a finished shard: first the reasons of rejected rows, then the vectors."""
    with job.writing():
        job.write_rejected(result.shard, result.rejected)
        job.write_vectors(result.shard, result.vectors)


async def _embed_rows(
    engine: AsyncEngine, rows: Sequence[Row], params: PoolingParams, options: RequestOptions
) -> NDArray[np.float32]:
    """Returns the vectors of rows. Retries while the engine is full."""
    has_files = any(isinstance(row.content, Path) for row in rows)
    inputs = await asyncio.to_thread(_read, rows) if has_files else _read(rows)
    while True:
        try:
            return (await engine.embed(inputs, params, options)).embeddings
        except EngineOverloadedError as rejection:
            await asyncio.sleep(min(rejection.retry_after_s, MAX_WAIT_S))


def _read(rows: Sequence[Row]) -> list[str | ImageInput]:
    return [row.read() for row in rows]


def pooling_params(settings: EmbedSettings) -> PoolingParams:
    """Returns the pooling parameters of every row, with the adapter of --adapter."""
    adapter = next((entry.partition("=")[0] for entry in settings.engine.adapter), None)
    return PoolingParams(dimensions=settings.dimensions, normalize=settings.normalize, adapter=adapter)


def check_options(settings: EmbedSettings, info: ModelInfo, *, has_images: bool = False) -> None:
    """Raises UsageError for images or an option that the model does not support, before any row runs."""
    if has_images and not info.reads_images:
        raise UsageError(f"{info.name} reads no images; name a model that does, such as CLIP, with --model")
    if len(settings.engine.adapter) > 1:
        raise UsageError("--adapter: every row gets the same adapter; name one")
    if settings.prompt_name is not None and settings.prompt_name not in info.prompts:
        has = ", ".join(info.prompts) or "none"
        raise UsageError(f"--prompt-name: {info.name} has no prompt {settings.prompt_name!r}; it has: {has}")
    try:
        pooling_params(settings).verify(PoolingTask.EMBED, info)
    except InvalidRequestError as error:
        is_flag = error.param in declared_settings(EmbedSettings)
        if is_flag:
            error.name_fields({str(error.param): flag_of(str(error.param))})
        raise UsageError(error.message) from error


def _reason(error: InvalidRequestError) -> str:
    if isinstance(error, RequestTooLongError):
        return (
            f"{error.num_tokens} tokens; the limit of the model is {error.max_num_tokens}; --auto-truncate "
            "truncates such texts"
        )
    return error.message
