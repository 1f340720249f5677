"""An actor of Ray Data that embeds pieces with an engine of its own, and writes them where they belong."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.engine import EngineConfig, PoolingParams
from penstock.engine.llm import LLM
from penstock.engine.logs import configure_logging
from penstock.engine.protocol.errors import InvalidRequestError

from .manifest import Output
from .pieces import COLUMN, Piece, read_piece


class Recipe(NamedTuple):
    """What becomes of every row.

    Attributes:
        config: The engine.
        field: The column that holds the text.
        params: How it is embedded.
        prompt_name: Named prompt of the model that is put before it.
        folder: The output.
        log_level: Of engine and actor.
        log_format: Of the actor.
    """

    config: EngineConfig
    field: str
    params: PoolingParams
    prompt_name: str | None
    folder: str
    log_level: str
    log_format: str


class Embedder:
    """Embeds pieces, two at once so that the engine never waits for a disk. Created by Ray in a process of its own.

    Args:
        recipe: What becomes of every row.
        pieces: All pieces that are left; calls name them by their index here.
    """

    def __init__(self, recipe: Recipe, pieces: Sequence[Piece]) -> None:
        configure_logging(recipe.log_level, recipe.log_format)
        self._recipe, self._pieces = recipe, pieces
        self._output = Output(Path(recipe.folder))
        fields = dataclasses.fields(EngineConfig)
        config = {field.name: getattr(recipe.config, field.name) for field in fields}
        self._llm = LLM(**config, log_level=recipe.log_level.upper())

    def __call__(self, batch: dict[str, NDArray[Any]]) -> dict[str, list[Any]]:
        """Embeds the pieces of a batch.

        Args:
            batch: `item`: their indices.

        Returns:
            `num_rows` of each, and `error`: why it could not be done, or "".
        """
        pieces = [self._pieces[index] for index in batch["item"].tolist()]
        return {"num_rows": [piece.num_rows for piece in pieces], "error": [self._do(piece) for piece in pieces]}

    def _do(self, piece: Piece) -> str:
        if self._output.has(piece):  # of a machine that was lost after it had written it
            return ""
        table = read_piece(piece)
        texts = table.column(self._recipe.field).to_pylist()
        if (bad := next((row for row, text in enumerate(texts) if not isinstance(text, str)), None)) is not None:
            return self._bad_row(piece, bad, f"the column {self._recipe.field!r} holds no text")
        try:
            vectors = self._embed(texts)
        except InvalidRequestError:
            return self._first_refusal(piece, texts)
        self._output.write(piece, with_vectors(table, vectors))
        return ""

    def _first_refusal(self, piece: Piece, texts: Sequence[str]) -> str:
        """Returns what is said of the first row that the engine refuses."""
        for row, text in enumerate(texts):
            try:
                self._embed([text])
            except InvalidRequestError as error:
                return self._bad_row(piece, row, error.message)
        return f"{piece.path}: the engine refuses rows {piece.start + 1} to {piece.start + piece.num_rows} together"

    def _embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        recipe = self._recipe
        answers = self._llm.embed(texts, pooling_params=recipe.params, prompt_name=recipe.prompt_name, use_tqdm=False)
        return np.stack([np.asarray(answer.outputs.embedding, np.float32) for answer in answers])

    def _bad_row(self, piece: Piece, row: int, reason: str) -> str:
        return f"{piece.path}, row {piece.start + row + 1}: {reason}"


def with_vectors(table: Any, vectors: NDArray[np.float32]) -> Any:
    """Returns a pyarrow.Table with one more column, `embedding`: a FixedSizeList of float32 that all readers know."""
    import pyarrow as pa

    width = vectors.shape[1]
    values = pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(vectors).ravel()), width)
    return table.append_column(pa.field(COLUMN, pa.list_(pa.float32(), width)), values)
