"""The loaded C library with its worker threads and scratch memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from . import _abi
from ._abi import digest

LIBRARY: Final = Path(__file__).with_name("libpenstock_cpu.so")
_ALIGNMENT: Final = 64
_ARENA_BYTES: Final = 32 << 20
_NO_MEMORY: Final = "not enough memory for a forward"

Floats = NDArray[np.float32]
Array = NDArray[Any]


class CpuKernelError(Exception):
    """The library is not built or cannot run on this machine. The message states the remedy."""


class Format(IntEnum):
    """Weight type and arithmetic of a product; see csrc/types.h."""

    F32 = 0
    BF16 = 1
    DOT = 2
    INT8 = 3


class ActivationCode(IntEnum):
    """Code of the activation after a product; see csrc/compute/functions.h."""

    NONE = 0
    GELU = 1
    GELU_TANH = 2
    QUICK_GELU = 3
    RELU = 4
    SILU = 5
    TANH = 6


class OutputRows(IntEnum):
    """Rows of each sequence that a forward returns; enum Kept in types.h."""

    ALL = 0
    FIRST = 1
    LAST = 2


class PoolingCode(IntEnum):
    """Code of the pooling of a sequence; see csrc/types.h. The formulas are in penstock.kernels.pooling."""

    CLS = 0
    LAST = 1
    MEAN = 2
    MAX = 3
    MEAN_SQRT_LEN = 4
    WEIGHTED_MEAN = 5
    WEIGHTED = 6


@dataclass(frozen=True, slots=True, eq=False)
class PackedProduct:
    """A product with weights in the layout of one instruction set.

    Attributes:
        struct: The C struct.
        arrays: Arrays that the struct points to.
    """

    struct: _abi.Product
    arrays: tuple[Array, ...]

    @property
    def width(self) -> int:
        """Columns of the result."""
        return int(self.struct.outputs) // (2 if self.struct.gated else 1)


class CpuLibrary:
    """The C library, opened for one instruction set, with the worker threads ("lanes") and memory of its forwards.

    Only `pool` and `truncate_rows` may be called from several threads at once.

    Args:
        num_lanes: Number of threads for forwards. With 0, forwards are not available. `product`, `pool` and the packing
            of small products run on the calling thread; `pack` divides large products among the lanes.
        isa: Instruction set: "plain", "avx2", "avx2vnni", "avx512", "avx512vnni", "avx512bf16", "amx", or on 64-bit ARM
            "plain", "neon", "neondot", "neonmmla". None selects the last one that the processor supports.

    Raises:
        CpuKernelError: The library cannot be loaded, the processor lacks the instruction set, or threads cannot be
            started.
    """

    def __init__(self, num_lanes: int, *, isa: str | None = None, path: Path = LIBRARY) -> None:
        self._handle: int | None = None
        if not path.is_file():
            raise CpuKernelError("the native kernels are not built: run `make native` (needs a C compiler)")
        try:
            self._c = _abi.load(str(path), digest())
        except OSError as error:
            raise CpuKernelError(f"{error}; build it again: make native") from error
        name = None if isa is None else isa.encode()
        self.isa = self._c.penstock_isa(name).decode()
        if not self.isa:
            raise CpuKernelError(f"this processor does not support {isa or 'AVX2, which the native kernels need'}")
        self.num_lanes = num_lanes
        self._handle = self._c.penstock_open(name, num_lanes)
        if self._handle is None:
            raise CpuKernelError(f"cannot start {num_lanes} threads")
        bits = self._c.penstock_formats(self._handle)
        self.formats = frozenset(f for f in Format if bits >> f & 1)
        self._arena = np.empty(0, np.uint8)  # free memory for packed weights

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads and frees the memory. No forward may be running. A second call does nothing."""
        if self._handle is not None:
            self._c.penstock_close(self._handle)
            self._handle = None

    @property
    def _opened(self) -> int:
        """The C handle. Raises CpuKernelError if closed, because NULL would crash the process."""
        if self._handle is None:
            raise CpuKernelError("these native kernels are closed")
        return self._handle

    @property
    def _with_lanes(self) -> int:
        """The C handle for calls that need lanes."""
        if not self.num_lanes:
            raise CpuKernelError("these native kernels were opened with 0 lanes, and a forward needs at least 1")
        return self._opened

    def pack(
        self,
        weight_ND: Floats,
        bias_N: Floats | None,
        form: Format,
        *,
        activation: ActivationCode = ActivationCode.NONE,
        gated: bool = False,
    ) -> PackedProduct:
        """Prepares x W^T + b.

        Args:
            weight_ND: [N, D]. In a gated product the first half of the rows is the gate, the second half the values.
            bias_N: [N] or None.
            form: One of `formats`. DOT becomes BF16 if D is odd, INT8 becomes BF16 if D is no multiple of 4.
            activation: Activation of the result, or of the gate.
            gated: The result is activation(gate) * values, [.., N / 2].
        """
        num_out, num_in = weight_ND.shape
        if (form is Format.DOT and num_in % 2) or (form is Format.INT8 and num_in % 4):
            form = Format.BF16
        if form not in self.formats:
            raise CpuKernelError(f"{self.isa} does not support products in {form.name}")
        struct = _abi.Product(inputs=num_in, outputs=num_out, format=form, activation=activation, gated=gated)
        num_columns = self._c.penstock_panel_columns(self._opened, struct)
        weights = self._allocate(self._c.penstock_packed_bytes(self._opened, struct))
        bias, scales, sums = (aligned(num_columns, dtype) for dtype in (np.float32, np.float32, np.int32))
        source = np.ascontiguousarray(weight_ND, np.float32)
        source_bias = None if bias_N is None else np.ascontiguousarray(bias_N, np.float32)
        self._c.penstock_pack(
            self._opened,
            struct,
            address_of(source),
            address_of(source_bias),
            *map(address_of, (weights, bias, scales, sums)),
        )
        arrays: tuple[Array, ...] = (weights, bias)
        struct.weights = address_of(weights)
        struct.bias = address_of(bias)
        if form is Format.INT8:
            struct.scales = address_of(scales)
            struct.sums = address_of(sums)
            arrays = (*arrays, scales, sums)
        return PackedProduct(struct, arrays)

    def _allocate(self, num_bytes: int) -> Array:
        """Returns uninitialised memory for packed weights, aligned to a cache line.

        Weights share large arrays, because numpy asks for huge pages for these (from 4 MiB on). A forward reads all
        weights, and huge pages avoid most TLB misses.
        """
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._arena):
            self._arena = aligned(max(size, _ARENA_BYTES), np.uint8)
        weights = self._arena[:num_bytes]
        self._arena = self._arena[size:]
        return weights

    def product(self, packed: PackedProduct, x_RD: Floats, add: Floats | None = None) -> Floats:
        """Returns the product [R, N] of rows [R, D], plus `add` [R, N], on the calling thread.

        For the few rows of a classification head, tests and benchmarks. A row has the same bits in every batch.
        """
        x_RD = np.ascontiguousarray(x_RD, np.float32)
        rows, width = x_RD.shape
        if width != packed.struct.inputs:
            raise ValueError(f"x must be [R, {packed.struct.inputs}], got {list(x_RD.shape)}")
        result = np.empty((rows, packed.width), np.float32)
        if add is not None and (add.shape != result.shape or add.dtype != np.float32 or not add.flags.c_contiguous):
            raise ValueError(f"add must be contiguous float32 {list(result.shape)}, got {list(add.shape)}")
        inputs, scales = aligned(rows * width * 2, np.uint8), aligned(2 * rows, np.float32)
        scratch = aligned(width * 64, np.float32)
        self._c.penstock_product(
            self._opened,
            packed.struct,
            address_of(x_RD),
            address_of(add),
            rows,
            *map(address_of, (result, inputs, scales, scratch)),
        )
        return result

    @property
    def num_free(self) -> int:
        """Number of idle lanes."""
        return int(self._c.penstock_free_lanes(self._with_lanes))

    def set_wakeup_fd(self, fd: int | None) -> None:
        """Sets the file descriptor to write to when a forward ends or a lane becomes idle; None: no descriptor.

        After this call the library does not write to the previous descriptor.
        """
        self._c.penstock_set_wakeup_fd(self._with_lanes, -1 if fd is None else fd)

    def begin(self, encoder: _abi.Encoder, batch: _abi.Batch) -> int:
        """Starts a forward; see CpuEncoder. The memory of the structs must stay valid until `end` has returned.

        Returns:
            A handle for `is_done` and `end`.

        Raises:
            MemoryError: There is not enough memory.
        """
        handle = self._c.penstock_begin(self._with_lanes, encoder, batch)
        if handle is None:
            raise MemoryError(_NO_MEMORY)
        return int(handle)

    def is_done(self, handle: int) -> bool:
        """Whether `end` returns without waiting."""
        return bool(self._c.penstock_is_done(handle))

    def end(self, handle: int) -> None:
        """Waits for a forward and frees it. Must be called once per forward.

        Raises:
            MemoryError: There was not enough memory.
        """
        if not self._c.penstock_end(handle):
            raise MemoryError(_NO_MEMORY)

    def pool(
        self,
        hidden_TD: Floats,
        starts_N: Array,
        lengths_N: Array,
        pooling: PoolingCode,
        *,
        width: int,
        dimensions: Array | None,
        normalize: Array,
        skips: Array | None,
        weights: Array | None,
    ) -> Floats:
        """Pools sequences at any rows of a batch; see penstock.kernels.pooling.

        Args:
            hidden_TD: [T, D], rows contiguous.
            starts_N: [N] int32, the first row of each sequence.
            lengths_N: [N] int32, the number of rows of each sequence.
            pooling: The pooling kind.
            width: Columns of the result, 1..D.
            dimensions: [N] int32, columns to keep of each sequence, followed by zeros; None: `width`.
            normalize: [N] uint8, whether a row is L2-normalised.
            skips: [N] int32, rows to skip at the start of each sequence; None: 0.
            weights: [T] float32 for WEIGHTED; None for other kinds.

        Returns:
            [N, width] float32.
        """
        out = np.empty((len(starts_N), width), np.float32)
        self._c.penstock_pool(
            self._opened,
            pooling,
            address_of(hidden_TD),
            hidden_TD.strides[0] // 4,
            address_of(weights),
            *map(address_of, (starts_N, lengths_N, skips)),
            len(starts_N),
            width,
            *map(address_of, (dimensions, normalize, out)),
        )
        return out

    def truncate_rows(self, rows_RD: Floats, width: int, *, normalize: bool) -> Floats:
        """Truncates rows [R, D] to [R, width] and normalises them. May be called from any thread.

        Gives the same bits as `pool` with CLS and sequences of one row.

        Args:
            rows_RD: [R, D], rows contiguous.
            width: Columns of the result, 1..D.
            normalize: Whether to divide each row by max(its L2 norm, 1e-12).
        """
        out = np.empty((len(rows_RD), width), np.float32)
        stride = rows_RD.strides[0] // 4
        self._c.penstock_truncate_rows(
            self._opened, address_of(rows_RD), stride, len(rows_RD), width, normalize, address_of(out)
        )
        return out


