"""Class scores as the rows of responses in each dialect, made while they are written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.engine import ClassResult, TokenResult


def prediction_rows(
    scores: NDArray[np.float32], labels: Sequence[str], top_k: int | None = None
) -> Iterator[list[dict[str, Any]]]:
    """Returns the classes of each input, best first, made while they are written."""
    for own in scores:
        best = np.argsort(-own, kind="stable")[: top_k or None]
        yield [{"score": own[i], "label": labels[i]} for i in best.tolist()]


def vllm_rows(result: ClassResult) -> Iterator[dict[str, Any]]:
    """Returns vLLM's `data`: the best class and the scores of all, in the order of the model's classes."""
    for i, (scores, best) in enumerate(zip(result.scores, result.scores.argmax(axis=1).tolist(), strict=True)):
        label = result.labels[best] if result.labels else None
        yield {"index": i, "label": label, "probs": scores, "num_classes": len(scores)}


def cohere_rows(
    answer_id: str, inputs: Sequence[str], result: ClassResult, *, is_multi_label: bool
) -> Iterator[dict[str, Any]]:
    """Returns Cohere's `classifications`. Of several labels those at 0.5 or more are predicted, the best at least."""
    for i, (text, scores) in enumerate(zip(inputs, result.scores, strict=True)):
        best = int(scores.argmax())
        chosen = [k for k in range(len(scores)) if scores[k] >= 0.5] if is_multi_label else []
        chosen = sorted(chosen, key=lambda k: -scores[k]) or [best]
        yield {
            "id": f"{answer_id}-{i}",
            "input": text,
            "prediction": result.labels[best],
            "predictions": [result.labels[k] for k in chosen],
            "confidence": scores[best],
            "confidences": [scores[k] for k in chosen],
            "labels": {name: {"confidence": score} for name, score in zip(result.labels, scores, strict=True)},
            "classification_type": "multi-label" if is_multi_label else "single-label",
        }


def token_rows(result: TokenResult, texts: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """Returns a row per input with the class of every token.

    Args:
        result: Scores and ids of the tokens.
        texts: The text of every id.
    """
    for i, (scores, ids) in enumerate(zip(result.rows, result.token_ids, strict=True)):
        tokens = _tokens(scores, ids, result.labels, texts)
        yield {"index": i, "tokens": tokens, "num_classes": scores.shape[1]}


def _tokens(
    scores: NDArray[np.float32], ids: Sequence[int], labels: Sequence[str], texts: Mapping[int, str]
) -> Iterator[dict[str, Any]]:
    for own, token_id in zip(np.ascontiguousarray(scores), ids, strict=True):
        best = int(own.argmax())
        yield {
            "token": texts[token_id],
            "token_id": token_id,
            "label": labels[best],
            "score": own[best],
            "probs": own,
        }
