"""The pooler of one served model: every task that it has, for batches that mix tasks, parameters and chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from penstock.kernels.upload import upload

from ..executors.torch.base import ModelOutput, PackedModel
from ..protocol.batch_outputs import OutputGroup, by_group, distinct_params
from ..protocol.model_info import ModelInfo
from ..protocol.params import PoolingParams
from ..protocol.tasks import PoolingType
from .chunks import BatchChunks
from .heads import Cut, RowMap
from .metadata import PoolingMetadata
from .model_heads import NO_TOKEN_MAPS, ModelHeads, TokenMaps
from .output import OutputBlock, PoolerOutput
from .packing import rows_between
from .poolers import AttentionWeightedPooler, PoolerFactory


class ModelPooler:
    """Pools what the model gives and runs the heads. Stateless: chunks keep their state in PoolingMetadata.

    Args:
        info: The resolved model.
        model: Gives the class logits of classifiers.
        dense: The Dense modules of an embedding model, in order, float32.
        maps: Heads for single tokens, and the tokens that they leave out.

    Raises:
        ValueError: ATTENTION pooling with a head that the model does not have.
    """

    def __init__(
        self, info: ModelInfo, model: PackedModel, dense: Sequence[RowMap] = (), maps: TokenMaps = NO_TOKEN_MAPS
    ) -> None:
        self._hidden_size = info.hidden_size
        self._sequence_types = info.sequence_pooling
        self._token_type = info.token_pooling
        self._poolers = [
            PoolerFactory.create_sequence(
                pooling_type, attention_head=info.attention_head, num_heads=info.num_attention_heads
            )
            for pooling_type in info.sequence_pooling
        ]
        self._attention = next((p for p in self._poolers if isinstance(p, AttentionWeightedPooler)), None)
        # Without a projection, cut and normalisation are part of the pooling kernel.
        self._fused = self._poolers[0] if len(self._poolers) == 1 and not dense else None
        self._heads = ModelHeads(info, model, dense, maps)
        self._machine = model.machine

    def needs_attention(self, params: Sequence[PoolingParams]) -> bool:
        """Whether a batch with these resolved parameters needs the model's attention weights."""
        if self._attention is None:
            return False
        return any(not group.is_token_level for p in distinct_params(params) for group in OutputGroup.all_of(p))

    def pool(self, output: ModelOutput, metadata: PoolingMetadata) -> PoolerOutput:
        """Answers every sequence of a batch.

        A sequence of which more chunks are to come gets, from a token-level task, the rows of this chunk: all chunks
        together, in order, are the answer. From a sequence-level task it gets nothing yet.

        Args:
            output: Of the batch's forward. Not modified.
            metadata: Of the batch. Its cursors move on; its states become those of the sequences that are incomplete
                after it, so that the caller keeps `metadata.states[i]` where there is one and forgets the others.
        """
        groups = by_group(metadata.params)
        if metadata.chunks is None:
            blocks = [self._pool_whole(group, output, metadata, indices) for group, indices in groups.items()]
        else:
            blocks = self._pool_chunks(groups, output, metadata, metadata.chunks)
        return PoolerOutput(metadata.num_seqs, blocks)

    def _pool_whole(
        self, group: OutputGroup, output: ModelOutput, metadata: PoolingMetadata, indices: Sequence[int] | None
    ) -> OutputBlock:
        """Answers the sequences `indices` (None: all) of a batch of whole sequences."""
        hidden_states = output.hidden_states
        if group.is_token_level:
            if indices is not None:
                rows, metadata = metadata.select(indices)
                hidden_states = hidden_states[rows]
            return self._heads.from_tokens(group, hidden_states, metadata, indices)
        if group.name == "embedding" and self._fused is not None:
            # In a mixed batch the other sequences are pooled along: one pass is cheaper than picking rows apart.
            cut = Cut.of(metadata.params, hidden_states.shape[1], hidden_states.device)
            values = self._fused.pool(hidden_states, metadata, output.attention_weights, cut=cut, machine=self._machine)
            widths = cut.widths if indices is None or cut.widths is None else tuple(cut.widths[i] for i in indices)
            return OutputBlock(name=group.name, values=_pick(values, indices), indices=indices, widths=widths)
        params = metadata.params if indices is None else [metadata.params[i] for i in indices]
        if group.name == "scores" and output.logits is not None:
            return self._heads.from_logits(group, _pick(output.logits, indices), params, indices)
        pooled = [
            pooler.pool(hidden_states, metadata, output.attention_weights, machine=self._machine)
            for pooler in self._poolers
        ]
        joined = pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)
        return self._heads.from_rows(group, _pick(joined, indices), params, indices)

    def _pool_chunks(
        self,
        groups: Mapping[OutputGroup, list[int] | None],
        output: ModelOutput,
        metadata: PoolingMetadata,
        chunks: BatchChunks,
    ) -> list[OutputBlock]:
        """Answers the sequences of a batch of which some are chunks.

        Sequences whose answer lies in this batch alone are pooled together, as whole ones.

        Raises:
            ValueError: The model pools by itself, so that it cannot run on chunks.
        """
        if output.logits is not None:
            raise ValueError("a model that pools by itself cannot run on chunks of a sequence")
        is_stateless = chunks.needs_no_state(is_last_only=self._sequence_types == (PoolingType.LAST,)).tolist()
        kept = dict.fromkeys(chunks.stateful(), self._sequence_types)
        whole = whole_output = None
        blocks = []
        for group, members in groups.items():
            indices = range(metadata.num_seqs) if members is None else members
            if group.is_token_level:
                rows, part = metadata.select(indices, new_only=True)
                blocks.append(self._heads.from_tokens(group, output.hidden_states[rows], part, members))
                kept.update((i, (self._token_type,)) for i in kept.keys() & set(indices))
                continue
            stateless = [i for i in indices if is_stateless[i]]
            if stateless:
                if whole is None or whole_output is None:
                    whole = metadata.as_whole()
                    whole_output = output if self._attention is None else _as_whole(output, chunks)
                blocks.append(self._pool_without_state(group, whole_output, whole, stateless))
                answered = kept.keys() & set(stateless)
                chunks.drop(answered)
                for index in answered:
                    del kept[index]
        if kept:
            metadata.initialize_states(self._hidden_size, kept)
            blocks.extend(self._pool_with_state(groups, output, metadata, chunks))
        return blocks

    def _pool_without_state(
        self, group: OutputGroup, output: ModelOutput, metadata: PoolingMetadata, indices: Sequence[int]
    ) -> OutputBlock:
        """Answers some sequences of a sequence-level group as whole ones."""
        if len(indices) == metadata.num_seqs:
            return self._pool_whole(group, output, metadata, None)
        if indices[-1] - indices[0] >= len(indices):
            return self._pool_whole(group, output, metadata, indices)
        # They lie together, as a rule: whole sequences come first. Then the rows of long chunks need not be read.
        rows, part = metadata.select(indices)
        weights = output.attention_weights
        weights = None if weights is None or self._attention is None else weights[rows]
        view = ModelOutput(hidden_states=output.hidden_states[rows], attention_weights=weights)
        return replace(self._pool_whole(group, view, part, None), indices=indices)

    def _pool_with_state(
        self,
        groups: Mapping[OutputGroup, list[int] | None],
        output: ModelOutput,
        metadata: PoolingMetadata,
        chunks: BatchChunks,
    ) -> list[OutputBlock]:
        """Adds chunks to the states of their sequences and answers those that complete one."""
        weights = None
        if output.attention_weights is not None and self._attention is not None:
            weights = self._attention.row_weights(output.attention_weights)
        metadata.update_all(output.hidden_states, weights)
        results = metadata.finalize_all()
        chunks.drop([i for i, cursor in chunks.cursors.items() if cursor.is_complete])
        blocks = []
        for group, members in groups.items():
            done = [i for i in results if members is None or i in members]
            if done:
                rows, params = torch.stack([results[i] for i in done]), [metadata.params[i] for i in done]
                blocks.append(self._heads.from_rows(group, rows, params, done))
        return blocks


def _as_whole(output: ModelOutput, chunks: BatchChunks) -> ModelOutput:
    """The output with attention weights [T, H] for the rows of the chunks alone."""
    weights = output.attention_weights
    if weights is None:
        return output
    bounds = chunks.weight_bounds(weights.shape[0])
    rows = rows_between(bounds[:-1] + chunks.chunk_starts, bounds[1:], weights.device)
    return replace(output, attention_weights=weights[rows])


def _pick(rows: Tensor, indices: Sequence[int] | None) -> Tensor:
    """The rows of some sequences [N', W]; all of them where `indices` is None."""
    return rows if indices is None else rows[upload(torch.tensor(indices), rows.device)]
