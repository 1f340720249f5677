"""Class and relevance scores in TEI's shapes, and the headers of its answers. Knows no request and no engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from fastapi import Request, Response
from numpy.typing import NDArray

from penstock.engine.protocol.model_info import Activation, ModelInfo, ModelKind
from penstock.engine.protocol.request import STAGE_TIMES, Stage
from penstock.engine.protocol.vectors import SparseVector

from ..wire.json_pieces import json_answer

Scores = NDArray[np.float32]

_STAGE_HEADERS: Final = {
    "x-tokenization-time": Stage.TOKENIZATION,
    "x-queue-time": Stage.QUEUE,
    "x-inference-time": Stage.INFERENCE,
}
_WHOLE: Final = {"type": "integer", "minimum": 0}
TEI_HEADERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "headers": {
            "x-compute-type": {"description": "What computed.", "schema": {"enum": ["cpu", "gpu"]}},
            "x-compute-characters": {"description": "Characters of the inputs.", "schema": _WHOLE},
            "x-compute-tokens": {"description": "Tokens of the inputs.", "schema": _WHOLE},
            **{
                name: {"description": "Milliseconds.", "schema": _WHOLE}
                for name in ("x-compute-time", "x-total-time", *_STAGE_HEADERS)
            },
        }
    }
}
"""For OpenAPI: the headers of TEI's answers. A path that other dialects share has answers without them."""


def probabilities(scores: Scores, model: ModelInfo) -> Scores:
    """Returns relevance scores between 0 and 1, which TEI gives unless `raw_scores` is set.

    Most models' own files say the same. Those of some cross-encoders ask for logits.
    """
    if model.kind is ModelKind.CROSS_ENCODER and model.activation is Activation.IDENTITY and model.use_activation:
        return np.exp(-np.logaddexp(np.float32(0), -scores))
    return scores


def prediction_rows(scores: Scores, labels: Sequence[str], top_k: int | None = None) -> Iterator[list[dict[str, Any]]]:
    """Returns the classes of each input, best first, made while they are written."""
    for own in scores:
        best = np.argsort(-own, kind="stable")[: top_k or None]
        yield [{"score": own[i], "label": labels[i]} for i in best.tolist()]


def rank_rows(scores: Scores, texts: Sequence[str] | None, top_n: int | None) -> Iterator[dict[str, Any]]:
    """Returns the places of texts, best first, made while they are written; with `texts`, each holds its own."""
    for i in np.argsort(-scores, kind="stable")[: top_n or None].tolist():
        row = {"index": i, "score": scores[i]}
        yield row if texts is None else {**row, "text": texts[i]}


def sparse_rows(vectors: Sequence[SparseVector]) -> Iterator[Iterator[dict[str, Any]]]:
    """Returns the entries of sparse vectors that are not zero, made while they are written."""
    for vector in vectors:
        entries = zip(vector.indices.tolist(), vector.values.tolist(), strict=True)
        yield ({"index": i, "value": value} for i, value in entries)


def tei_response(
    request: Request, content: Any, model: ModelInfo, began_s: float, *, num_chars: int, num_tokens: int
) -> Response:
    """Returns an answer with TEI's headers, for which memory has been reserved.

    Args:
        request: That is answered.
        content: What `json_pieces` takes.
        model: The model that answered.
        began_s: time.perf_counter() at the start.
        num_chars: Characters of the inputs.
        num_tokens: Tokens of the inputs.
    """
    compute_ms = _elapsed_ms(began_s)
    times = STAGE_TIMES.get()
    stages = {} if times is None else times.seconds()
    response = json_answer(request, content)
    response.headers["x-compute-type"] = "cpu" if model.device == "cpu" else "gpu"
    response.headers["x-compute-time"] = compute_ms
    response.headers["x-compute-characters"] = str(num_chars)
    response.headers["x-compute-tokens"] = str(num_tokens)
    for name, stage in _STAGE_HEADERS.items():
        response.headers[name] = _milliseconds(stages.get(stage, 0.0))
    response.headers["x-total-time"] = _elapsed_ms(began_s)
    return response


def _elapsed_ms(began_s: float) -> str:
    return _milliseconds(time.perf_counter() - began_s)


def _milliseconds(seconds: float) -> str:
    return str(round(1000 * seconds))
