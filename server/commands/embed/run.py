"""`penstock embed`: a file of texts in, a file of embeddings out, in bounded memory."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import operator
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import orjson
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

from ...settings import CommandError, EmbedSettings, UsageError
from ..flags import flag_of
from ..load_failures import load_failure
from .input import BadRowError, InputFile, Row, open_input
from .journal import Journal
from .output import Writer, write_output, writer_for
from .pieces import Piece, pieces_of, rows_to_do
from .progress import Progress

MAX_WAIT_S: Final = 1.0
"""Longest wait, in seconds, before an engine that has no room is asked again."""


class Embedded(NamedTuple):
    """What became of a piece.

    Attributes:
        piece: What was asked.
        vectors: [N, D] float32, of its first rows; of all of them where there is no error.
        error: Why there are no more.
    """

    piece: Piece
    vectors: NDArray[np.float32]
    error: Exception | None


def embed_file(file: str, settings: EmbedSettings, model: str, name: str | None = None) -> None:
    """Embeds the rows of `file`. Given again after an interruption, it goes on where it was.

    Args:
        file: Texts: .txt, .jsonl or .parquet.
        settings: What the user asked for.
        model: Local folder or hub id.
        name: What messages call it; None: that.

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
        asyncio.run(_run(source, output, write, settings, settings.engine_config(model, name)))
    except ModelLoadError as error:
        raise load_failure(error, model, settings.revision) from error
    except (EngineError, OSError) as error:
        raise CommandError(str(error)) from error


async def _run(source: InputFile, output: Path, write: Writer, settings: EmbedSettings, config: EngineConfig) -> None:
    lengths = source.check()
    if not lengths:
        raise BadRowError(f"{source.path} holds no rows")
    engine = await AsyncEngine.start(config, log_level=settings.log_level.upper(), log_format=settings.log_format)
    try:
        check_options(settings, engine.info)
        options = {name: getattr(settings, name) for name in ("field", "dimensions", "normalize", "prompt_name")}
        identity = {"input": source.digest(), "model": model_digest(engine.info), **options}
        with Journal(output, identity, lengths.total()) as journal:
            with Progress(lengths, engine.info) as progress:
                await _embed_rows(engine, source, journal, progress, settings)
            write_output(output, write, source, journal.vectors())
            journal.remove()
    finally:
        await engine.close()


async def _embed_rows(
    engine: AsyncEngine, source: InputFile, journal: Journal, progress: Progress, settings: EmbedSettings
) -> None:
    """Embeds what the journal does not have yet. Answers are on disk before the next ones are looked at.

    Where one fails, no more is asked for, and what is in flight is waited for.
    """
    pieces = pieces_of(rows_to_do(source, journal.done, progress.skip), max(settings.batch_size // 2, 1))
    in_flight: set[asyncio.Task[Embedded]] = set()
    num_in_flight = 0
    failed: list[tuple[int, Exception]] = []
    try:
        while True:
            while not failed and num_in_flight < settings.batch_size and (piece := next(pieces, None)) is not None:
                num_in_flight += len(piece.rows)
                in_flight.add(asyncio.create_task(_embed(engine, source, piece, settings)))
            if not in_flight:
                break
            ended, in_flight = await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
            answers = [task.result() for task in ended]
            num_in_flight -= sum(len(answer.piece.rows) for answer in answers)
            failed += [(answer.piece.start, answer.error) for answer in answers if answer.error is not None]
            _keep(answers, journal, progress)
    finally:
        for task in in_flight:
            task.cancel()
        await asyncio.gather(*in_flight, return_exceptions=True)
    if failed:
        raise min(failed, key=operator.itemgetter(0))[1]


def _keep(answers: Iterable[Embedded], journal: Journal, progress: Progress) -> None:
    """Writes what was answered to the journal, then shows it."""
    given = [answer for answer in answers if len(answer.vectors)]
    if given:
        journal.add([(answer.piece.start, answer.vectors) for answer in given])
    for answer in given:
        progress.update(row.text for row in answer.piece.rows[: len(answer.vectors)])


async def _embed(engine: AsyncEngine, source: InputFile, piece: Piece, settings: EmbedSettings) -> Embedded:
    """Embeds a piece; where the engine refuses it, row by row up to the one at fault."""
    params = pooling_params(settings)
    options = RequestOptions(prompt_name=settings.prompt_name)
    done: list[NDArray[np.float32]] = []
    error: Exception | None = None
    try:
        try:
            return Embedded(piece, await _ask(engine, piece.rows, params, options), None)
        except InvalidRequestError:
            for row in piece.rows:
                done += [await _ask(engine, [row], params, options)]
    except InvalidRequestError as refusal:
        error = source.bad_row(piece.rows[len(done)].line, _reason(refusal))
    except (EngineError, OSError) as failure:
        error = failure
    return Embedded(piece, np.concatenate(done) if done else np.empty((0, 0), np.float32), error)


async def _ask(
    engine: AsyncEngine, rows: Sequence[Row], params: PoolingParams, options: RequestOptions
) -> NDArray[np.float32]:
    """Returns the vectors of rows, once the engine has room for them."""
    while True:
        try:
            return (await engine.embed([row.text for row in rows], params, options)).embeddings
        except EngineOverloadedError as refusal:
            await asyncio.sleep(min(refusal.retry_after_s, MAX_WAIT_S))


def pooling_params(settings: EmbedSettings) -> PoolingParams:
    """Returns how each row is embedded."""
    return PoolingParams(dimensions=settings.dimensions, normalize=settings.normalize)


def check_options(settings: EmbedSettings, info: ModelInfo) -> None:
    """Raises UsageError for an option that the model refuses, so that no row is blamed for it."""
    if settings.prompt_name is not None and settings.prompt_name not in info.prompts:
        has = ", ".join(info.prompts) or "none"
        raise UsageError(f"--prompt-name: {info.name} has no prompt {settings.prompt_name!r}; it has: {has}")
    try:
        pooling_params(settings).verify(PoolingTask.EMBED, info)
    except InvalidRequestError as error:
        is_flag = error.param in EmbedSettings.model_fields
        if is_flag:
            error.name_fields({str(error.param): flag_of(str(error.param))})
        raise UsageError(error.message) from error


def _reason(error: InvalidRequestError) -> str:
    if isinstance(error, RequestTooLongError):
        return f"{error.num_tokens} tokens; the model takes {error.max_num_tokens}; --auto-truncate cuts such texts"
    return error.message


def model_digest(info: ModelInfo) -> str:
    """Returns a digest of everything that decides a model's numbers: what was resolved, and the weight files."""
    resolved = dataclasses.asdict(info)
    for name in ("name", "path", "root", "sources", "device", "kernels", "auto_truncate"):
        del resolved[name]
    folder = Path(info.path)
    weights = sorted((*folder.rglob("*.safetensors"), *folder.rglob("*.bin")))
    stats = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in weights]
    return hashlib.sha256(orjson.dumps([resolved, stats], option=orjson.OPT_NON_STR_KEYS)).hexdigest()
