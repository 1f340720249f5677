"""The `penstock` command. Invalid values give one line and exit code 2, before heavy imports."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

from penstock.engine.client.engine_process import EngineProcess
from penstock.engine.protocol.setting import short_count

from .. import penstock_version
from ..models.served_model import load_failure
from ..settings import (
    BenchSettings,
    CommandError,
    EmbedSettings,
    EvalSettings,
    InfoSettings,
    ServerSettings,
    UsageError,
    load_settings,
)
from .flags import OneLineParser, add_flags, translate_vllm_flags
from .known_models import TASKS, as_json, as_text, find_models
from .model_arguments import model_and_names, settings_and_models
from .ray_commands import add_ray_commands

logger = logging.getLogger(__name__)

INTERRUPTED: Final = 130
TERMINATED: Final = 143
BROKEN_PIPE: Final = 141
"""Exit code of a program that SIGPIPE ended, as in shells."""

_DECIDED_BY_LOADING: Final = ("kernels", "num_lanes", "arithmetic")

_SERVE = "Serve models over HTTP. Default MODEL: the embedded all-MiniLM-L6-v2."
_EMBED = (
    "Embed the rows of a file, or a folder of images. To continue after an interruption, run the same command again."
)
_EVAL = "Measure the quality of a served model on data sets with judgements. Prints one JSON line for each data set."
_MODELS = "List tested models, each with the command that serves it."
_BENCH = "Measure throughput and latency of one server, or compare two."
_CONFIG = "Print a template for `penstock serve --config` with every setting as a comment."
_INFO = "Show the resolved values of a model and their source files, without loading weights."


class TerminatedError(KeyboardInterrupt):
    """Raised by SIGTERM, which ends a command like Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    _open_closed_streams()
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        warnings: list[str] = []
        if words[:1] not in (["models"], ["bench"]):  # their --task is not vLLM's
            words, warnings = translate_vllm_flags(words)
        parser = _parser()
        if not words:
            parser.print_help(sys.stderr)
            return UsageError.exit_code
        if words[0].startswith("-") and words[0] not in ("-h", "--help", "--version"):
            raise UsageError(f"the command comes before {words[0].partition('=')[0]}, such as penstock serve")
        arguments = vars(parser.parse_args(words))
        for warning in warnings:
            print(f"penstock: warning: {warning}", file=sys.stderr)
        run = arguments.pop("run")
        code = int(run(arguments))
        sys.stdout.flush()
        return code
    except CommandError as error:
        _print_last(f"penstock: error: {error}")
        return error.exit_code
    except BrokenPipeError:  # the reader has closed the pipe, for example `head`
        _forget_output()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _forget_output()
        _print_last(f"penstock: error: the output cannot be written: {error.strerror}")
        return CommandError.exit_code
    except KeyboardInterrupt as interrupt:
        is_terminated = isinstance(interrupt, TerminatedError)
        word = "terminated" if is_terminated else "interrupted"
        _print_last("; ".join([f"penstock: {word}", *map(str, interrupt.args)]))
        return TERMINATED if is_terminated else INTERRUPTED


def _forget_output() -> None:
    """Redirects stdout to the null device. Otherwise Python flushes it at exit and reports an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_last(text: str) -> None:
    """Prints after all log lines. Prints nothing if these could not be written: it would block too."""
    from penstock.engine.logs import flush_logs

    if flush_logs():
        print(text, file=sys.stderr)


def _open_closed_streams() -> None:
    """Opens the null device as standard input, output and error if these are closed.

    Otherwise a socket may get the descriptor. It would receive printed text, and a start of a
    process would close it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # open returns the lowest free descriptor
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - None if it was closed
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="penstock", description="Embedding, rerank, score and classification server.")
    parser.add_argument("--version", action="version", version=f"penstock {penstock_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    serve = commands.add_parser("serve", help=_SERVE, description=_SERVE, usage="%(prog)s [MODEL ...] [FLAG ...]")
    add_flags(serve, ServerSettings, positional="model", nargs="*")
    serve.set_defaults(run=_serve)

    usage = "%(prog)s FILE --output FILE [FLAG ...]"
    embed = commands.add_parser("embed", help=_EMBED, description=_EMBED, usage=usage)
    embed.add_argument(
        "file",
        metavar="FILE",
        help="File of texts or images: .txt (one per line), .jsonl, .csv, .tsv or .parquet. Or a folder of images.",
    )
    add_flags(embed, EmbedSettings)
    embed.set_defaults(run=_embed)

    usage = "%(prog)s URL [DATA ...] [FLAG ...]"
    evaluation = commands.add_parser("eval", help=_EVAL, description=_EVAL, usage=usage)
    evaluation.add_argument("url", metavar="URL", help="Address of the server, such as http://localhost:8000.")
    evaluation.add_argument("data", metavar="DATA", nargs="*", help="Folder with a data set; see docs/quality.md.")
    add_flags(evaluation, EvalSettings)
    evaluation.set_defaults(run=_eval)

    info = commands.add_parser("info", help=_INFO, description=_INFO, usage="%(prog)s [MODEL] [FLAG ...]")
    info.add_argument("--json", action="store_true", help="Print JSON, with the source of each value.")
    add_flags(info, InfoSettings, positional="model")
    info.set_defaults(run=_info)

    usage = "%(prog)s URL [URL2] [FLAG ...]"
    bench = commands.add_parser("bench", help=_BENCH, description=_BENCH, usage=usage)
    bench.add_argument("url", metavar="URL", nargs="+", help="Base URL of a server, such as http://localhost:8000.")
    add_flags(bench, BenchSettings)
    bench.set_defaults(run=_bench)

    config = commands.add_parser("config", help=_CONFIG, description=_CONFIG)
    config.set_defaults(run=_config)

    models = commands.add_parser("models", help=_MODELS, description=_MODELS, usage="%(prog)s [WORD] [FLAG ...]")
    models.add_argument("word", metavar="WORD", nargs="?", default="", help="Only models that contain this word.")
    models.add_argument("--task", choices=TASKS, help="Only models for this task; default: all.")
    models.add_argument("--json", action="store_true", help="Print JSON.")
    models.set_defaults(run=_models)

    add_ray_commands(commands)
    return parser


def _serve(arguments: dict[str, Any]) -> int:
    settings, configured_models = settings_and_models(arguments, ServerSettings)
    with _engine_process(configured_models[0].config.in_process or not configured_models[0].is_preloaded) as process:
        from .serve import serve

        serve(settings, configured_models, process)
    return 0


def _config(_: dict[str, Any]) -> int:
    from .model_arguments import config_template

    print(config_template(), end="")
    return 0


@contextlib.contextmanager
def _engine_process(in_process: bool) -> Iterator[EngineProcess | None]:
    """Starts the engine process, which loads the model while this process imports the server.

    Yields None if `in_process`, or if it cannot be started: the engine then reports the reason when it starts one.
    """
    received: list[int] = []
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it reads keys and certificate again, which are not read yet
    stops = [s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) is not signal.SIG_IGN]
    for stop_signal in stops:  # a partly started process could not be stopped
        signal.signal(stop_signal, lambda number, _: received.append(number))
    with contextlib.ExitStack() as stack:
        process = None
        if not in_process:
            with contextlib.suppress(OSError):  # the server starts the process later, and reports the error
                process = stack.enter_context(EngineProcess())
        for stop_signal in stops:
            signal.signal(stop_signal, _stop)
        for number in received:
            _stop(number, None)
        yield process


