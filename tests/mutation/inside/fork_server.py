"""Runs pytest again and again, each time in a fork of a process that has loaded what is heavy and never changed.

Started in a copy of the checkout. Reads an order a line, in JSON, and answers each with a line: `{"code": 1}`, where
the code is None if the time was over, or it held too much memory.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

PRELOADED = (
    *("numpy", "torch", "transformers", "transformers.models.auto", "sentence_transformers", "safetensors.torch"),
    *("tokenizers", "msgspec", "orjson", "fastapi", "httpx", "uvicorn", "prometheus_client", "uvloop"),
    *("pytest", "hypothesis.stateful", "hypothesis.strategies", "opentelemetry.sdk.trace"),
)
"""Never a module of penstock: those are what is changed."""


def main() -> None:
    """Serves orders until there are no more."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for name in PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps({"code": _run(**json.loads(line))}), file=answers, flush=True)


def _run(limit_s: float | None, memory_bytes: int, **order: Any) -> int | None:
    """Runs pytest in a fork, and ends whatever that leaves behind."""
    child = os.fork()
    if not child:
        code = 3
        try:
            code = _pytest(**order)
        except BaseException:  # noqa: BLE001  # whatever it is, this is a fork and must not go on
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    end_s = time.monotonic() + (float("inf") if limit_s is None else limit_s)
    ended = status = 0
    while not ended and time.monotonic() < end_s and _held_bytes(child) < memory_bytes:
        time.sleep(0.02)
        ended, status = os.waitpid(child, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if ended:
        return os.waitstatus_to_exitcode(status)
    os.waitpid(child, 0)
    return None


def _held_bytes(process: int) -> int:
    """What a process has touched; pools of engines reserve far more. 0 once it has ended."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _pytest(options: list[str], output: str, compile_files: bool) -> int:
    os.setsid()
    sys.dont_write_bytecode = not compile_files
    null, file = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for target, source in ((0, null), (1, file), (2, file)):
        os.dup2(source, target)
    import pytest

    return int(pytest.main(options))


if __name__ == "__main__":
    main()
