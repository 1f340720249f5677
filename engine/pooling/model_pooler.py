"""The pooler of one model: all its tasks, for batches that mix tasks, parameters and chunks.

Works on numpy arrays (`array_ops.array_pooler`) and on tensors (`tensor_ops.tensor_pooler`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ..protocol.batch_outputs import Arrays, BatchOutputs, OutputArray, OutputGroup, by_group, distinct_params
from ..protocol.model_info import ModelInfo, TokenizerSpec
from ..protocol.multi_vector import SparseKind
from ..protocol.params import PoolingParams
from ..protocol.tasks import PoolingType
from ..scheduling import PrefillChunk
from .chunked_manager import ChunkedPoolingManager
from .heads import (
    ClassifierPoolerHead,
    EmbeddingPoolerHead,
    SparsePooler,
    VectorFilter,
    check_attention_head,
    query_similarities,
    token_rows,
)
from .metadata import ChunkSpans, PoolingMetadata, check_gap, rows_between
from .row_ops import R, RowFunction, RowOps, Rows, VectorTransform
from .states import PoolingStates, finalize_states

if TYPE_CHECKING:
    from torch import Tensor

    from ..executors.cpu.array_encoder import PackedArrays
    from ..executors.torch.packed_batch import PackedBatch

R_co = TypeVar("R_co", covariant=True)


class ForwardOutput(Protocol[R_co]):
    """The output of a forward: ModelOutput or ArrayOutput."""

    @property
    def hidden_states(self) -> R_co:
        """[T, D]."""
        ...

    @property
    def attention_weights(self) -> R_co | None:
        """[T, H]. In a batch of chunks it includes the weights of the tokens before each chunk."""
        ...

    @property
    def logits(self) -> R_co | None:
        """[N, C]; None unless the model pools by itself."""
        ...


class PoolerOutput(Generic[R]):
    """The results of one batch, by sequence and name. They stay on the device until a method returns arrays.

    Args:
        batch_size: Sequences in the batch, complete or not.
        arrays: A sequence is in at most one array of each name.
        states: New states of the sequences in chunks, by index, for ChunkedPoolingManager.commit.
    """

    def __init__(
        self, batch_size: int, arrays: Sequence[OutputArray[R]], states: Mapping[int, PoolingStates[R]] | None = None
    ) -> None:
        self.batch_size = batch_size
        self.arrays = tuple(arrays)
        self.states = states or {}
        self._on_host: BatchOutputs | None = None

    def to_host(self) -> BatchOutputs:
        """Returns the results on the host. Copies them only from a device, and then waits; see `begin_copy`."""
        if self._on_host is None:
            arrays = [array.with_values(_to_host(array.values)) for array in self.arrays]
            self._on_host = BatchOutputs.of(self.batch_size, arrays)
        return self._on_host

    def begin_copy(self: PoolerOutput[Tensor], to_host: Callable[[Sequence[Tensor]], list[Tensor]]) -> OutputCopy:
        """Starts to copy the results to the host, with a flag for each array whether its values are finite.

        Args:
            to_host: Starts to copy tensors to the host and returns the copies, as DeviceStream.to_host does.
        """
        values = [array.values for array in self.arrays]
        copies = to_host([*values, *map(_is_finite, values)])
        return OutputCopy(self, copies[: len(values)], copies[len(values) :])

    # Only library callers use the methods below. docs/internals/names.md explains their names.

    def to_numpy(self) -> list[Arrays]:
        """Returns the arrays of each sequence by name; see BatchOutputs.split."""
        return self.to_host().split()

    def get_embedding(self, idx: int) -> NDArray[np.float32]:
        """Returns the embedding [D] of one sequence.

        Raises:
            KeyError: The sequence has no embedding: it has another task, or continues after this batch.
        """
        arrays = self.to_numpy()[idx]
        if "embedding" not in arrays:
            raise KeyError(f"sequence {idx} has no embedding; it has {', '.join(arrays) or 'no results yet'}")
        return arrays["embedding"]


@dataclass(frozen=True, slots=True, eq=False)
class OutputCopy:
    """A running copy of the results of one batch to the host.

    Attributes:
        output: The results on the device.
        values: The copies of the arrays. Read them after the copy has ended.
        are_finite: The copies of one bool per array: whether all values are finite.
    """

    output: PoolerOutput[Tensor]
    values: Sequence[Tensor]
    are_finite: Sequence[Tensor]

    def outputs(self) -> BatchOutputs:
        """Returns the results, views of the copies. Call it after the copy has ended."""
        pairs = zip(self.output.arrays, self.values, strict=True)
        arrays = tuple(array.with_values(values.numpy()) for array, values in pairs)
        if not all(is_finite.item() for is_finite in self.are_finite):
            return BatchOutputs.of(self.output.batch_size, arrays)  # finds the sequences with NaN or inf
        return BatchOutputs(self.output.batch_size, arrays, np.ones(self.output.batch_size, np.bool_))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHeads(Generic[R]):
    """The heads for vectors and weights of single tokens, and the tokens that they leave out.

    Attributes:
        vectors: Maps token rows [R, D] to vectors, for all tokens but the first; None: the Dense modules are used.
        weights: Maps token rows [T, D] to weights [T, 1] of sparse vectors; None: the model has no such head.
        skip_ids: Tokens without a vector.
        unweighted_ids: Tokens without a weight.
    """

    vectors: RowFunction[R] | None = None
    weights: RowFunction[R] | None = None
    skip_ids: tuple[int, ...] = ()
    unweighted_ids: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, info: ModelInfo, tokenizer: TokenizerSpec, load: Callable[[str | None, int], RowFunction[R] | None]
    ) -> TokenHeads[R]:
        """Returns the token heads of a model, and the tokens that token-level outputs leave out.

        Args:
            info: The model.
            tokenizer: Its tokenizer.
            load: Reads the head in a file (None: no head), which maps rows to the given number of columns.
        """
        tokens = tokenizer.multi_vector_tokens
        heads = info.token_heads
        if heads is None:
            return cls(skip_ids=tokens.skip_ids)
        vectors, weights = load(heads.vectors_file, info.hidden_size), load(heads.weights_file, 1)
        return cls(vectors=vectors, weights=weights, unweighted_ids=tokens.unweighted_ids)


class ModelPooler(Generic[R]):
    """Pools the output of the model and runs the heads. Stateless: ChunkedPoolingManager stores the states of chunks.

    Args:
        ops: Arithmetic of the rows; also an attribute. `ops.pool` is one call of the C library or of a kernel: it pools
            all sequences, truncates the vectors and normalises them.
        classify: Maps pooled rows [N, D] to class logits [N, C].
        classify_tokens: Maps token rows [R, D] to class logits [R, C].
        dense: The Dense modules of an embedding model, in order, float32.
        token_heads: Token heads, and the tokens that they leave out.
        vocabulary_head: Maps hidden states to vocabulary logits, for models with sparse vectors of that kind.
        block_rows: Most rows per call of `vocabulary_head`.

    Raises:
        ValueError: ATTENTION pooling with a head that the model does not have.
    """

    def __init__(
        self,
        info: ModelInfo,
        ops: RowOps[R],
        classify: RowFunction[R],
        classify_tokens: RowFunction[R],
        dense: Sequence[RowFunction[R]] = (),
        token_heads: TokenHeads[R] | None = None,
        *,
        vocabulary_head: RowFunction[R] | None = None,
        block_rows: int = 1,
    ) -> None:
        token_heads = token_heads or TokenHeads()
        self._info = info
        self.ops = ops
        self._types = info.sequence_pooling
        self._has_attention = PoolingType.ATTENTION in info.sequence_pooling
        if self._has_attention:
            check_attention_head(info.attention_head, info.num_attention_heads)
        # Without a projection, truncation and normalisation are part of the pooling kernel.
        self._is_fused = len(self._types) == 1 and not dense
        self._sparse: SparsePooler[R] | None = None
        if info.sparse is not None:
            is_static = info.sparse.kind is SparseKind.STATIC_WEIGHTS  # the hidden states [T, 1] are the weights
            head = vocabulary_head if info.sparse.kind is SparseKind.VOCABULARY_LOGITS else token_heads.weights
            head = ops.to_float32 if is_static else head
            assert head is not None, "the loader reads the head of ModelInfo"
            self._sparse = SparsePooler(
                ops,
                info.sparse,
                head,
                info.vocab_size + is_static,  # the id of a text without tokens follows the vocabulary
                block_rows=block_rows,
                unweighted_ids=token_heads.unweighted_ids,
            )
        drops_first = token_heads.vectors is not None
        self._vector_filter = VectorFilter(info.multi_vector, token_heads.skip_ids, drops_first=drops_first)
        self._embedding_head = EmbeddingPoolerHead(ops, dense)
        # A Dense module for concatenated pooled rows does not accept token rows.
        fits_tokens = bool(dense) and info.dense[0].in_features == info.hidden_size
        vector_heads = (token_heads.vectors,) if token_heads.vectors is not None else dense if fits_tokens else ()
        self._token_embedding_head = EmbeddingPoolerHead(ops, vector_heads)
        self._classifier_head = ClassifierPoolerHead(ops, info, classify)
        self._token_classifier_head = ClassifierPoolerHead(ops, info, classify_tokens)

    def needs_attention(self, params: Sequence[PoolingParams]) -> bool:
        """Whether a batch with these resolved parameters needs the model's attention weights."""
        if not self._has_attention:
            return False
        return any(not group.is_token_level for p in distinct_params(params) for group in OutputGroup.all_of(p))

    def batch_metadata(
        self,
        chunks: Sequence[PrefillChunk],
        batch: PackedBatch | PackedArrays,
        manager: ChunkedPoolingManager[R],
        *,
        has_allocations: bool,
    ) -> PoolingMetadata:
        """Returns the metadata of a batch, for `pool`.

        Args:
            chunks: The chunks of the batch, or whole sequences.
            batch: Their packed tokens.
            manager: Has the cursors of sequences in chunks.
            has_allocations: Whether a sequence of the batch has memory in the sequence pool. Otherwise all are whole.
        """
        sequences = [chunk.sequence for chunk in chunks]
        params = [sequence.request.params for sequence in sequences]
        vectors = [sequence.tokens.query_vectors for sequence in sequences]
        queries = vectors if any(query is not None for query in vectors) else None
        if not has_allocations:
            return PoolingMetadata.for_batch(batch, params, queries=queries)
        metadata = PoolingMetadata.for_batch(
            batch,
            params,
            seq_ids=sequences,
            starts=[chunk.start for chunk in chunks],
            total_lens=[sequence.num_tokens for sequence in sequences],
            queries=queries,
        )
        return manager.with_cursors(metadata)

    def pool(
        self, output: ForwardOutput[R], metadata: PoolingMetadata, manager: ChunkedPoolingManager[R] | None = None
    ) -> PoolerOutput[R]:
        """Computes the results of every sequence of a batch.

        For a sequence that continues after this batch, a token-level task returns the rows of this chunk, to be joined
        with those of the other chunks. A sequence-level task returns nothing.

        Args:
            output: Output of the batch's forward. Not modified.
            metadata: Metadata of the batch.
            manager: Has the states of chunks. This method does not change them, so that a failed batch can run again;
                `manager.commit` stores the new states.

        Raises:
            ValueError: The batch has chunks, and there is no manager or the model pools by itself; or rows before a
                chunk are missing.
        """
        groups = by_group(metadata.params)
        if metadata.chunks is None or not metadata.is_partial:
            arrays = [self._pool_whole(group, output, metadata, indices) for group, indices in groups.items()]
            return PoolerOutput(metadata.num_seqs, arrays)
        if manager is None or output.logits is not None:
            raise ValueError("chunks of sequences need a manager, and a model that does not pool by itself")
        return self._pool_chunks(groups, output, metadata, metadata.chunks, manager)

    def _pool_whole(
        self,
        group: OutputGroup,
        output: ForwardOutput[R],
        metadata: PoolingMetadata,
        indices: Sequence[int] | None,
        weights: R | None = None,
    ) -> OutputArray[R]:
        """Pools the sequences `indices` (None: all) of a batch of whole sequences. `weights` [T, H] or the model's."""
        if group.is_token_level:
            return self._pool_tokens(group, output.hidden_states, metadata, indices)
        params = metadata.params if indices is None else [metadata.params[i] for i in indices]
        if group.name == "scores" and output.logits is not None:
            logits = output.logits if indices is None else self.ops.pick(output.logits, np.array(indices))
            return OutputArray(name=group.name, values=self._classifier_head.activate(logits, params), indices=indices)
        hidden_states = output.hidden_states
        weights = self._row_weights(output.attention_weights if weights is None else weights)
        if indices is not None:
            rows, metadata = metadata.select(indices)
            hidden_states = self.ops.pick(hidden_states, rows)
            weights = None if weights is None else self.ops.pick(weights, rows)

        def pooled(pooling_type: PoolingType, transform: VectorTransform) -> R:
            type_weights = weights if pooling_type is PoolingType.ATTENTION else None
            if pooling_type is PoolingType.ATTENTION and type_weights is None:
                raise ValueError("ATTENTION pooling needs the attention weights of the model")
            return self.ops.pool(hidden_states, metadata, pooling_type, transform, weights=type_weights)

        if group.name == "embedding" and self._is_fused:
            transform = VectorTransform.of(params, hidden_states.shape[1])
            values = pooled(self._types[0], transform)
            return OutputArray(name=group.name, values=values, indices=indices, widths=transform.columns())
        columns = [pooled(pooling_type, VectorTransform()) for pooling_type in self._types]
        return self._from_pooled(group, self.ops.concat(columns, axis=1), params, indices)

    def _from_pooled(
        self, group: OutputGroup, rows: R, params: Sequence[PoolingParams], indices: Sequence[int] | None
    ) -> OutputArray[R]:
        """Runs the head of a sequence-level task on pooled rows [N, W] of the sequences `indices` (None: all)."""
        if group.name == "scores":
            return OutputArray(name=group.name, values=self._classifier_head(rows, params), indices=indices)
        values, widths = self._embedding_head(rows, params)
        return OutputArray(name=group.name, values=values, indices=indices, widths=widths)

    def _pool_tokens(
        self, group: OutputGroup, hidden_states: R, metadata: PoolingMetadata, indices: Sequence[int] | None
    ) -> OutputArray[R]:
        """Runs a token-level task for the sequences `indices` (None: all). Skips rows that were pooled before."""
        if indices is not None or metadata.chunks is not None:
            members = range(metadata.num_seqs) if indices is None else indices
            rows, metadata = metadata.select(members, new_only=True)
            hidden_states = self.ops.pick(hidden_states, rows)
        if group.name == "sparse":
            assert self._sparse is not None, "PoolingParams.verify rejects unsupported tasks"
            values, row_lens = self._sparse.pool(hidden_states, metadata)
            return OutputArray(name=group.name, values=values, indices=indices, row_lens=row_lens)
        has_vectors = group.name in ("token_embeddings", "similarities")
        selected, row_lens = (
            self._vector_filter.select(metadata) if has_vectors else token_rows(self._info.token_pooling, metadata)
        )
        if selected is not None:
            hidden_states = self.ops.pick(hidden_states, selected)
        widths = None
        if has_vectors:
            values, widths = self._token_embedding_head(hidden_states, metadata.params, row_lens)
        else:
            values = self._token_classifier_head(hidden_states, metadata.params, row_lens, group.columns)
        if group.name == "similarities":
            values, row_lens, widths = query_similarities(self.ops, values, row_lens, metadata.queries or ())
        return OutputArray(name=group.name, values=values, indices=indices, row_lens=row_lens, widths=widths)

    def _pool_chunks(
        self,
        groups: Mapping[OutputGroup, list[int] | None],
        output: ForwardOutput[R],
        metadata: PoolingMetadata,
        chunks: ChunkSpans,
        manager: ChunkedPoolingManager[R],
    ) -> PoolerOutput[R]:
        """Pools a batch with chunks. Sequences that need no state are pooled as whole sequences."""
        is_stateless = chunks.needs_no_state(is_last_only=self._types == (PoolingType.LAST,)).tolist()
        whole = metadata.as_whole()
        states: Mapping[int, PoolingStates[R]] = {}
        stateful: list[int] = []
        arrays = []
        for group, members in groups.items():
            indices = range(metadata.num_seqs) if members is None else members
            if group.is_token_level:
                for i in indices:
                    check_gap((self._info.token_pooling,), chunks.starts[i], chunks.num_pooled[i])
                arrays.append(self._pool_tokens(group, output.hidden_states, metadata, members))
                continue
            stateful += [i for i in indices if not is_stateless[i]]
            stateless = [i for i in indices if is_stateless[i]]
            if stateless:
                picked = None if len(stateless) == metadata.num_seqs else stateless
                weights = self._chunk_weights(output.attention_weights, chunks)
                arrays.append(self._pool_whole(group, output, whole, picked, weights))
        if stateful:
            weights = self._row_weights(output.attention_weights)
            states = manager.process_batch(metadata, output.hidden_states, weights, sorted(set(stateful)))
            complete = {i: state for i, state in states.items() if chunks.is_complete[i]}
            if complete:
                arrays += self._finish(groups, complete, metadata)
        return PoolerOutput(metadata.num_seqs, arrays, states)

    def _finish(
        self,
        groups: Mapping[OutputGroup, list[int] | None],
        states: Mapping[int, PoolingStates[R]],
        metadata: PoolingMetadata,
    ) -> list[OutputArray[R]]:
        """Runs the heads for complete sequences. `states`: their states by index."""
        arrays = []
        done = list(states)
        rows = finalize_states(list(states.values()))
        for group, members in groups.items():
            positions = [position for position, i in enumerate(done) if members is None or i in members]
            if positions and not group.is_token_level:
                done_indices = [done[position] for position in positions]
                picked = rows if len(positions) == len(done) else self.ops.pick(rows, np.array(positions))
                arrays.append(
                    self._from_pooled(group, picked, [metadata.params[i] for i in done_indices], done_indices)
                )
        return arrays

    def _row_weights(self, attention: R | None) -> R | None:
        """Returns the weight of every row [T] for ATTENTION; None without weights or for other types."""
        if not self._has_attention or attention is None:
            return None
        check_attention_head(self._info.attention_head, attention.shape[1])
        return self.ops.row_weights(attention, self._info.attention_head)

    def _chunk_weights(self, attention: R | None, chunks: ChunkSpans) -> R | None:
        """Returns the attention weights [T, H] of the rows of the chunks."""
        if not self._has_attention or attention is None:
            return None
        bounds = chunks.weight_bounds(attention.shape[0])
        return self.ops.pick(attention, rows_between(bounds[:-1] + chunks.starts, bounds[1:]))


def _to_host(values: Rows) -> NDArray[np.float32]:
    if isinstance(values, np.ndarray):
        return values
    array: NDArray[np.float32] = cast("Tensor", values).cpu().numpy()
    return array


def _is_finite(values: Tensor) -> Tensor:
    """Whether all values are finite, a [] bool tensor. 0 times inf or NaN is NaN, which makes the sum NaN."""
    return values.mul(0.0).sum() == 0.0
