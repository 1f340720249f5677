"""The heads of one served model: from pooled rows, or token rows, to the blocks of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from ..executors.torch.base import PackedModel
from ..protocol.batch_outputs import OutputGroup
from ..protocol.model_info import ModelInfo
from ..protocol.params import PoolingParams
from ..protocol.vectors import SparseKind
from .heads import ClassifierPoolerHead, EmbeddingPoolerHead, RowMap
from .metadata import PoolingMetadata
from .output import OutputBlock
from .poolers import PoolerFactory
from .sparse import SparsePooler
from .token_vectors import VectorFilter, compare


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMaps:
    """What a model has for single tokens, apart from class scores.

    Attributes:
        vectors: Maps token rows [R, D] to vectors, of all tokens but the first; None where the Dense modules do.
        weights: Maps token rows [T, D] to weights [T, 1] of sparse vectors.
        skip_ids: Tokens that have no vector.
        unweighted_ids: Tokens that have no weight.
    """

    vectors: RowMap | None = None
    weights: RowMap | None = None
    skip_ids: tuple[int, ...] = ()
    unweighted_ids: tuple[int, ...] = ()


NO_TOKEN_MAPS: Final = TokenMaps()


class ModelHeads:
    """Embeds, classifies and picks token rows. Stateless; arguments are those of ModelPooler."""

    def __init__(
        self, info: ModelInfo, model: PackedModel, dense: Sequence[RowMap] = (), maps: TokenMaps = NO_TOKEN_MAPS
    ) -> None:
        self._vector_filter = VectorFilter(info.multi_vector, maps.skip_ids, drops_first=maps.vectors is not None)
        self._sparse_pooler: SparsePooler | None = None
        if info.sparse is not None:
            head = model.vocabulary_head if info.sparse.kind is SparseKind.VOCABULARY_LOGITS else maps.weights
            assert head is not None, "the loader reads the head that ModelInfo names"
            self._sparse_pooler = SparsePooler(info.sparse, head, info.vocab_size, maps.unweighted_ids)
        self._token_pooler = PoolerFactory.create_token(info.token_pooling)
        self._embedding_head = EmbeddingPoolerHead(dense)
        # A Dense that takes concatenated rows cannot take a token's.
        fits_tokens = bool(dense) and info.dense[0].in_features == info.hidden_size
        own = (maps.vectors,) if maps.vectors is not None else dense if fits_tokens else ()
        self._token_embedding_head = EmbeddingPoolerHead(own)
        self._classifier_head = ClassifierPoolerHead(info, model.classify)
        self._token_classifier_head = ClassifierPoolerHead(info, model.classify_tokens)

    def from_rows(
        self, group: OutputGroup, rows: Tensor, params: Sequence[PoolingParams], indices: Sequence[int] | None
    ) -> OutputBlock:
        """Answers a sequence-level task from pooled rows [N, W] of the sequences `indices` (None: all)."""
        if group.name == "scores":
            return OutputBlock(name=group.name, values=self._classifier_head(rows, params), indices=indices)
        values, widths = self._embedding_head(rows, params)
        return OutputBlock(name=group.name, values=values, indices=indices, widths=widths)

    def from_logits(
        self, group: OutputGroup, logits: Tensor, params: Sequence[PoolingParams], indices: Sequence[int] | None
    ) -> OutputBlock:
        """Answers a classification from logits [N, C] of the sequences `indices` (None: all)."""
        values = self._classifier_head.activate(logits, params)
        return OutputBlock(name=group.name, values=values, indices=indices)

    def from_tokens(
        self, group: OutputGroup, hidden_states: Tensor, metadata: PoolingMetadata, indices: Sequence[int] | None
    ) -> OutputBlock:
        """Answers a token-level task from all rows [T, D] of the sequences that `metadata` describes.

        In a batch of chunks these are the rows of the chunks: what comes of them goes out at once, even if it is
        nothing, in [0, W].
        """
        if group.name == "sparse":
            assert self._sparse_pooler is not None, "PoolingParams.verify refuses tasks that the model lacks"
            values, row_lens = self._sparse_pooler.pool(hidden_states, metadata)
            return OutputBlock(name=group.name, values=values, indices=indices, row_lens=row_lens)
        has_vectors = group.name in ("token_embeddings", "similarities")
        rows, row_lens = (self._vector_filter if has_vectors else self._token_pooler).select(metadata)
        kept = hidden_states if rows is None else hidden_states[rows]
        widths = None
        if has_vectors:
            values, widths = self._token_embedding_head(kept, metadata.params, row_lens)
        else:
            values = self._token_classifier_head(kept, metadata.params, row_lens, group.columns)
        if group.name == "similarities":
            values, row_lens, widths = compare(values, row_lens, metadata.queries or ())
        return OutputBlock(name=group.name, values=values, indices=indices, row_lens=row_lens, widths=widths)
