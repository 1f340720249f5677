"""Headers of AVIF files that Pillow does not write."""

from __future__ import annotations

import struct

import pytest

from penstock.engine.images.avif import _check_frames, _frame_size, read_avif
from penstock.engine.images.errors import ImageError

from .pictures import encoded, picture


def _bits(*fields: tuple[int, int]) -> bytes:
    """Packs (value, number of bits)."""
    text = "".join(f"{value:0{count}b}" for value, count in fields)
    return int(text.ljust(-(-len(text) // 8) * 8, "0"), 2).to_bytes(-(-len(text) // 8), "big")


_SIZE = ((11, 4), (11, 4), (3_999, 12), (2_999, 12))
_LEVEL = ((0, 12), (8, 5), (1, 1))
"""Operating point, its level and its tier."""
_HEADERS = [
    _bits((0, 3), (1, 1), (1, 1), (8, 5), *_SIZE),  # reduced
    _bits((0, 5), (0, 1), (0, 1), (0, 5), *_LEVEL, *_SIZE),
    _bits((0, 5), (0, 1), (1, 1), (1, 5), *(2 * (*_LEVEL, (1, 1), (5, 4))), *_SIZE),  # display delays
    _bits((0, 5), (1, 1), (1, 64), (0, 1), (0, 1), (0, 1), (0, 5), *_LEVEL, *_SIZE),  # timing
    _bits(  # timing with equal intervals, decoder model with delays of 10 bits
        *((0, 5), (1, 1), (1, 64), (1, 1), (1, 3), (1, 2), (1, 1), (9, 5), (0, 42)),
        *((0, 1), (0, 5), *_LEVEL, (1, 1), (77, 21), *_SIZE),
    ),
]  # fmt: skip


@pytest.mark.parametrize("header", _HEADERS)
def test_frame_size_is_read_from_every_sequence_header(header: bytes) -> None:
    assert _frame_size(header) == (4_000, 3_000)


@pytest.mark.parametrize("position", range(1, 8))
def test_truncated_sequence_header_is_an_index_error(position: int) -> None:
    with pytest.raises(IndexError):
        _frame_size(_HEADERS[1][:position])


def _unit(kind: int, content: bytes, *, has_extension: bool = False) -> bytes:
    length = bytes((len(content) & 127 | 128, len(content) >> 7))
    return bytes((kind << 3 | 2 | 4 * has_extension,)) + bytes(has_extension) + length + content


def test_frames_of_an_item_are_counted_and_measured() -> None:
    header = _unit(1, _HEADERS[0], has_extension=True)
    _check_frames(header + _unit(6, bytes(200)) * 4, 4_000, 3_000)
    with pytest.raises(ImageError, match="5 frames in an item; at most 4"):
        _check_frames(header + _unit(6, bytes(200)) * 3 + _unit(3, b"") * 2, 4_000, 3_000)
    with pytest.raises(ImageError, match="more than 256 units"):
        _check_frames(_unit(2, b"") * 257, 4_000, 3_000)
    with pytest.raises(ImageError, match="states 4000 x 2999 pixels, but a frame has 4000 x 3000"):
        _check_frames(header, 4_000, 2_999)
    _check_frames(bytes((6 << 3,)) + bytes(9), 1, 1)  # the last unit needs no length


def test_boxes_with_64_bit_sizes_are_read() -> None:
    file = encoded(picture("RGB", 20, 15), "AVIF", speed=10)
    at = file.index(b"mdat") - 4
    (size,) = struct.unpack_from(">I", file, at)
    assert at + size == len(file)
    offset = file.index(b"iloc") + 4 + 4 + 2 + 2 + 2 + 2 + 2  # up to the position of the first item
    (start,) = struct.unpack_from(">I", file, offset)
    assert start == at + 8
    moved = file[:offset] + struct.pack(">I", start + 8) + file[offset + 4 : at]
    header = read_avif(moved + struct.pack(">I4sQ", 1, b"mdat", size + 8) + file[at + 8 :])
    assert (header.width, header.height) == (20, 15)


def test_overlapping_items_are_rejected() -> None:
    file = encoded(picture("RGBA", 20, 15), "AVIF", speed=10)  # items of colour and of alpha
    at = file.index(b"iloc") + 4 + 4 + 2 + 2 + 2 + 2 + 2
    for offset in (at, at + 14):
        file = file[:offset] + struct.pack(">II", 0, len(file)) + file[offset + 8 :]
    with pytest.raises(ImageError, match="items are larger than the file"):
        read_avif(file)


@pytest.mark.parametrize("kind", [b"iinf", b"iloc", b"iprp"])
def test_missing_box_is_named_as_corrupt(kind: bytes) -> None:
    file = encoded(picture("RGB", 20, 15), "AVIF", speed=10).replace(kind, b"free")
    with pytest.raises(ImageError, match="boxes are missing"):
        read_avif(file)
