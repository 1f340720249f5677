"""Reads AVIF files: boxes of ISO 14496-12 and 23008-12, and the sequence headers of AV1.

libavif checks the stated size of an image only after it has decoded the frames, so their own size is read here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from .container import Header
from .errors import ImageError

_MAX_BOXES: Final = 4_096
_MAX_UNITS: Final = 256
"""Open bitstream units (OBU) of an item. An image has about four."""
_MAX_FRAMES: Final = 4
"""Frames of an item: an image has one, or one for each layer."""
_OBU_SEQUENCE_HEADER, _OBU_FRAME_HEADER, _OBU_FRAME = 1, 3, 6
_IGNORED_TYPE: Final = b"skip"
_IN_FILE, _IN_IDAT = 0, 1


@dataclass(frozen=True, slots=True)
class _Box:
    """A box.

    Attributes:
        kind: Its type.
        type_at: Position of the type in the file.
        start: First byte of its content.
        end: End of its content.
    """

    kind: bytes
    type_at: int
    start: int
    end: int


def read_avif(data: bytes) -> Header:
    """Keeps the primary image; hides EXIF and XMP data and the tracks of an animation from the decoder.

    Raises:
        ImageError: The file has no image, or its frames are larger than it states.
        struct.error: The file is truncated.
        IndexError: Likewise.
    """
    reduced = bytearray(data)
    meta: _Box | None = None
    for box in _boxes(data, 0, len(data)):
        if box.kind == b"ftyp":  # "avis" makes libavif read the tracks
            reduced[box.start : box.end] = data[box.start : box.end].replace(b"avis", b"avif").replace(b"msf1", b"mif1")
        elif box.kind == b"moov":
            reduced[box.type_at : box.type_at + 4] = _IGNORED_TYPE
        elif box.kind == b"meta" and meta is None:
            meta = box
    if meta is None:
        raise ImageError("is an AVIF file without an image")
    boxes = {box.kind: box for box in _boxes(data, meta.start + 4, meta.end)}
    if not {b"iinf", b"iloc", b"iprp"} <= boxes.keys():
        raise ImageError("is a corrupt AVIF file: boxes are missing")
    images = set[int]()
    for item, kind, type_at in _items(data, boxes[b"iinf"]):
        if kind == b"av01":
            images.add(item)
        elif kind in (b"Exif", b"mime"):
            reduced[type_at : type_at + 4] = _IGNORED_TYPE
    width, height = _largest_size(data, boxes[b"iprp"])
    num_bytes = 0
    for item, extents in _locations(data, boxes[b"iloc"], boxes.get(b"idat")):
        if item in images:
            num_bytes += sum(end - start for start, end in extents)
            if num_bytes > len(data):
                raise ImageError("is a corrupt AVIF file: its items are larger than the file")
            _check_frames(b"".join(data[start:end] for start, end in extents), width, height)
    return Header(bytes(reduced), width, height, orientation=0)


def _boxes(data: bytes, start: int, end: int) -> Iterator[_Box]:
    end = min(end, len(data))
    for _ in range(_MAX_BOXES):
        if start + 8 > end:
            return
        size, kind = struct.unpack_from(">I4s", data, start)
        content = start + 8
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, content)
            content += 8
        box_end = end if size == 0 else start + size
        if box_end < content:
            raise ImageError("is a corrupt AVIF file: a box is smaller than its header")
        yield _Box(kind, start + 4, content, min(box_end, end))
        start = box_end
    raise ImageError(f"is an AVIF file with more than {_MAX_BOXES} boxes")


def _items(data: bytes, iinf: _Box) -> Iterator[tuple[int, bytes, int]]:
    """Yields id, type and position of the type of each item."""
    count_size = 2 if data[iinf.start] == 0 else 4
    for box in _boxes(data, iinf.start + 4 + count_size, iinf.end):
        version = data[box.start]
        if box.kind == b"infe" and version >= 2:
            type_at = box.start + (8 if version == 2 else 10)
            item = int.from_bytes(data[box.start + 4 : type_at - 2], "big")
            yield item, data[type_at : type_at + 4], type_at


def _largest_size(data: bytes, iprp: _Box) -> tuple[int, int]:
    """Returns the largest width and height that the file states: that of its image, not of thumbnails or tiles."""
    width = height = 0
    for container in _boxes(data, iprp.start, iprp.end):
        if container.kind == b"ipco":
            for box in _boxes(data, container.start, container.end):
                if box.kind == b"ispe":
                    stated_width, stated_height = struct.unpack_from(">II", data, box.start + 4)
                    width, height = max(width, stated_width), max(height, stated_height)
    return width, height


def _locations(data: bytes, iloc: _Box, idat: _Box | None) -> Iterator[tuple[int, Sequence[tuple[int, int]]]]:
    """Yields the id of each item and the bounds of its parts in the file."""
    version, at = data[iloc.start], iloc.start + 4
    offset_size, length_size = data[at] >> 4, data[at] & 15
    base_size, index_size = data[at + 1] >> 4, data[at + 1] & 15 if version else 0
    at += 2

    def take(size: int) -> int:
        nonlocal at
        if at + size > iloc.end:
            raise IndexError
        at += size
        return int.from_bytes(data[at - size : at], "big")

    for _ in range(min(take(4 if version == 2 else 2), _MAX_BOXES)):
        item = take(4 if version == 2 else 2)
        method = take(2) & 15 if version else _IN_FILE
        take(2)
        base = take(base_size)
        if method == _IN_IDAT and idat is not None:
            base += idat.start
        extents = []
        for _ in range(take(2)):
            take(index_size)
            start = base + take(offset_size)
            length = take(length_size) or len(data)
            extents.append((start, min(start + length, len(data))))
        if method in (_IN_FILE, _IN_IDAT):
            yield item, extents


def _check_frames(item: bytes, width: int, height: int) -> None:
    """Raises ImageError if the frames of an item are larger than the image, or too many."""
    at = num_frames = 0
    for _ in range(_MAX_UNITS):
        if at >= len(item):
            break
        header = item[at]
        at += 2 if header & 4 else 1
        size = len(item) - at
        if header & 2:
            size, at = _leb128(item, at)
        kind = header >> 3 & 15
        num_frames += kind in (_OBU_FRAME_HEADER, _OBU_FRAME)
        if kind == _OBU_SEQUENCE_HEADER:
            frame_width, frame_height = _frame_size(item[at : at + size])
            if frame_width > width or frame_height > height:
                raise ImageError(
                    f"is a corrupt AVIF file: it states {width} x {height} pixels, but a frame has "
                    f"{frame_width} x {frame_height}"
                )
        at += size
    else:
        raise ImageError(f"is an AVIF file with more than {_MAX_UNITS} units in an item")
    if num_frames > _MAX_FRAMES:
        raise ImageError(f"is an AVIF file with {num_frames} frames in an item; at most {_MAX_FRAMES} are supported")


def _leb128(data: bytes, at: int) -> tuple[int, int]:
    """Returns an integer of variable length and the position after it."""
    value = 0
    for position in range(8):
        byte = data[at + position]
        value |= (byte & 127) << 7 * position
        if byte < 128:
            return value, at + position + 1
    raise IndexError


class _Bits:
    """Reads the bits of a sequence header."""

    def __init__(self, data: bytes) -> None:
        self._value = int.from_bytes(data[:256], "big")
        self._left = 8 * len(data[:256])

    def take(self, count: int) -> int:
        self._left -= count
        if self._left < 0:
            raise IndexError
        return self._value >> self._left & (1 << count) - 1


def _frame_size(sequence_header: bytes) -> tuple[int, int]:
    """Returns the maximum width and height of frames (AV1 specification, section 5.5.1)."""
    bits = _Bits(sequence_header)
    bits.take(4)
    if bits.take(1):  # reduced_still_picture_header
        bits.take(5)
    else:
        delay_bits = 0
        if bits.take(1):  # timing_info_present_flag
            bits.take(64)
            if bits.take(1):  # equal_picture_interval
                num_zeros = 0
                while not bits.take(1):
                    num_zeros += 1
                bits.take(num_zeros)
            if bits.take(1):  # decoder_model_info_present_flag
                delay_bits = bits.take(5) + 1
                bits.take(42)
        has_display_delay = bits.take(1)
        for _ in range(bits.take(5) + 1):
            bits.take(12)
            if bits.take(5) > 7:
                bits.take(1)
            if delay_bits and bits.take(1):
                bits.take(2 * delay_bits + 1)
            if has_display_delay and bits.take(1):
                bits.take(4)
    width_bits, height_bits = bits.take(4) + 1, bits.take(4) + 1
    return bits.take(width_bits) + 1, bits.take(height_bits) + 1
