"""The arithmetic of rows, which numpy arrays and tensors implement, and the truncation and normalisation of vectors.

Shape letters: N sequences, R rows of sequences or of tokens, T packed rows, W columns, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..protocol.batch_outputs import distinct_params
from ..protocol.model_info import ModelInfo
from ..protocol.params import PoolingParams
from ..protocol.tasks import PoolingType
from .metadata import IntArray, PickedRows, PoolingMetadata


class Rows(Protocol):
    """The common part of numpy arrays and tensors."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[R, W]."""
        ...

    @property
    def dtype(self) -> Any:
        """A numpy dtype or a torch.dtype."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Returns row `index`, [W]."""
        ...

    def __add__(self, other: Any, /) -> Any:
        """Adds rows of the same shape."""
        ...

    def __mul__(self, other: Any, /) -> Any:
        """Multiplies every value with a number."""
        ...

    def __truediv__(self, other: Any, /) -> Any:
        """Divides every value by a number."""
        ...


R = TypeVar("R", bound=Rows)
"""A numpy array or a tensor."""
RowFunction = Callable[[R], R]
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
    ) -> R:
        """Pools sequences to one row each, truncates and normalises them in one pass. See penstock.kernels.pooling.

        Args:
            hidden_states: [T, D] of the batch. Not modified.
            metadata: Metadata of the batch.
            pooling_type: A sequence-level type.
            transform: Truncation and normalisation of the pooled rows.
            weights: [T] float32, for ATTENTION: the weight of each row.

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

    def to_float32(self, rows: R) -> R:
        """Returns rows of any float type as float32. No copy if they are float32."""
        ...

    def to_float64(self, rows: R) -> R:
        """Returns rows of any float type as float64."""
        ...

    def copy(self, rows: R) -> R:
        """Returns a copy that shares no memory with `rows`."""
        ...

    def maximum(self, rows: R, others: R) -> R:
        """Returns the elementwise maximum of two equal shapes. NaN if one of the values is NaN."""
        ...

    def pick(self, rows: R, picked: PickedRows) -> R:
        """Returns some rows, in the order of `picked`."""
        ...

    def pick_columns(self, rows: R, columns: Sequence[int]) -> R:
        """Returns the columns with these indices, [R, len(columns)]."""
        ...

    def concat(self, parts: Sequence[R], axis: int = 0) -> R:
        """Returns the rows of all parts, one part after another; with axis 1, their columns side by side."""
        ...

    def row_weights(self, attention: R, head: int | None) -> R:
        """Returns the weight of every row [T], float32, of attention weights [T, H]; None averages the heads."""
        ...

    def log_saturation(self, logits: R, *, twice: bool) -> R:
        """Returns log(1 + relu(x)), or log(1 + log(1 + relu(x))) if `twice`. May write to `logits`."""
        ...

    def nonzero_entries(self, values: R) -> tuple[R, list[int]]:
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
