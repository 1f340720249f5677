"""Whether sides give the same answers: cosines with a float32 run of sentence-transformers, text by text."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from loads import Load
from numpy.typing import NDArray

from .model import Model
from .sides import Side, SideError, WorkerSide

LEAST_COSINE = 0.999
"""From which on answers count as equal: bfloat16 stays above it, int8 weights do not."""
TEXTS_PER_LOAD = 16


@dataclass(frozen=True, slots=True)
class Reference:
    """Texts of every load and their expected vectors.

    Attributes:
        texts: N texts.
        vectors: [N, D], float32.
    """

    texts: list[str]
    vectors: NDArray[np.float32]

    def least_cosine(self, side: Side) -> float:
        """Returns the least cosine between a side's answers and the reference.

        Raises:
            SideError: It failed, or its answers have another shape.
        """
        return least_cosine(side.embed(self.texts), self.vectors)


def least_cosine(left: NDArray[np.float32], right: NDArray[np.float32]) -> float:
    """Returns the least cosine between the rows of two arrays [N, D]; NaN counts as -1.

    Raises:
        SideError: The shapes differ.
    """
    if left.shape != right.shape:
        raise SideError(f"answers of shape {left.shape}, expected {right.shape}")
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = np.einsum("nd,nd->n", left, right) / norms
    return float(np.nan_to_num(cosines, nan=-1.0).min())


def make_reference(model: Model, loads: list[Load], logs: Path) -> Reference:
    """Embeds texts of `loads` with the sentence-transformers of this environment, in float32.

    Raises:
        SideError: It failed.
    """
    texts = []
    for load in loads:
        drawn = [text for request in load.requests(count=TEXTS_PER_LOAD, seed=-2) for text in request]
        texts.extend(drawn[:: load.texts_per_request])
    options = {"backend": "SentenceTransformers", "model": str(model.folder), "dtype": "float32", "threads": 1}
    side = WorkerSide("reference", Path(sys.executable), options, logs / "reference.log")
    try:
        side.start()
        return Reference(texts, side.embed(texts))
    finally:
        side.stop()