def _stop(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C would interrupt the clean-up with a traceback
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(0)


def _embed(arguments: dict[str, Any]) -> int:
    file = arguments.pop("file")
    settings = load_settings(EmbedSettings, arguments)
    model, names = model_and_names(settings.model)
    with _stopped_by_sigterm("run the same command again to continue"):
        from ..embed_jobs.run import embed_file

        embed_file(file, settings, model, names[0])
    return 0


def _bench(arguments: dict[str, Any]) -> int:
    from ..bench.sweep import Sweep

    urls = arguments.pop("url")
    sweep = Sweep(urls, load_settings(BenchSettings, arguments))
    try:
        with _stopped_by_sigterm():
            sweep.run()
    finally:
        if sweep.results:
            print(sweep.report(), flush=True)
            sweep.draw()
    return 0


def _eval(arguments: dict[str, Any]) -> int:
    url = arguments.pop("url")
    folders = [Path(folder) for folder in arguments.pop("data")]
    settings = load_settings(EvalSettings, arguments)
    from ..quality.evaluate import evaluate

    for report in evaluate(url, folders, settings):  # printed at once: an error in the next data set loses nothing
        print(json.dumps(report), flush=True)
    return 0


@contextlib.contextmanager
def _stopped_by_sigterm(*advice: str) -> Iterator[None]:
    """SIGTERM stops the body like Ctrl-C. Raises TerminatedError or KeyboardInterrupt with `advice`."""
    is_terminated = False

    def terminate(_: int, frame: FrameType | None) -> None:
        nonlocal is_terminated
        is_terminated = True
        interrupt = signal.getsignal(signal.SIGINT)  # that of asyncio.run cancels the main task only
        (interrupt if callable(interrupt) else signal.default_int_handler)(signal.SIGINT, frame)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt:
        raise (TerminatedError if is_terminated else KeyboardInterrupt)(*advice) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _info(arguments: dict[str, Any]) -> int:
    as_json = arguments.pop("json")
    settings = load_settings(InfoSettings, arguments)
    model, names = model_and_names(settings.model)
    from penstock.engine.checkpoint.files import check_weights
    from penstock.engine.model_files.resolve import format_table, resolve_model, resolved_table
    from penstock.engine.protocol.errors import ModelLoadError

    from ..models.weight_files import WeightSummary

    try:
        info = resolve_model(settings.engine_config(model, names[0]))
        check_weights(Path(info.path))
        for spec in info.dense:
            check_weights(Path(info.path) / spec.folder)
    except ModelLoadError as error:
        raise load_failure(error, model, settings.engine.revision) from error
    files = WeightSummary.of(info.path)
    rows = [row for row in resolved_table(info) if row[0] not in _DECIDED_BY_LOADING]
    if as_json:
        fields = {name: {"value": getattr(info, name), "from": source} for name, _, source in rows}
        head = {"name": info.name, "path": info.path, "parameters": files.num_parameters, "bytes": files.num_bytes}
        print(json.dumps({**head, "memory": files.bytes_by_dtype(), "fields": fields}, indent=2, default=_plain))
        return 0
    weights = f"{short_count(files.num_parameters)} parameters, {files.num_bytes / 2**20:.1f} MiB of weights on disk"
    memory = ", ".join(f"{num_bytes / 2**20:.1f} MiB as {dtype}" for dtype, num_bytes in files.bytes_by_dtype().items())
    in_memory = f"; in memory {memory}" if memory else ""
    print(f"{info.name} ({info.path})\n  {weights}{in_memory}\n{format_table(rows)}")
    return 0


def _models(arguments: dict[str, Any]) -> int:
    models = find_models(arguments["task"], arguments["word"])
    width = shutil.get_terminal_size(fallback=(sys.maxsize, 0)).columns  # without a terminal one line per model
    print(json.dumps(as_json(models), indent=2) if arguments["json"] else as_text(models, width))
    return 0


def _plain(value: object) -> object:
    """Converts a value without a JSON type: a dataclass to an object, others to text."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else str(value)
