"""`penstock embed`: a file of texts in, a file of embeddings out, in bounded memory."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import operator
from collections.abc import Iterable, Mapping, Sequence
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

from ...settings import CommandError, EmbedSettings, UsageError, declared_settings, flag_of, load_failure
from .columns import JsonColumns
from .input import BadRow, BadRowError, InputFile, Row, Survey, open_input
from .journal import Journal
from .output import Results, Writer, check_names, columns_of, report_path, write_output, writer_for
from .pieces import Piece, pieces_of, rows_to_do
from .progress import Progress

logger = logging.getLogger(__name__)

MAX_WAIT_S: Final = 1.0
"""Longest wait, in seconds, before an engine that has no room is asked again."""


class Embedded(NamedTuple):
    """The answers to a piece.

    Attributes:
        piece: The rows that were asked for.
        answers: Numbers of first rows, with vectors [N, D] float32 from there on.
        refused: Why the model refused rows that are left out, by their numbers.
        error: Why there are no more.
    """

    piece: Piece
    answers: list[tuple[int, NDArray[np.float32]]]
    refused: dict[int, str]
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
        write, columns = writer_for(output), columns_of(source, output)
        if output.is_dir():
            raise UsageError(f"--output: {output} is a folder; name a file")
        if output.exists() and not settings.overwrite:
            raise UsageError(f"--output: {output} exists; give --overwrite to replace it")
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
    survey = _survey(source, output, columns, settings)
    engine = await AsyncEngine.start(config, log_level=settings.log_level.upper(), log_format=settings.log_format)
    try:
        check_options(settings, engine.info)
        options = {name: getattr(settings, name) for name in ("field", "dimensions", "normalize", "prompt_name")}
        identity = {"input": source.digest(), "model": model_digest(engine.info), **options}
        with Journal(output, identity, survey.num_rows) as journal:
            with Progress(survey.lengths, engine.info) as progress:
                refused = await _embed_rows(engine, source, journal, progress, settings)
            if not journal.num_rows:
                line, reason = _first_refused(source, refused)
                raise source.bad_row(line, f"{reason}; no row of the file can be embedded")
            vectors = journal.vectors(survey.num_rows)
            num_skipped = survey.num_rows - journal.num_rows
            write_output(output, write, source, Results(vectors, refused, num_skipped, columns))
            journal.remove()
    finally:
        await engine.close()
    left_out = f"; {num_skipped} bad rows were left out, see {report_path(output)}" if num_skipped else ""
    logger.info("%d rows are in %s%s", survey.num_rows - num_skipped, output, left_out)


def _survey(source: InputFile, output: Path, columns: JsonColumns | None, settings: EmbedSettings) -> Survey:
    """Reads the input once. Raises CommandError if it holds no good row, or rows that the output cannot hold."""

    def visit(row: Row) -> None:
        if not is_npy:
            check_names(source, row)
        if columns is not None:
            columns.add(row)

    is_npy = output.suffix.lower() == ".npy"
    survey = source.check(visit, skip_bad=settings.on_bad_row == "skip")
    if not survey.num_rows:
        raise BadRowError(f"{source.path} holds no rows")
    if not survey.lengths:
        line, reason = _first_refused(source, {})
        raise source.bad_row(line, f"{reason}; no row of the file can be embedded")
    if columns is not None:
        columns.fields()
    return survey


def _first_refused(source: InputFile, refused: Mapping[int, str]) -> tuple[int, str]:
    """Returns the line of the first row that is left out, and the reason."""
    return next(
        (row.line, row.reason if isinstance(row, BadRow) else refused[number])
        for number, row in enumerate(source.rows())
        if isinstance(row, BadRow) or number in refused
    )


async def _embed_rows(
    engine: AsyncEngine, source: InputFile, journal: Journal, progress: Progress, settings: EmbedSettings
) -> dict[int, str]:
    """Embeds the rows that the journal does not have yet. Answers are on disk before the next ones are looked at.

    If one fails, no more is asked for, and the rows in flight are waited for. A row that the model refused in an
    earlier run is asked for again, so that the list of such rows is complete.

    Returns:
        Why the model refused rows that are left out, by their numbers.
    """
    pieces = pieces_of(rows_to_do(source, journal.done, progress.skip), max(settings.batch_size // 2, 1))
    in_flight: set[asyncio.Task[Embedded]] = set()
    num_in_flight = 0
    failed: list[tuple[int, Exception]] = []
    refused: dict[int, str] = {}
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
            for answer in answers:
                refused.update(answer.refused)
            _keep(answers, journal, progress)
    finally:
        for task in in_flight:
            task.cancel()
        await asyncio.gather(*in_flight, return_exceptions=True)
    if failed:
        raise min(failed, key=operator.itemgetter(0))[1]
    return refused


def _keep(answers: Iterable[Embedded], journal: Journal, progress: Progress) -> None:
    """Writes the vectors to the journal, then shows the rows that are done."""
    if given := [part for answer in answers for part in answer.answers]:
        journal.add(given)
    for answer in answers:
        num_done = sum(len(vectors) for _, vectors in answer.answers) + len(answer.refused)
        if num_done:
            progress.update(row.text for row in answer.piece.rows[:num_done])


async def _embed(engine: AsyncEngine, source: InputFile, piece: Piece, settings: EmbedSettings) -> Embedded:
    """Embeds a piece; if the engine refuses it, row by row. A row that is refused ends it unless it may be left out."""
    params = pooling_params(settings)
    options = RequestOptions(prompt_name=settings.prompt_name)
    answers: list[tuple[int, NDArray[np.float32]]] = []
    refused: dict[int, str] = {}
    try:
        try:
            return Embedded(piece, [(piece.start, await _ask(engine, piece.rows, params, options))], {}, None)
        except InvalidRequestError:
            for number, row in enumerate(piece.rows, piece.start):
                try:
                    answers.append((number, await _ask(engine, [row], params, options)))
                except InvalidRequestError as refusal:
                    if settings.on_bad_row == "fail":
                        return Embedded(piece, answers, {}, source.refused_row(row.line, _reason(refusal)))
                    refused[number] = _reason(refusal)
    except (EngineError, OSError) as failure:
        return Embedded(piece, answers, refused, failure)
    return Embedded(piece, answers, refused, None)


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
        is_flag = error.param in declared_settings(EmbedSettings)
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
    for name in ("name", "path", "root", "sources", "device", "kernels", "num_lanes", "auto_truncate"):
        del resolved[name]
    folder = Path(info.path)
    weights = sorted((*folder.rglob("*.safetensors"), *folder.rglob("*.bin")))
    stats = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in weights]
    return hashlib.sha256(orjson.dumps([resolved, stats], option=orjson.OPT_NON_STR_KEYS)).hexdigest()
