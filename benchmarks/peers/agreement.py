"""Whether sides give the same answers: cosines with a float32 run of sentence-transformers, text by text."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from loads import Load
from numpy.typing import NDArray

from .model import Model
from .sides import Side, SideError, WorkerSide

TEXTS_PER_LOAD = 8
MOST_LIKENESS = 0.98
"""Largest mean cosine between different texts. A wrong result must not look like the expected one."""


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
        texts.extend(request[0] for request in load.requests(count=TEXTS_PER_LOAD, seed=-2))
    options = {"backend": "SentenceTransformers", "model": str(model.folder), "dtype": "float32"}
    options |= {"threads": len(os.sched_getaffinity(0))}
    side = WorkerSide("reference", Path(sys.executable), options, logs / "reference.log")
    try:
        side.start()
        vectors = side.embed(texts)
    finally:
        side.stop()
    likeness = float((vectors @ vectors.T)[np.triu_indices(len(vectors), 1)].mean())
    if likeness > MOST_LIKENESS:
        raise SideError(f"texts have a mean cosine of {likeness:.4f}, which hides wrong results")
    return Reference(texts, vectors)
