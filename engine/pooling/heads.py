"""Heads: from rows to embeddings (project, truncate, normalise) and class scores (classify, shift, activate).

The heads are the same for numpy arrays and for tensors. A RowOps does the arithmetic. Request parameters are evaluated
here, on the host. Results are float32.

Shape letters: N sequences, R rows of sequences or of tokens, T packed rows, W columns, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..protocol.batch_outputs import distinct_params
from ..protocol.model_info import Activation, ModelInfo
from ..protocol.multi_vector import MultiVector
from ..protocol.params import PoolingParams
from ..protocol.tasks import PoolingType
from .metadata import IntArray, PickedRows, PoolingMetadata, prefix_sums, ranges, selected_rows


class Rows(Protocol):
    """The common part of numpy arrays and tensors."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""
        ...

    @property
    def dtype(self) -> Any:
        """Type of the numbers."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Returns one row."""
        ...

    def __add__(self, other: Any, /) -> Any:
        """Adds rows."""
        ...

    def __mul__(self, other: Any, /) -> Any:
        """Multiplies with a number."""
        ...

    def __truediv__(self, other: Any, /) -> Any:
        """Divides by a number."""
        ...


R = TypeVar("R", bound=Rows)
"""A numpy array or a tensor."""
RowMap = Callable[[R], R]
"""Maps rows [R, D] to rows [R, W] or weights [R, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VectorTransform:
    """Truncation of rows to `width` columns, and their L2 normalisation.

    Attributes:
        width: Columns of the result; None keeps all.
        widths: [R] int32, columns of each row, if they differ; later columns are zero.
        normalize: Whether rows are L2-normalised: one value for all rows, or [R] bool.
    """

    width: int | None = None
    widths: NDArray[np.int32] | None = None
    normalize: bool | NDArray[np.bool_] = False

    @classmethod
    def of(cls, params: Sequence[PoolingParams], width: int) -> VectorTransform:
        """Returns the transform for resolved parameters.

        Args:
            params: One per row.
            width: Columns of the rows before the truncation.
        """
        distinct = distinct_params(params)
        widths = {min(p.dimensions or width, width) for p in distinct}
        normalize: bool | NDArray[np.bool_] = bool(distinct[0].normalize)
        if any(bool(p.normalize) != normalize for p in distinct):
            normalize = np.array([bool(p.normalize) for p in params])
        if len(widths) == 1:
            return cls(width=widths.pop(), normalize=normalize)
        widths_per_row = np.array([min(p.dimensions or width, width) for p in params], np.int32)
        return cls(width=max(widths), widths=widths_per_row, normalize=normalize)

    def changes(self, width: int) -> bool:
        """Whether the transform changes rows with `width` columns."""
        return self.width not in (None, width) or self.widths is not None or self.normalize is not False

    def per_token(self, row_lens: Sequence[int]) -> VectorTransform:
        """Expands a transform of sequences to one of token rows. `row_lens`: [N], rows of each sequence."""
        return VectorTransform(
            width=self.width,
            widths=None if self.widths is None else np.repeat(self.widths, row_lens),
            normalize=self.normalize if isinstance(self.normalize, bool) else np.repeat(self.normalize, row_lens),
        )

    def among(self, indices: Sequence[int], num_rows: int) -> VectorTransform:
        """Expands the transform of the rows `indices` to `num_rows` rows.

        The transform of the other rows is arbitrary.
        """
        widths, normalize = self.widths, self.normalize
        if widths is not None:
            picked_widths, widths = widths, np.ones(num_rows, np.int32)
            widths[list(indices)] = picked_widths
        if not isinstance(normalize, bool):
            flags, normalize = normalize, np.zeros(num_rows, np.bool_)
            normalize[list(indices)] = flags
        return VectorTransform(width=self.width, widths=widths, normalize=normalize)

    def columns(self) -> tuple[int, ...] | None:
        """Returns the number of columns of each row on the host; None if they are equal."""
        return None if self.widths is None else tuple(self.widths.tolist())


class RowOps(Protocol[R]):
    """Arithmetic on rows: `ArrayOps` on numpy arrays with the C library, `TensorOps` on tensors."""

    def pool(
        self,
        hidden_states: R,
        metadata: PoolingMetadata,
        pooling_type: PoolingType,
        transform: VectorTransform,
        *,
        weights: R | None = None,
        indices: Sequence[int] | None = None,
    ) -> R:
        """Pools sequences to one row each, truncates and normalises them in one pass. See penstock.kernels.pooling.

        Args:
            hidden_states: [T, D] of the batch. Not modified.
            metadata: Metadata of the batch.
            pooling_type: A sequence-level type.
            transform: Truncation and normalisation of the pooled rows.
            weights: [T] float32, for ATTENTION: the weight of each row.
            indices: The sequences to pool, ascending; None for all.

        Returns:
            [N, W] float32.
        """
        ...

    def transform(self, rows: R, transform: VectorTransform) -> R:
        """Truncates and normalises rows [R, D] of any float type. Returns [R, W] float32. Always a copy."""
        ...

    def rows_of(self, values: Any) -> R:
        """Converts a caller's array or tensor to rows or weights on the device of the pooling.

        The result has no gradient and may share memory with `values`. float64 becomes float32.
        """
        ...

    def floats(self, rows: R) -> R:
        """Returns rows of any float type as float32. No copy if they are float32."""
        ...

    def doubles(self, rows: R) -> R:
        """Returns rows as float64."""
        ...

    def copied(self, rows: R) -> R:
        """Returns a copy."""
        ...

    def maximum(self, rows: R, others: R) -> R:
        """Returns the elementwise maximum of two equal shapes. NaN if one of the values is NaN."""
        ...

    def pick(self, rows: R, picked: PickedRows) -> R:
        """Returns some rows, in the order of `picked`."""
        ...

    def pick_columns(self, rows: R, columns: Sequence[int]) -> R:
        """Returns some columns."""
        ...

    def concat_columns(self, parts: Sequence[R]) -> R:
        """Returns the columns of all parts side by side."""
        ...

    def concat_rows(self, parts: Sequence[R]) -> R:
        """Returns the rows of all parts, one part after another."""
        ...

    def row_weights(self, attention: R, head: int | None) -> R:
        """Returns the weight of every row [T], float32, of attention weights [T, H]; None averages the heads."""
        ...

    def saturated(self, logits: R, *, twice: bool) -> R:
        """Returns log(1 + relu(x)), or log(1 + log(1 + relu(x))) if `twice`. May write to `logits`."""
        ...

    def entries(self, values: R) -> tuple[R, list[int]]:
        """Returns the nonzero entries of [N, V] as column and value [S, 2] float32, and their number per row."""
        ...

    def group_max(self, values: R, groups: IntArray, num_groups: int) -> R:
        """Returns the maximum of 0 and the values of each group, [G, 1]. `values` [R, 1], `groups` [R]."""
        ...

    def maxsim(
        self,
        queries: NDArray[np.float32],
        documents: R,
        query_lens: Sequence[int],
        document_lens: Sequence[int],
        query_of: Sequence[int],
    ) -> R:
        """Returns the largest product of each query vector with the vectors of a document. See penstock.kernels.maxsim.

        Args:
            queries: [S, W], the packed vectors of all queries, on the host.
            documents: [R, W], the packed vectors of all documents.
            query_lens: Vectors of each query.
            document_lens: Vectors of each document.
            query_of: The query of each document.

        Returns:
            [N, max(query_lens)] float32, padded with zeros.
        """
        ...

    def scores(self, logits: R, info: ModelInfo, uses_activation: bool | NDArray[np.bool_]) -> R:
        """Returns activation((logits - mean) / sigma), [R, C] float32. No activation for rows that do not use it."""
        ...


class EmbeddingPoolerHead(Generic[R]):
    """Projects rows through the Dense modules, truncates them to `dimensions` and L2-normalises them.

    Args:
        ops: Arithmetic of the rows.
        dense: Functions from rows to float32 rows, applied in order.
    """

    def __init__(self, ops: RowOps[R], dense: Sequence[RowMap[R]] = ()) -> None:
        self._ops = ops
        self._dense = tuple(dense)

    def __call__(
        self, rows: R, params: Sequence[PoolingParams], row_lens: Sequence[int] | None = None
    ) -> tuple[R, tuple[int, ...] | None]:
        """Embeds rows.

        Args:
            rows: [N, D] or [R, D], any float type. Not modified.
            params: N resolved parameters.
            row_lens: Token rows of each sequence; None for a row per sequence.

        Returns:
            [N, W] or [R, W] float32, and the columns of each sequence if they differ.
        """
        for dense in self._dense:
            rows = dense(self._ops.floats(rows))
        transform = VectorTransform.of(params, rows.shape[1])
        per_row = transform if row_lens is None else transform.per_token(row_lens)
        return self._ops.transform(rows, per_row), transform.columns()


class ClassifierPoolerHead(Generic[R]):
    """Computes class scores of rows: activation((logits - mean) / sigma).

    Args:
        ops: Arithmetic of the rows.
        info: The model with activation, mean and sigma.
        classifier: Maps rows [N, D] of any float type to logits [N, C].
    """

    def __init__(self, ops: RowOps[R], info: ModelInfo, classifier: RowMap[R]) -> None:
        self._ops = ops
        self._info = info
        self._classifier = classifier

    def __call__(
        self,
        rows: R,
        params: Sequence[PoolingParams],
        row_lens: Sequence[int] | None = None,
        columns: Sequence[int] | None = None,
    ) -> R:
        """Scores rows.

        Args:
            rows: [N, D] or [R, D], any float type. Not modified.
            params: N resolved parameters.
            row_lens: Token rows of each sequence; None for a row per sequence.
            columns: The classes to return, selected before the activation; None returns all.

        Returns:
            [N, C] or [R, C] float32.
        """
        return self.activate(self._classifier(rows), params, row_lens, columns)

    def activate(
        self,
        logits: R,
        params: Sequence[PoolingParams],
        row_lens: Sequence[int] | None = None,
        columns: Sequence[int] | None = None,
    ) -> R:
        """Like `__call__`, but takes logits."""
        if columns is not None:
            logits = self._ops.pick_columns(logits, columns)
        uses = {p.use_activation is not False for p in distinct_params(params)}
        if self._info.activation is Activation.IDENTITY:
            uses = {False}
        if len(uses) == 1:
            return self._ops.scores(logits, self._info, uses.pop())
        uses_activation = np.array([p.use_activation is not False for p in params])
        return self._ops.scores(
            logits, self._info, uses_activation if row_lens is None else np.repeat(uses_activation, row_lens)
        )


TokenRows = tuple[IntArray | None, tuple[int, ...]]
"""The selected rows [R], or None for all rows, and their number per sequence."""


def token_rows(pooling_type: PoolingType, metadata: PoolingMetadata) -> TokenRows:
    """Selects the rows of a token-level type: all rows, or for STEP the tokens with the sequence's `step_tag_id`.

    Raises:
        ValueError: A sequence has a `step_tag_id`, but the batch has no token ids.
    """
    if pooling_type is PoolingType.ALL or all(p.step_tag_id is None for p in distinct_params(metadata.params)):
        return None, metadata.seq_lens
    if metadata.token_ids is None:
        raise ValueError("STEP pooling needs the token ids of the batch")
    tags = [-1 if p.step_tag_id is None else p.step_tag_id for p in metadata.params]
    tag_of_row = np.repeat(tags, metadata.seq_lens)
    return selected_rows((metadata.token_ids == tag_of_row) | (tag_of_row < 0), metadata.seq_lens)


class VectorFilter:
    """Drops the vectors of some tokens, such as punctuation in a document.

    Args:
        multi_vector: Settings of the multi-vector model; None keeps all vectors.
        skip_ids: Ids of the tokens to drop.
        drops_first: Also drop the first token of every sequence.
    """

    def __init__(self, multi_vector: MultiVector | None, skip_ids: Sequence[int], *, drops_first: bool = False) -> None:
        self._multi_vector = multi_vector
        self._drops_first = drops_first
        self._skip_ids: Final = np.array(skip_ids, np.int64)

    def select(self, metadata: PoolingMetadata) -> TokenRows:
        """Selects the rows to return.

        Raises:
            ValueError: Rows may have to be dropped, but the batch has no token ids.
        """
        if self._drops_first:
            bounds = prefix_sums(metadata.seq_lens)
            rows = ranges(np.minimum(bounds[:-1] + 1, bounds[1:]), bounds[1:])
            return rows, tuple(max(length - 1, 0) for length in metadata.seq_lens)
        skips = {id(p): self._skips(p) for p in distinct_params(metadata.params)}
        if not any(skips.values()):
            return None, metadata.seq_lens
        if metadata.token_ids is None:
            raise ValueError("dropping the vectors of tokens needs the token ids of the batch")
        is_selected = ~np.isin(metadata.token_ids, self._skip_ids)
        if not all(skips.values()):
            is_selected |= np.repeat([not skips[id(p)] for p in metadata.params], metadata.seq_lens)
        return selected_rows(is_selected, metadata.seq_lens)

    def _skips(self, params: PoolingParams) -> bool:
        return (
            self._multi_vector is not None
            and len(self._skip_ids) > 0
            and self._multi_vector.skips(is_query=params.is_query)
        )


def compare(
    ops: RowOps[R], vectors: R, row_lens: Sequence[int], queries: Sequence[NDArray[np.float32] | None]
) -> tuple[R, tuple[int, ...], tuple[int, ...]]:
    """Compares the vectors of documents, or of chunks of documents, with the vectors of their queries (ColBERT).

    Args:
        ops: Arithmetic of the vectors.
        vectors: [R, W] float32.
        row_lens: Vectors of each document; they sum to R.
        queries: [Q, W] float32 each, on the host.

    Returns:
        [P, max Q] float32: the largest similarity to each vector of the query, for every document with vectors; the
        rows of each document, 1 or 0; and the columns of each document.

    Raises:
        ValueError: A document has no query.
    """
    queries_by_id: dict[int, NDArray[np.float32]] = {}
    for query in queries:
        if query is None:
            raise ValueError("a document needs the vectors of its query")
        queries_by_id.setdefault(id(query), query)
    index_of = {key: index for index, key in enumerate(queries_by_id)}
    query_of = [index_of[id(query)] for query in queries]
    query_lens = [len(query) for query in queries_by_id.values()]
    similarities = ops.maxsim(np.concatenate(list(queries_by_id.values())), vectors, query_lens, row_lens, query_of)
    present = np.flatnonzero(row_lens)
    if len(present) < len(row_lens):
        similarities = ops.pick(similarities, present)
    return similarities, tuple(int(length > 0) for length in row_lens), tuple(query_lens[q] for q in query_of)


def check_attention_head(head: int | None, num_heads: int | None) -> None:
    """Raises ValueError if a model with `num_heads` heads (None: unknown) has no such attention head."""
    if head is not None and (head < 0 or (num_heads is not None and head >= num_heads)):
        raise ValueError(f"attention_head is {head}; the model has {num_heads} heads, numbered from 0")
