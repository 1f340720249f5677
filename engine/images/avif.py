"""Reads the size in the header of AVIF files. avif_process.py decodes them."""

from __future__ import annotations

import re
import struct
from typing import Final

from .header import Header, ImageError

_MAX_BOXES: Final = 65_536
_SIZE: Final = re.compile(rb"\0\0\0\x14ispe\0\0\0\0(.{4})(.{4})", re.DOTALL)
"""The box of a size: its length and name, version and flags, width and height."""
_BRANDS: Final = (b"avif", b"avis")
_CONTAINERS: Final = (b"mif1", b"msf1")
"""Brands of AVIF and HEIC; further brands of the file tell which."""
_START_PIXELS: Final = 4 << 20
"""Pixels of another format that take as long as the start of the process: about 0.1 seconds."""
_PIXELS_PER_PIXEL: Final = 2
"""A pixel of AVIF takes twice as long as one of lossless WebP."""


def is_avif(data: bytes) -> bool:
    """Returns whether a file begins like an AVIF file."""
    length = int.from_bytes(data[:4], "big")
    return data[4:8] == b"ftyp" and (
        data[8:12] in _BRANDS or (data[8:12] in _CONTAINERS and any(data.find(b, 16, length) > 0 for b in _BRANDS))
    )


def read_avif(data: bytes) -> Header:
    """Returns the largest size of the image's parts: thumbnails and tiles have sizes of their own.

    Raises:
        ImageError: The file has no size, or too many.
        struct.error: The file is truncated.
    """
    start, end = _find_meta(data)
    sizes = []
    for match in _SIZE.finditer(data, start, end):
        sizes.append((int.from_bytes(match[1], "big"), int.from_bytes(match[2], "big")))
        if len(sizes) > _MAX_BOXES:
            raise ImageError(f"is an AVIF file with more than {_MAX_BOXES} boxes")
    if not sizes:
        raise ImageError("is a corrupt AVIF file: its size is missing")
    width, height = max(sizes, key=lambda size: size[0] * size[1])
    num_pixels = _START_PIXELS + _PIXELS_PER_PIXEL * width * height
    return Header(data, width, height, orientation=1, num_queued_pixels=num_pixels)


def _find_meta(data: bytes) -> tuple[int, int]:
    """Returns the bounds of the box with the properties of the image."""
    start = 0
    for _ in range(_MAX_BOXES):
        length, kind = struct.unpack_from(">I4s", data, start)
        if length == 1:
            (length,) = struct.unpack_from(">Q", data, start + 8)
        end = start + length if length else len(data)
        if kind == b"meta":
            return start, min(end, len(data))
        if length < 8:
            break
        start = end
    raise ImageError("is a corrupt AVIF file: its size is missing")
