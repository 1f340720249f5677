"""The pooler of a model that runs as arrays: every task that it has, for batches that mix tasks and parameters.

The same answers as pooling/model_pooler.py gives; of whole sequences alone, as encoders have no chunks.

Shape letters: T packed tokens of N sequences, M of them, R rows of tokens, D model width, H heads, W columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from penstock.kernels.cpu import Pooling

from ...checkpoint.views import Floats
from ...protocol.batch_outputs import ArrayBlock, BatchOutputs, OutputGroup, by_group, distinct_params
from ...protocol.model_info import ModelInfo
from ...protocol.params import PoolingParams
from ...protocol.tasks import PoolingType
from .answers import Integers, RowCut, class_scores
from .array_encoder import ArrayEncoder, ArrayOutput
from .heads import ArrayHead
from .packed_arrays import PackedArrays

_POOLINGS: Final = {
    PoolingType.CLS: Pooling.CLS,
    PoolingType.LAST: Pooling.LAST,
    PoolingType.MEAN: Pooling.MEAN,
    PoolingType.MAX: Pooling.MAX,
    PoolingType.MEAN_SQRT_LEN: Pooling.MEAN_SQRT_LEN,
    PoolingType.WEIGHTED_MEAN: Pooling.WEIGHTED_MEAN,
    PoolingType.ATTENTION: Pooling.WEIGHTED,
}
_WHOLE_ROWS: Final = PoolingParams(normalize=False)


class _Answer(NamedTuple):
    """Rows, of which a block is made; see ArrayBlock."""

    values: Floats
    row_lens: Sequence[int] | None = None
    widths: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Members:
    """The sequences of a batch that are answered together, [M]."""

    params: Sequence[PoolingParams]
    starts: Integers
    lengths: Integers
    skips: Integers | None

    @classmethod
    def of(cls, batch: PackedArrays, params: Sequence[PoolingParams], indices: Sequence[int] | None) -> _Members:
        """Returns those with these indices; None stands for all."""
        if indices is None:
            return cls(params=params, starts=batch.starts, lengths=batch.lengths, skips=batch.skip_tokens)
        picked = np.array(indices)
        return cls(
            params=[params[i] for i in indices],
            starts=batch.starts[picked],
            lengths=batch.lengths[picked],
            skips=None if batch.skip_tokens is None else batch.skip_tokens[picked],
        )

    def rows(self) -> Integers:
        """Returns their rows in the batch, end to end, [R]."""
        ends = np.cumsum(self.lengths)
        shifts = np.repeat(self.starts - (ends - self.lengths), self.lengths)
        rows_R: Integers = (np.arange(len(shifts)) + shifts).astype(np.int32)
        return rows_R


class ArrayPooler:
    """Pools what the encoder gives and runs the heads. Stateless.

    Args:
        info: The resolved model.
        encoder: Gives the class logits of classifiers.
        dense: The Dense modules of an embedding model, in order.
    """

    def __init__(self, info: ModelInfo, encoder: ArrayEncoder, dense: Sequence[ArrayHead]) -> None:
        self._has_attention = PoolingType.ATTENTION in info.sequence_pooling
        self._info = info
        self._machine = encoder.machine
        self._encoder = encoder
        self._dense = tuple(dense)
        # A Dense that takes concatenated rows cannot take a token's.
        fits_tokens = bool(dense) and info.dense[0].in_features == info.hidden_size
        self._token_dense = self._dense if fits_tokens else ()

    def needs_attention(self, params: Sequence[PoolingParams]) -> bool:
        """Whether a batch with these resolved parameters needs the model's attention weights."""
        if not self._has_attention:
            return False
        return any(not group.is_token_level for p in distinct_params(params) for group in OutputGroup.all_of(p))

    def pool(self, output: ArrayOutput, batch: PackedArrays, params: Sequence[PoolingParams]) -> BatchOutputs:
        """Answers every sequence of a batch.

        Args:
            output: Of the batch's forward. Not modified.
            batch: Whole sequences.
            params: N resolved parameters.
        """
        blocks = []
        hidden_TD = output.hidden_states
        for group, indices in by_group(params).items():
            members = _Members.of(batch, params, indices)
            if group.name == "token_scores":
                answer = self._token_scores(group, hidden_TD, batch, members)
            elif group.name == "token_embeddings":
                answer = self._token_embeddings(hidden_TD, members)
            else:
                answer = self._of_sequences(group, output, members)
            values, row_lens, widths = answer
            blocks.append(ArrayBlock(name=group.name, values=values, indices=indices, row_lens=row_lens, widths=widths))
        return BatchOutputs.of(len(params), blocks)

    def _of_sequences(self, group: OutputGroup, output: ArrayOutput, members: _Members) -> _Answer:
        """Answers with a row for each sequence."""
        hidden_TD, weights_T = output.hidden_states, self._row_weights(output.attention_weights)
        types, width = self._info.sequence_pooling, hidden_TD.shape[1]
        is_embedding = group.name == "embedding"

        def pooled(pooling_type: PoolingType, cut: RowCut) -> Floats:
            weights = weights_T if pooling_type is PoolingType.ATTENTION else None
            return cut.pool(
                self._machine,
                hidden_TD,
                members.starts,
                members.lengths,
                _POOLINGS[pooling_type],
                skips_R=members.skips,
                weights_T=weights,
            )

        if is_embedding and len(types) == 1 and not self._dense:
            cut = RowCut(members.params, width)
            return _Answer(pooled(types[0], cut), None, cut.widths)
        whole = RowCut([_WHOLE_ROWS] * len(members.params), width)
        rows_MW = np.concatenate([pooled(pooling_type, whole) for pooling_type in types], axis=1)
        if not is_embedding:
            return _Answer(class_scores(self._encoder.classify(rows_MW), self._info, members.params))
        for dense in self._dense:
            rows_MW = dense(rows_MW)
        cut = RowCut(members.params, rows_MW.shape[1])
        return _Answer(cut.apply(self._machine, rows_MW), None, cut.widths)

    def _token_embeddings(self, hidden_TD: Floats, members: _Members) -> _Answer:
        """Answers with a vector for each token."""
        rows_RW = hidden_TD[members.rows()]
        for dense in self._token_dense:
            rows_RW = dense(rows_RW)
        cut = RowCut(members.params, rows_RW.shape[1], members.lengths)
        return _Answer(cut.apply(self._machine, rows_RW), members.lengths.tolist(), cut.widths)

    def _token_scores(self, group: OutputGroup, hidden_TD: Floats, batch: PackedArrays, members: _Members) -> _Answer:
        """Answers with class scores for each token; of STEP for those that end a step."""
        rows_R, counts = members.rows(), members.lengths
        if self._info.token_pooling is PoolingType.STEP:
            tags_M = np.array([-1 if p.step_tag_id is None else p.step_tag_id for p in members.params])
            tags_R = np.repeat(tags_M, counts)
            is_kept_R = (batch.input_ids[rows_R] == tags_R) | (tags_R < 0)
            kept_before = np.concatenate([[0], is_kept_R.cumsum()])
            counts = np.diff(kept_before[np.concatenate([[0], np.cumsum(counts)])]).astype(np.int32)
            rows_R = rows_R[is_kept_R]
        logits_RC = self._encoder.classify_tokens(hidden_TD[rows_R])
        if group.columns is not None:
            logits_RC = logits_RC[:, list(group.columns)]
        scores_RC = class_scores(logits_RC, self._info, members.params, counts)
        return _Answer(scores_RC, counts.tolist())

    def _row_weights(self, attention_TH: Floats | None) -> Floats | None:
        """Returns the weight of every row for ATTENTION, [T]; None where no sequence needs it."""
        head = self._info.attention_head
        if attention_TH is None:
            return None
        return attention_TH.mean(axis=1) if head is None else np.ascontiguousarray(attention_TH[:, head])
