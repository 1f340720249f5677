"""Embeds texts with a library of its own environment. WorkerSide starts it and sends the texts.

Started with one argument, the options as JSON. Reads questions and writes answers, a line of JSON each; the first
answer says that the model is loaded. It ends when there are no more questions.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from typing import Any

import backends


def main() -> None:
    """Loads the backend and answers until the questions end."""
    options = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not mix with responses
    backend: backends.Backend = getattr(backends, options["backend"])(options)
    _write(answers, {"ready": True})
    for line in sys.stdin:
        question = json.loads(line)
        _write(answers, _embed(backend, question) if question["do"] == "embed" else _run(backend, question))


def _embed(backend: backends.Backend, question: dict[str, Any]) -> dict[str, Any]:
    return {"vectors": backend.embed(question["texts"]).tolist()}


def _run(backend: backends.Backend, question: dict[str, Any]) -> dict[str, Any]:
    """Calls the library over and over; texts of a call count when it has returned."""
    calls = itertools.cycle(question["calls"])
    num_texts, latencies_s = 0, []
    began_s = time.monotonic()
    until_s = began_s + question["seconds"]
    while (called_s := time.monotonic()) < until_s:
        texts = next(calls)
        backend.embed(texts)
        latencies_s.append(time.monotonic() - called_s)
        num_texts += len(texts)
    return {"num_texts": num_texts, "seconds": time.monotonic() - began_s, "latencies_s": latencies_s}


def _write(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