@cache
def shared_library() -> CpuLibrary | None:
    """Returns a CpuLibrary without threads, shared by the whole process. Do not close it.

    Returns:
        None if the library is not built, was built from other sources, or does not support this processor.
    """
    try:
        return CpuLibrary(0)
    except CpuKernelError:
        return None


def has_exact_products(library: CpuLibrary) -> bool:
    """Whether products of integers are exact in every format. Takes a few milliseconds.

    The sums are below 2^24 and the largest value of each row and column is 127, so no format rounds.
    """
    random = np.random.default_rng(0)
    # The first size fills neither the last tile nor the last panel.
    for num_in, num_out in ((76, 45), (128, 64)):
        weight_ND = random.integers(-127, 128, (num_out, num_in))
        weight_ND[:, 0] = 127
        for form in library.formats:
            packed = library.pack(weight_ND.astype(np.float32), None, form)
            for num_rows in (1, 16, 17, 45):
                x_RD = random.integers(-127, 128, (num_rows, num_in))
                x_RD[:, 0], x_RD[:, -1] = 127, -127
                if not np.array_equal(library.product(packed, x_RD.astype(np.float32)), x_RD @ weight_ND.T):
                    return False
    return True


def aligned(count: int, dtype: Any) -> Array:
    """Returns an uninitialised array [count] aligned to a cache line."""
    size = count * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    shift = -ctypes.addressof(ctypes.c_char.from_buffer(raw)) % _ALIGNMENT
    return raw[shift : shift + size].view(dtype)


def address_of(array: Array | None) -> int | None:
    """Returns the address of an array's data; None for None."""
    if array is None:
        return None
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))
    except (TypeError, ValueError):  # read-only, empty or not contiguous
        return int(array.ctypes.data)  # works for every array, but takes five times as long
