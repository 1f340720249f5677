"""`penstock embed`: a file of texts in, a file of embeddings out, in bounded memory."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray
from tqdm import tqdm

from penstock.engine import AsyncEngine, ModelInfo, PoolingParams, PoolingTask, RequestOptions
from penstock.engine.logs import configure_logging
from penstock.engine.protocol.errors import EngineError, InvalidRequestError, RequestTooLongError

from ...settings import CommandError, EmbedSettings, UsageError
from ..flags import flag_of
from .input import BadRowError, InputFile, Row, blocks, open_input
from .journal import Journal
from .output import Writer, write_output, writer_for


class Embedded(NamedTuple):
    """The vectors of the first rows of a block, and the error of the row after them where there is one."""

    vectors: NDArray[np.float32]
    error: BadRowError | None


def embed_file(file: str, settings: EmbedSettings, model: str) -> None:
    """Embeds the rows of `file`. Given again after an interruption, it goes on where it was.

    Args:
        file: Texts: .txt, .jsonl or .parquet.
        settings: What the user asked for.
        model: Local folder or hub id.

    Raises:
        UsageError: The file or the output cannot be what they are said to be.
        CommandError: The work could not be finished; the message says why, and what is done is kept.
    """
    configure_logging(settings.log_level, settings.log_format)
    try:
        source, output = open_input(Path(file), settings.field), Path(settings.output)
        write = writer_for(output)
        if output.is_dir():
            raise UsageError(f"--output: {output} is a folder; name a file")
        if output.exists() and not settings.overwrite:
            raise UsageError(f"--output: {output} exists; give --overwrite to replace it")
        asyncio.run(_run(source, output, write, settings, model))
    except (EngineError, OSError) as error:
        raise CommandError(str(error)) from error


async def _run(source: InputFile, output: Path, write: Writer, settings: EmbedSettings, model: str) -> None:
    num_rows = source.check()
    if not num_rows:
        raise BadRowError(f"{source.path} holds no rows")
    config, log_level = settings.engine_config(model), settings.log_level.upper()
    engine = await AsyncEngine.start(config, log_level=log_level, log_format=settings.log_format)
    try:
        _check_options(settings, engine.info)
        options = {name: getattr(settings, name) for name in ("field", "dimensions", "normalize", "prompt_name")}
        identity = {"input": source.digest(), "model": _model_digest(engine.info), **options}
        with Journal(output, identity, num_rows) as journal:
            with tqdm(total=num_rows, initial=journal.num_rows, unit=" rows", dynamic_ncols=True) as progress:
                await _embed_rows(engine, source, journal, progress, settings)
            write_output(output, write, source, journal.vectors())
            journal.remove()
    finally:
        await engine.close()


async def _embed_rows(
    engine: AsyncEngine, source: InputFile, journal: Journal, progress: Any, settings: EmbedSettings
) -> None:
    """Embeds what the journal does not have yet: two half batches in flight, so that the model never waits."""
    in_flight: deque[asyncio.Task[Embedded]] = deque()

    async def commit_oldest() -> None:
        vectors, error = await in_flight.popleft()
        if len(vectors):
            journal.append(vectors)
            progress.update(len(vectors))
        if error is not None:
            raise error

    try:
        for block in blocks(source.rows_from(journal.num_rows), max(settings.batch_size // 2, 1)):
            in_flight.append(asyncio.create_task(_embed_block(engine, source, block, settings)))
            if len(in_flight) == 2:
                await commit_oldest()
        while in_flight:
            await commit_oldest()
    finally:
        for task in in_flight:
            task.cancel()
        await asyncio.gather(*in_flight, return_exceptions=True)


async def _embed_block(engine: AsyncEngine, source: InputFile, block: list[Row], settings: EmbedSettings) -> Embedded:
    """Embeds a block; where the engine refuses it, row by row up to the one at fault."""
    params = _pooling_params(settings)
    options = RequestOptions(prompt_name=settings.prompt_name)
    try:
        result = await engine.embed([row.text for row in block], params, options)
    except InvalidRequestError as error:
        if len(block) == 1:
            return Embedded(np.empty((0, 0), np.float32), source.bad_row(block[0].line, _reason(error)))
        done: list[NDArray[np.float32]] = []
        for row in block:
            vectors, bad_row = await _embed_block(engine, source, [row], settings)
            if bad_row is not None:
                return Embedded(np.concatenate(done) if done else vectors, bad_row)
            done.append(vectors)
        return Embedded(np.concatenate(done), None)
    return Embedded(result.embeddings, None)


def _pooling_params(settings: EmbedSettings) -> PoolingParams:
    return PoolingParams(dimensions=settings.dimensions, normalize=settings.normalize)


def _check_options(settings: EmbedSettings, info: ModelInfo) -> None:
    """Raises UsageError for an option that the model refuses, so that no row is blamed for it."""
    if settings.prompt_name is not None and settings.prompt_name not in info.prompts:
        has = ", ".join(info.prompts) or "none"
        raise UsageError(f"--prompt-name: {info.name} has no prompt {settings.prompt_name!r}; it has: {has}")
    try:
        _pooling_params(settings).verify(PoolingTask.EMBED, info)
    except InvalidRequestError as error:
        is_flag = error.param in EmbedSettings.model_fields
        raise UsageError(f"{flag_of(str(error.param))}: {error.message}" if is_flag else error.message) from error


def _reason(error: InvalidRequestError) -> str:
    if isinstance(error, RequestTooLongError):
        return f"{error.num_tokens} tokens; the model takes {error.max_num_tokens}; --auto-truncate cuts such texts"
    return error.message


def _model_digest(info: ModelInfo) -> str:
    """Returns a digest of everything that decides a model's numbers: what was resolved, and the weight files."""
    resolved = dataclasses.asdict(info)
    for name in ("name", "path", "sources", "device", "auto_truncate"):
        del resolved[name]
    folder = Path(info.path)
    weights = sorted((*folder.rglob("*.safetensors"), *folder.rglob("*.bin")))
    stats = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in weights]
    return hashlib.sha256(orjson.dumps([resolved, stats], option=orjson.OPT_NON_STR_KEYS)).hexdigest()
