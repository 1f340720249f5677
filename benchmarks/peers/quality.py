"""Scores of a side on data with judgements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from penstock.server.quality.tasks import ClassificationTask, RetrievalTask

from .sides import Side


@dataclass(frozen=True, slots=True)
class QualityTasks:
    """The tasks that are measured on a model with trained weights."""

    scifact: RetrievalTask
    banking77: ClassificationTask

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads the folders `scifact` and `banking77` in `folder`.

        Raises:
            UsageError: A file is missing or has an invalid line.
        """
        return cls(RetrievalTask.read(folder / "scifact"), ClassificationTask.read(folder / "banking77"))

    def scores(self, side: Side) -> dict[str, float]:
        """Returns nDCG@10 of SciFact (`ndcg_at_10`) and the accuracy on Banking77 (`accuracy`).

        Raises:
            SideError: The side failed.
        """

        def embed(texts: Sequence[str], _input_type: str) -> NDArray[np.float32]:
            return side.embed(list(texts))

        found = self.scifact.scores(self.scifact.search(embed)) | self.banking77.scores(embed)
        return {name: round(found[name], 5) for name in ("ndcg_at_10", "accuracy")}
