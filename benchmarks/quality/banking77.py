"""Classification quality: accuracy on Banking77 from a few examples a class, on frozen vectors.

Eight examples of each of the 77 classes are drawn ten times, as MTEB does. Its classifier is a logistic regression;
here a text gets the class with the nearest mean of examples (cosine), without a solver. Only the draws use a seed. The
accuracy is the mean over the draws, on all 3,080 test texts.

The data folder holds train.csv and test.csv, with the columns text and category.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scifact import Embed

DRAWS = 10
EXAMPLES = 8
SEED = 42


@dataclass(frozen=True, slots=True)
class Banking77:
    """A classification task.

    Attributes:
        examples: Texts that are drawn at least once.
        classes: Of each.
        draws: Places in `examples`.
        tests: Texts to be classified.
        answers: The class of each.
    """

    examples: list[str]
    classes: NDArray[np.int64]
    draws: list[NDArray[np.int64]]
    tests: list[str]
    answers: NDArray[np.int64]

    @classmethod
    def read(cls, folder: Path) -> Banking77:
        """Reads the task and draws the examples."""
        train, test = (_read_csv(folder / name) for name in ("train.csv", "test.csv"))
        numbers = {name: number for number, name in enumerate(sorted({name for _, name in train}))}
        all_draws = list(draw([name for _, name in train]))
        used = np.unique(np.concatenate(all_draws))
        return cls(
            [train[place][0] for place in used],
            np.array([numbers[train[place][1]] for place in used]),
            [np.searchsorted(used, places) for places in all_draws],
            [text for text, _ in test],
            np.array([numbers[name] for _, name in test]),
        )

    def accuracy(self, embed: Embed) -> float:
        """Returns the mean accuracy over the draws, of the vectors that `embed` gives, in float64."""
        examples, tests = (embed(texts).astype(np.float64) for texts in (self.examples, self.tests))
        return math.fsum(self._share(examples, tests, places) for places in self.draws) / len(self.draws)

    def _share(self, examples: NDArray[Any], tests: NDArray[Any], places: NDArray[np.int64]) -> float:
        """The share of tests that one draw's means find the class of."""
        classes = self.classes[places]
        means = np.stack([examples[places[classes == number]].mean(0) for number in range(classes.max() + 1)])
        means /= np.linalg.norm(means, axis=1, keepdims=True)
        return float(((tests @ means.T).argmax(1) == self.answers).mean())


def draw(classes: list[str]) -> Iterator[NDArray[np.int64]]:
    """Yields DRAWS times the places of EXAMPLES texts of each class."""
    random, places = np.random.default_rng(SEED), np.arange(len(classes))
    for _ in range(DRAWS):
        random.shuffle(places)
        seen: Counter[str] = Counter()
        kept = []
        for place in places:
            seen[classes[place]] += 1
            if seen[classes[place]] <= EXAMPLES:
                kept.append(place)
        yield np.array(kept)


def _read_csv(path: Path) -> list[tuple[str, str]]:
    with path.open(encoding="utf-8", newline="") as lines:
        return [(row["text"], row["category"]) for row in csv.DictReader(lines)]
