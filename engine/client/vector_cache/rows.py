"""The outputs of one input as bytes: names and shapes, then the numbers as they are.

    count, then for each array: length of its name, name, number of axes, axes; zeros up to a multiple of 4; float32

On disk a digest follows, of the key and of all before it: neither a damaged row nor one that stands under the key of
another is taken for an answer.
"""

from __future__ import annotations

import math
import struct
from hashlib import blake2b
from typing import Final

import numpy as np

from ..replica import Arrays

_ALIGNMENT: Final = 4
_SEAL_BYTES: Final = 8


def pack(arrays: Arrays) -> bytes | None:
    """Returns arrays as bytes; None where a number is not finite, which no answer may hold."""
    head = [bytes([len(arrays)])]
    for name, array in arrays.items():
        head.append(struct.pack(f"<B{len(name)}sB{array.ndim}I", len(name), name.encode(), array.ndim, *array.shape))
        if not np.isfinite(array).all():
            return None
    packed = b"".join(head)
    padding = bytes(-len(packed) % _ALIGNMENT)
    return b"".join(
        (packed, padding, *(np.ascontiguousarray(array, np.float32).tobytes() for array in arrays.values()))
    )


def unpack(packed: bytes) -> Arrays:
    """Returns the arrays that `pack` was given, as views that nobody can write to."""
    shapes: dict[str, tuple[int, ...]] = {}
    place = 1
    for _ in range(packed[0]):
        end = place + 1 + packed[place]
        name, num_axes = packed[place + 1 : end].decode(), packed[end]
        shapes[name] = struct.unpack_from(f"<{num_axes}I", packed, end + 1)
        place = end + 1 + 4 * num_axes
    values = np.frombuffer(packed, np.float32, offset=place + -place % _ALIGNMENT)
    arrays: Arrays = {}
    first = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        arrays[name] = values[first : first + size].reshape(shape)
        first += size
    return arrays


def seal(key: bytes, packed: bytes) -> bytes:
    """Returns a row as it stands on disk."""
    return packed + _digest(key, packed)


def unseal(key: bytes, sealed: bytes) -> bytes | None:
    """Returns the row that was sealed under `key`; None where this is another or a damaged one."""
    packed = sealed[:-_SEAL_BYTES]
    return packed if packed and sealed[-_SEAL_BYTES:] == _digest(key, packed) else None


def _digest(key: bytes, packed: bytes) -> bytes:
    digest = blake2b(key, digest_size=_SEAL_BYTES)
    digest.update(packed)
    return digest.digest()
