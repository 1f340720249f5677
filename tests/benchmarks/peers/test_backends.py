"""What the two runtimes of graphs share: order, tokens, pooling."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from peers.inside.backends import BATCH_SIZE, _Graph
from peers.model import embedded_model


class Ids(_Graph):
    """A graph whose rows are one-hot in the token's id, modulo 16."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.widths: list[tuple[int, int]] = []

    def _hidden(self, inputs: dict[str, NDArray[np.int64]]) -> NDArray[np.float32]:
        ids = inputs["input_ids"]
        self.widths.append((ids.shape[1], int(inputs["attention_mask"].sum(1).min())))
        return np.eye(16, dtype=np.float32)[ids % 16]


@pytest.mark.parametrize("streams", [1, 2])
def test_answers_come_in_the_order_of_the_texts(streams: int) -> None:
    graph = Ids({"model": str(embedded_model()), "max_tokens": 256, "streams": streams})
    texts = ["word " * (number % 50) + "end" for number in range(3 * BATCH_SIZE)]
    together = graph.embed(texts)
    alone = np.concatenate([graph.embed([text]) for text in texts])
    np.testing.assert_allclose(together, alone, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)


def test_batches_are_of_like_length_and_cut_to_the_limit() -> None:
    graph = Ids({"model": str(embedded_model()), "max_tokens": 20, "streams": 1})
    graph.embed([text for _ in range(BATCH_SIZE) for text in ("short", "long " * 90)])
    assert graph.widths == [(20, 20), (3, 3)]
