"""The pooler of one served model: every task that it has, for batches that mix tasks and parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..model_info import ModelInfo
from ..models.base import ModelOutput, PackedModel
from ..params import PoolingParams, PoolingTask, PoolingType
from .cut import Cut, distinct
from .factory import PoolerFactory
from .heads import ClassifierPoolerHead, EmbeddingPoolerHead, RowMap
from .metadata import PoolingMetadata
from .output import OutputBlock, PoolerOutput
from .poolers import AttentionWeightedPooler

_OUTPUT_NAMES: Final = {
    PoolingTask.EMBED: "embedding",
    PoolingTask.CLASSIFY: "scores",
    PoolingTask.SCORE: "scores",
    PoolingTask.TOKEN_EMBED: "token_embeddings",
    PoolingTask.TOKEN_CLASSIFY: "token_scores",
}


class _Group(NamedTuple):
    """What the sequences of one block have in common: the result, and the class columns that are kept."""

    name: str
    columns: tuple[int, ...] | None

    @property
    def is_token_level(self) -> bool:
        """True where the result holds a row per token."""
        return self.name in ("token_embeddings", "token_scores")


class ModelPooler:
    """Pools what the model gives and runs the heads. Stateless: slices keep their state in PoolingMetadata.

    Args:
        info: The resolved model.
        model: Gives the class logits of classifiers.
        dense: The Dense modules of an embedding model, in order, float32.

    Raises:
        ValueError: ATTENTION pooling with a head that the model does not have.
    """

    def __init__(self, info: ModelInfo, model: PackedModel, dense: Sequence[RowMap] = ()) -> None:
        self._hidden_size = info.hidden_size
        self._sequence_types = info.sequence_pooling
        self._poolers = [
            PoolerFactory.create_sequence(
                pooling_type, attention_head=info.attention_head, num_heads=info.num_attention_heads
            )
            for pooling_type in info.sequence_pooling
        ]
        # Without a projection, cut and normalisation are part of the pooling kernel.
        self._fused = self._poolers[0] if len(self._poolers) == 1 and not dense else None
        self._token_type = info.token_pooling
        self._token_pooler = PoolerFactory.create_token(info.token_pooling)
        self._embedding_head = EmbeddingPoolerHead(dense)
        # A Dense that takes concatenated rows cannot take a token's.
        fits_tokens = bool(dense) and info.dense[0].in_features == info.hidden_size
        self._token_embedding_head = EmbeddingPoolerHead(dense if fits_tokens else ())
        self._classifier_head = ClassifierPoolerHead(info, model.classify)
        self._token_classifier_head = ClassifierPoolerHead(info, model.classify_tokens)

    def needs_attention(self, params: Sequence[PoolingParams]) -> bool:
        """Whether a batch with these resolved parameters needs the model's attention weights."""
        if PoolingType.ATTENTION not in self._sequence_types:
            return False
        return any(not _group_of(p).is_token_level for p in distinct(params))

    def pool(self, output: ModelOutput, metadata: PoolingMetadata) -> PoolerOutput:
        """Answers every sequence of a batch; a sequence of which more slices are to come gets no result yet.

        Args:
            output: Of the batch's forward. Not modified.
            metadata: Of the batch. Its states and cursors, where it has some, move on.
        """
        if metadata.is_partial:
            return self._pool_slices(output, metadata)
        groups = {_group_of(p) for p in distinct(metadata.params)}
        if len(groups) == 1:
            blocks = [self._pool_group(groups.pop(), output, metadata, None)]
        else:
            by_group = _by_group(metadata, range(metadata.num_seqs))
            blocks = [self._pool_group(group, output, metadata, indices) for group, indices in by_group.items()]
        return PoolerOutput(metadata.num_seqs, blocks)

    def _pool_group(
        self, group: _Group, output: ModelOutput, metadata: PoolingMetadata, indices: Sequence[int] | None
    ) -> OutputBlock:
        """Answers the sequences `indices` (None: all) of a batch of whole sequences."""
        hidden_states = output.hidden_states
        if group.is_token_level:
            rows, part = (None, metadata) if indices is None else metadata.select(indices)
            return self._token_block(group, hidden_states if rows is None else hidden_states[rows], part, indices)
        if group.name == "embedding" and self._fused is not None:
            # In a mixed batch the other sequences are pooled along: one pass is cheaper than picking rows apart.
            cut = Cut.of(metadata.params, hidden_states.shape[1], hidden_states.device)
            values = self._fused.pool(hidden_states, metadata, output.attention_weights, cut=cut)
            widths = cut.widths if indices is None or cut.widths is None else tuple(cut.widths[i] for i in indices)
            return OutputBlock(name=group.name, values=_pick(values, indices), indices=indices, widths=widths)
        params = metadata.params if indices is None else [metadata.params[i] for i in indices]
        if group.name == "scores" and output.logits is not None:
            values = self._classifier_head.activate(_pick(output.logits, indices), params)
            return OutputBlock(name=group.name, values=values, indices=indices)
        pooled = [pooler.pool(hidden_states, metadata, output.attention_weights) for pooler in self._poolers]
        return self._sequence_block(group, _pick(_joined(pooled), indices), params, indices)

    def _pool_slices(self, output: ModelOutput, metadata: PoolingMetadata) -> PoolerOutput:
        """Folds slices into their states and answers the sequences that are complete now.

        Raises:
            ValueError: The model pools by itself, so that it cannot run on slices.
        """
        if output.logits is not None:
            raise ValueError("a model that pools by itself cannot run on slices of a sequence")
        token_level = [_group_of(p).is_token_level for p in metadata.params]
        kept = [(self._token_type,) if is_token else self._sequence_types for is_token in token_level]
        metadata.initialize_states(self._hidden_size, kept)
        weights = None
        if self.needs_attention(metadata.params):
            pooler = next(p for p in self._poolers if isinstance(p, AttentionWeightedPooler))
            weights = pooler.row_weights(output.attention_weights)
        metadata.update_all(output.hidden_states, weights)

        results = metadata.finalize_all()
        blocks = []
        for group, indices in _by_group(metadata, results).items():
            rows = [results[i] for i in indices]
            if group.is_token_level:
                blocks.append(self._token_block(group, torch.cat(rows), metadata.completed(indices), indices))
            else:
                params = [metadata.params[i] for i in indices]
                blocks.append(self._sequence_block(group, torch.stack(rows), params, indices))
        return PoolerOutput(metadata.num_seqs, blocks)

    def _sequence_block(
        self, group: _Group, rows: Tensor, params: Sequence[PoolingParams], indices: Sequence[int] | None
    ) -> OutputBlock:
        """Runs the head of a sequence-level task on pooled rows [N, W]."""
        if group.name == "scores":
            return OutputBlock(name=group.name, values=self._classifier_head(rows, params), indices=indices)
        values, widths = self._embedding_head(rows, params)
        return OutputBlock(name=group.name, values=values, indices=indices, widths=widths)

    def _token_block(
        self, group: _Group, hidden_states: Tensor, metadata: PoolingMetadata, indices: Sequence[int] | None
    ) -> OutputBlock:
        """Runs the head of a token-level task on all rows [T, D] of the sequences that `metadata` describes."""
        if group.name == "token_embeddings":
            values, widths = self._token_embedding_head(hidden_states, metadata.params, metadata.seq_lens)
            return OutputBlock(
                name=group.name, values=values, indices=indices, row_lens=metadata.seq_lens, widths=widths
            )
        rows, row_lens = self._token_pooler.select(metadata)
        kept = hidden_states if rows is None else hidden_states[rows]
        values = self._token_classifier_head(kept, metadata.params, row_lens, group.columns)
        return OutputBlock(name=group.name, values=values, indices=indices, row_lens=row_lens)


def _group_of(params: PoolingParams) -> _Group:
    """Where a sequence with these parameters belongs; they must be resolved."""
    assert params.task is not None, "PoolingParams.resolved sets the task"
    columns = params.returned_token_ids if params.task is PoolingTask.TOKEN_CLASSIFY else None
    return _Group(_OUTPUT_NAMES[params.task], columns)


def _by_group(metadata: PoolingMetadata, indices: Iterable[int]) -> dict[_Group, list[int]]:
    """Some sequences of a batch, by group."""
    groups: dict[_Group, list[int]] = defaultdict(list)
    for index in indices:
        groups[_group_of(metadata.params[index])].append(index)
    return groups


def _joined(pooled: Sequence[Tensor]) -> Tensor:
    """Pooled rows [N, D] of several types side by side."""
    return pooled[0] if len(pooled) == 1 else torch.cat(list(pooled), dim=1)


def _pick(rows: Tensor, indices: Sequence[int] | None) -> Tensor:
    """The rows of some sequences [N', W]; all of them where `indices` is None."""
    return rows if indices is None else rows[torch.tensor(indices, device=rows.device)]
