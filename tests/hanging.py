"""Engine processes that hang on a long input, like a kernel or driver that never returns."""

from pathlib import Path
from typing import Literal

HANGING_TOKENS = 100
"""Forwards with an input of at least this number of tokens hang."""
HANGING_TEXT = "word " * HANGING_TOKENS

Where = Literal["begin", "forward"]
"""The engine thread hangs at the start of the forward, or the running forward never ends."""

_SOURCE = """
import sys

if "penstock.engine.core.core_process" in sys.orig_argv:
    import time

    def hang():
        while True:
            time.sleep(1)  # without the interpreter's lock

    class EndlessForward:
        is_done = False
        outputs = staticmethod(hang)

    def hanging(begin):
        def replaced(self, chunks):
            if max(len(chunk.sequence.tokens) for chunk in chunks) < {tokens}:
                return begin(self, chunks)
            return hang() if {where!r} == "begin" else EndlessForward()

        return replaced

    if {torch}:
        from penstock.engine.core.model_runner import ModelRunner as Runner
    else:
        from penstock.engine.core.array_runner import ArrayRunner as Runner
    Runner.begin = hanging(Runner.begin)
"""


def write_hanging_forwards(folder: Path, where: Where, *, torch: bool = False) -> None:
    """Lets forwards hang in engine processes with `folder` as PYTHONPATH."""
    source = _SOURCE.format(tokens=HANGING_TOKENS, where=where, torch=torch)
    (folder / "sitecustomize.py").write_text(source)
