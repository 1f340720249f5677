"""Chunks of sequences without a model: hidden states, metadata and results of each batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.executors.torch.packed_batch import ModelOutput
from penstock.engine.pooling import ChunkedPoolingManager, ModelPooler, PoolingMetadata
from penstock.engine.protocol.model_info import ModelInfo
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingTask

from .conftest import HIDDEN_SIZE, LENGTHS, NUM_HEADS, assert_same, make_metadata, resolved

NUM_SEQS = len(LENGTHS)
ROW_BOUNDS = [0, *np.cumsum(LENGTHS).tolist()]


class Chunk(NamedTuple):
    """Tokens start to end of a sequence."""

    sequence: int
    start: int
    end: int


@dataclass
class Sequences:
    """Sequences of LENGTHS tokens, their hidden states, and the results of their chunks so far."""

    pooler: ModelPooler[Tensor]
    params: Sequence[PoolingParams]
    skip_tokens: Tensor | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    parts: dict[int, list[dict[str, NDArray[np.float32]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        info = self.pooler._info
        strategy = info.sequence_pooling or info.token_pooling
        self.manager = ChunkedPoolingManager(HIDDEN_SIZE, strategy=strategy, device=self.device)
        generator = torch.Generator().manual_seed(3)
        total = sum(LENGTHS)
        self.hidden = torch.randn(total, HIDDEN_SIZE, generator=generator).to(self.dtype)
        self.token_ids = torch.randint(0, 3, (total,), generator=generator)
        logits = torch.randn(total, NUM_HEADS, generator=generator)
        self.attention = torch.cat([part.softmax(0) for part in logits.split(LENGTHS)])
        self.hidden, self.token_ids, self.attention = (
            tensor.to(self.device) for tensor in (self.hidden, self.token_ids, self.attention)
        )

    def whole(self) -> list[dict[str, NDArray[np.float32]]]:
        """Returns the arrays of each sequence from one batch of whole sequences."""
        metadata = make_metadata(
            LENGTHS, self.params, token_ids=self.token_ids, skip_tokens=self.skip_tokens, device=self.device
        )
        output = ModelOutput(hidden_states=self.hidden, attention_weights=self.attention)
        return [dict(arrays) for arrays in self.pooler.pool(output, metadata).to_numpy()]

    def output(self, batch: Sequence[Chunk]) -> ModelOutput:
        """Returns the model output for chunks. Attention weights are NaN unless the chunk ends its sequence."""
        rows = torch.cat(
            [
                self.hidden[ROW_BOUNDS[chunk.sequence] + chunk.start : ROW_BOUNDS[chunk.sequence] + chunk.end]
                for chunk in batch
            ]
        )
        weights = torch.cat(
            [
                self.attention[ROW_BOUNDS[chunk.sequence] : ROW_BOUNDS[chunk.sequence] + chunk.end]
                if chunk.end == LENGTHS[chunk.sequence]
                else torch.full((chunk.end, NUM_HEADS), float("nan"), device=self.device)
                for chunk in batch
            ]
        )
        return ModelOutput(hidden_states=rows, attention_weights=weights)

    def metadata(self, batch: Sequence[Chunk]) -> PoolingMetadata:
        indices = [chunk.sequence for chunk in batch]
        return make_metadata(
            [LENGTHS[i] for i in indices],
            [self.params[i] for i in indices],
            chunk_sizes=[chunk.end - chunk.start for chunk in batch],
            chunk_starts=[chunk.start for chunk in batch],
            seq_ids=indices,
            token_ids=torch.cat(
                [
                    self.token_ids[ROW_BOUNDS[chunk.sequence] + chunk.start :][: chunk.end - chunk.start]
                    for chunk in batch
                ]
            ),
            skip_tokens=None if self.skip_tokens is None else self.skip_tokens[indices],
            device=self.device,
        )

    def step(self, batch: Sequence[Chunk]) -> list[Any]:
        """Pools and commits a batch as a runner does; returns the arrays of each chunk."""
        metadata = self.manager.with_cursors(self.metadata(batch))
        output = self.pooler.pool(self.output(batch), metadata, self.manager)
        arrays = output.to_numpy()
        self.manager.commit(metadata, output.states)
        incomplete = metadata.get_incomplete_indices()
        for index, chunk in enumerate(batch):
            assert (index in incomplete) is (chunk.end < LENGTHS[chunk.sequence])
            assert (chunk.sequence in self.manager._running) is (index in incomplete)
            if index in incomplete:
                assert self.manager._running[chunk.sequence].cursor.num_pooled >= chunk.end
            self.parts.setdefault(chunk.sequence, []).append(dict(arrays[index]))
        return arrays

    def results(self) -> list[dict[str, NDArray[np.float32]]]:
        """Joins the arrays of all chunks as a client does."""
        assert self.manager.get_pending_count() == 0
        joined = []
        for seq in range(NUM_SEQS):
            names = {name for part in self.parts[seq] for name in part}
            arrays = {n: [part[n] for part in self.parts[seq] if n in part] for n in names}
            joined.append({n: np.concatenate(a) if n.startswith("token_") else a[0] for n, a in arrays.items()})
            assert all(len(a) == 1 or n.startswith("token_") for n, a in arrays.items())
        return joined


def in_chunks(chunk_size: int) -> list[list[Chunk]]:
    """Batches of the next `chunk_size` tokens of every sequence, whole ones first as the scheduler orders them."""
    batches = []
    for start in range(0, max(LENGTHS), chunk_size):
        ends = {i: min(start + chunk_size, length) for i, length in enumerate(LENGTHS) if length > start}
        batches.append(
            sorted(
                (Chunk(i, start, end) for i, end in ends.items()), key=lambda chunk: chunk.end < LENGTHS[chunk.sequence]
            )
        )
    return batches


def run(sequences: Sequences, batches: Sequence[Sequence[Chunk]], atol: float = 1e-5) -> None:
    """Runs the batches and compares the results with those of whole sequences."""
    for batch in batches:
        sequences.step(batch)
    assert_same(sequences.results(), sequences.whole(), atol)


def mixed_params(info: ModelInfo) -> list[PoolingParams]:
    """Embeddings and token embeddings of several widths, normalised and not."""
    tasks = [PoolingTask.EMBED, PoolingTask.EMBED, PoolingTask.TOKEN_EMBED] * 2
    options = zip(tasks, [None, 5, 3, None, 2, None], [True, False, True, True, True, False], strict=True)
    return [resolved(info, task, dimensions=d, normalize=n) for task, d, n in options]
