"""Reads the markers of JPEG files, also of those in the strips and tiles of TIFF files."""

from __future__ import annotations

import re
import struct
from typing import Final, NamedTuple

from .header import Header, ImageError

MAX_MARKERS: Final = 65_536
"""Markers of a file, also of all strips or tiles of a TIFF file. Each takes about a microsecond."""
_SEARCHED_BYTES: Final = 1 << 18
"""Bytes to search at once, in less than a millisecond, because a search holds the interpreter lock."""
_SOI, _EOI, _SOS, _TEM = 0xD8, 0xD9, 0xDA, 0x01
_SIZES: Final = frozenset((*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0)))
_TABLES: Final = frozenset((0xC4, 0xCC, 0xDB, 0xDC, 0xDD))
_SEGMENTS: Final = _TABLES | {_SOS, *range(0xE0, 0xF0), 0xFE}
"""Markers that may follow the pixels of a scan, with a length."""
_MARKER: Final = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
"""The end of the pixels of a scan: they contain only stuffed zeros and restart markers."""


class Scans(NamedTuple):
    """The scans of a JPEG file.

    Attributes:
        num_scans: Number of scans. The decoder runs each, also of a file that is not progressive.
        num_markers: Number of markers, the end included; at least 1.
        end: Position after the end marker.
    """

    num_scans: int
    num_markers: int
    end: int


def read_jpeg(data: bytes) -> Header:
    """Keeps the tables and the pixels.

    Leaves out application data except JFIF's and Adobe's, comments, and bytes after the image.

    Raises:
        ImageError: The file is truncated or corrupt.
        struct.error, IndexError: Likewise.
    """
    kept: list[bytes | memoryview] = [data[:2]]
    exif, xmp = list[bytes](), b""
    size: tuple[int, int] | None = None
    start = 2
    for num_markers in range(MAX_MARKERS):
        start = data.find(b"\xff", start) + 1
        if not start:
            raise ImageError("is a truncated JPEG file: it ends before the pixels")
        marker = data[start]
        if marker == 0xFF:  # a fill byte
            continue
        start += 1
        if marker in (0, _SOI, _TEM) or 0xD0 <= marker < _SOI:
            continue
        if marker == _EOI:
            raise ImageError("is a truncated JPEG file: it ends before the pixels")
        end = start + struct.unpack_from(">H", data, start)[0]
        if marker == _SOS:
            if size is None:
                raise ImageError("is a corrupt JPEG file: its size is missing")
            scans = find_scans(data, start - 2, len(data), MAX_MARKERS - num_markers)
            kept += (b"\xff\xda", memoryview(data)[start : scans.end])
            height, width = size
            num_pixels = scans.num_scans * width * height
            return Header(b"".join(kept), width, height, exif=b"".join(exif), xmp=xmp, num_decoded_pixels=num_pixels)
        segment = data[start + 2 : end]
        if marker in _SIZES:
            if size is not None:
                raise ImageError("is a corrupt JPEG file: it has two sizes")
            size = struct.unpack_from(">HH", segment, 1)
        elif marker == 0xE1 and segment.startswith(b"Exif\0\0"):
            exif.append(segment[6:])
        elif marker == 0xE1 and segment.startswith(b"http://ns.adobe.com/xap/1.0/\0"):
            xmp = segment
        is_colour = (marker == 0xE0 and segment.startswith(b"JFIF")) or (
            marker == 0xEE and segment.startswith(b"Adobe")
        )
        if is_colour or marker in _TABLES or marker in _SIZES:
            kept.append(b"\xff" + data[start - 1 : end])
        start = end
    raise _too_many_markers()


def find_scans(data: bytes, start: int, end: int, max_markers: int) -> Scans:
    """Counts the scans of the JPEG file between two positions. `start` may be within the file.

    Raises:
        ImageError: There are more than `max_markers` markers. MAX_MARKERS limits all markers of a file.
    """
    num_scans = 0
    for num_markers in range(1, max_markers + 1):
        start = _next_marker(data, start, end)
        if start >= end:
            return Scans(num_scans, num_markers, end)
        marker = data[start + 1]
        start += 2
        if marker == _EOI:
            return Scans(num_scans, num_markers, start)
        num_scans += marker == _SOS
        if marker in _SEGMENTS:
            start += max(int.from_bytes(data[start : start + 2], "big"), 2)
    raise _too_many_markers()


def _too_many_markers() -> ImageError:
    return ImageError(f"has more than {MAX_MARKERS} JPEG markers, which take too long to read; save it again")


def _next_marker(data: bytes, start: int, end: int) -> int:
    """Returns the position of the next marker; `end` if there is none."""
    for first in range(start, end, _SEARCHED_BYTES):
        if match := _MARKER.search(data, first, min(first + _SEARCHED_BYTES + 1, end)):
            return match.start()
    return end
