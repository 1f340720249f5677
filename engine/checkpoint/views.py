"""Views of a checkpoint below a prefix, whose tensors are checked as they are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ..protocol.errors import WeightError
from .array_file import Array
from .files import StoredT, StoredT_co

Floats = NDArray[np.float32]

# Rows of a table that are cast at a time: what that takes besides is small.
_BLOCK_ROWS: Final = 4096
_BF16_INFINITY: Final = np.uint16(0x7F80)
_BF16_NAN: Final = np.uint16(0x7FC0)


class TensorSource(Protocol[StoredT_co]):
    """Where tensors come from: a checkpoint on disk."""

    def __contains__(self, name: str) -> bool:
        """Whether a tensor of that name exists."""
        ...

    def read(self, name: str) -> StoredT_co:
        """Returns the tensor as it is stored, on the CPU; the memory may belong to the file."""
        ...


class WeightView(ABC, Generic[StoredT]):
    """What views of every library share; they are dataclasses, and have these fields.

    Attributes:
        source: The checkpoint.
        prefix: Put before every name, such as "bert.encoder.".
    """

    __slots__ = ()

    source: TensorSource[StoredT]
    prefix: str

    @staticmethod
    @abstractmethod
    def are_finite(values: StoredT) -> bool:
        """Whether a tensor of any type holds neither NaN nor inf."""

    def scope(self, name: str) -> Self:
        """Returns the view below `name`; "" is this view itself."""
        return replace(self, prefix=f"{self.prefix}{name}.") if name else self  # type: ignore[type-var]

    def has(self, name: str) -> bool:
        """Whether the tensor exists."""
        return self.prefix + name in self.source

    def scope_of(self, name: str, prefixes: Sequence[str]) -> Self:
        """Returns the first of `prefixes` below which `name` exists: checkpoints are saved with and without a head.

        Raises:
            WeightError: It exists below none of them.
        """
        for prefix in prefixes:
            scoped = self.scope(prefix)
            if scoped.has(name):
                return scoped
        candidates = " or ".join(repr(self.scope(p).prefix + name) for p in prefixes)
        raise WeightError(f"The checkpoint has no weight {candidates}.")

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredT:
        """Returns a tensor as it is stored.

        Raises:
            WeightError: It is missing or has another shape.
        """
        full_name = self.prefix + name
        if full_name not in self.source:
            raise WeightError(f"The checkpoint has no weight {full_name!r}.")
        stored = self.source.read(full_name)
        if tuple(stored.shape) != shape:
            raise WeightError(
                f"The weight {full_name!r} has the shape {list(stored.shape)}; "
                f"the configuration asks for {list(shape)}."
            )
        return stored

    def check_finite(self, name: str, stored: StoredT) -> None:
        """Refuses NaN and inf. A forward need not show them: attention, tanh and softmax make numbers of them.

        Raises:
            WeightError: It holds some.
        """
        if not self.are_finite(stored):
            raise WeightError(
                f"The weight {self.prefix + name!r} holds NaN or inf: its file is damaged, or was saved by a training "
                "that failed; download the model again, or serve another."
            )


@dataclass(frozen=True, slots=True)
class ArrayWeights(WeightView[Array]):
    """A view of arrays, in which uint16 is bfloat16. What it returns may be memory of the file.

    Attributes:
        source: The checkpoint.
        prefix: See WeightView.
    """

    source: TensorSource[Array]
    prefix: str = ""

    @staticmethod
    def are_finite(values: Array) -> bool:
        """See WeightView. Nearly always the sum alone tells, which is quick."""
        if values.dtype == np.uint16:
            return not bool((values & _BF16_INFINITY == _BF16_INFINITY).any())
        if values.dtype.kind != "f":
            return True
        with np.errstate(over="ignore", invalid="ignore"):
            return bool(np.isfinite(values.sum(dtype=np.float32)) or np.isfinite(values).all())

    def floats(self, name: str, *shape: int) -> Floats:
        """Reads one tensor in float32.

        Raises:
            WeightError: It is missing, has another shape, or holds NaN or inf.
        """
        stored = self.stored(name, shape)
        self.check_finite(name, stored)
        return as_floats(stored)

    def table(self, name: str, *shape: int) -> Array:
        """Reads a table of which a forward looks up single rows, as it is stored; errors are those of `floats`.

        NaN and inf are let pass: they cost the inputs that read their row alone, and rows that no text reaches are
        known to hold some.
        """
        return self.stored(name, shape)


def as_floats(values: Array) -> Floats:
    """Returns values of any type in float32, contiguous and aligned; a copy only where they are not."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):  # inf, which the warm-up finds
        return np.require(values, np.float32, ["C", "A"])


def cast_table(table: Array, dtype: str) -> Array:
    """Returns a copy of a table in float32, or in bfloat16 as uint16, rounded to nearest even.

    Args:
        table: As stored.
        dtype: Of the model: float32 keeps float32, the others take bfloat16.
    """
    is_bfloat16 = dtype != "float32"
    if table.dtype == np.uint16 and is_bfloat16:
        return table.copy()
    cast = np.empty(table.shape, np.uint16 if is_bfloat16 else np.float32)
    for first in range(0, len(table), _BLOCK_ROWS):
        floats = as_floats(table[first : first + _BLOCK_ROWS])
        cast[first : first + _BLOCK_ROWS] = _rounded(floats) if is_bfloat16 else floats
    return cast


def _rounded(values: Floats) -> NDArray[np.uint16]:
    """Returns float32 as bfloat16."""
    bits = values.view(np.uint32)
    nearest = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), _BF16_NAN, nearest)
