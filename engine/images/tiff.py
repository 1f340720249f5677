"""Reads the first directory of TIFF files, and the orientation in EXIF data, which have the same structure.

Pillow alone is not safe: `Image.open` copies the values of all tags, which may overlap, and `load` reads the
directories that EXIF tags point to. So decoding sees only the tags in _COPIED_TAGS.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from .header import Header, ImageError
from .jpeg import MAX_MARKERS, find_scans

_MAX_TAGS: Final = 1_024
_MAX_VALUES: Final = 65_536
"""Values of a tag with integers. Only offsets and sizes of strips or tiles have many."""
_SIZES: Final = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}
"""Bytes of a value, by its type."""
_INTEGERS: Final = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i"}
_WIDTH, _HEIGHT, _COMPRESSION, _ORIENTATION, _SAMPLES, _PLANAR = 256, 257, 259, 274, 277, 284
_STRIP_OFFSETS, _ROWS_PER_STRIP, _STRIP_BYTES = 273, 278, 279
_TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_BYTES = 322, 323, 324, 325
_XMP: Final = 700
_COPIED_TAGS: Final = frozenset(
    (
        *(_WIDTH, _HEIGHT, 258, _COMPRESSION, 262, 266, _STRIP_OFFSETS, _SAMPLES, _ROWS_PER_STRIP, _STRIP_BYTES),
        *(_PLANAR, 292, 293, 317, 320, _TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_BYTES, 332, 338, 339, 347),
        *(529, 530, 531, 532),
    )
)
"""Tags that decoding needs: sizes, sample formats, offsets, palette and tables of the compression."""
_COMPRESSIONS: Final = frozenset((1, 2, 3, 4, 5, 7, 8, 32_773, 32_946))
"""None, CCITT, LZW, JPEG, deflate and PackBits."""
_RAW, _JPEG = 1, 7
_MAX_TILE_PIXELS: Final = 1 << 24
_MAX_SAMPLES: Final = 6


class _Tag(NamedTuple):
    """A tag of a directory.

    Attributes:
        entry: Its 12 bytes in the directory.
        kind: Type of the values.
        num_values: Number of values.
        data: The values.
    """

    entry: bytes
    kind: int
    num_values: int
    data: bytes


def read_tiff(data: bytes) -> Header:
    """Keeps the first page, and of its directory the tags in _COPIED_TAGS.

    Raises:
        ImageError: The file is not a supported TIFF file.
        struct.error: The file is truncated.
    """
    order = "<" if data[:1] == b"I" else ">"
    start, num_entries, tags = _read_directory(data, order)
    width, height = _integer(tags, order, _WIDTH, 0), _integer(tags, order, _HEIGHT, 0)
    num_decoded_pixels = _check_layout(tags, order, width, height, data)
    orientation = _integer(tags, order, _ORIENTATION, 0)
    xmp = tags[_XMP].data if _XMP in tags else b""
    kept = [tag.entry for number, tag in sorted(tags.items()) if number in _COPIED_TAGS]
    directory = struct.pack(order + "H", len(kept)) + b"".join(kept)
    end = start + 2 + 12 * num_entries + 4
    view = memoryview(data)
    return Header(
        b"".join((view[:start], directory, bytes(end - start - len(directory)), view[end:])),
        width,
        height,
        xmp=xmp,
        orientation=orientation if 1 <= orientation <= 8 else (None if xmp else 1),
        num_decoded_pixels=num_decoded_pixels,
    )


def read_orientation(exif: bytes) -> int | None:
    """Returns the value of the tag Orientation in EXIF data; None if they are invalid or have none."""
    exif = exif.removeprefix(b"Exif\0\0")
    if exif[:2] not in (b"II", b"MM"):
        return None
    order = "<" if exif[:1] == b"I" else ">"
    try:
        (start,) = struct.unpack_from(order + "I", exif, 4)
        (num_entries,) = struct.unpack_from(order + "H", exif, start)
        for position in range(min(num_entries, _MAX_TAGS)):
            tag, kind, count = struct.unpack_from(order + "HHI", exif, start + 2 + 12 * position)
            if tag == _ORIENTATION and kind in _INTEGERS and count == 1:
                value: int = struct.unpack_from(order + _INTEGERS[kind], exif, start + 10 + 12 * position)[0]
                return value
    except struct.error:
        return None
    return None


def _read_directory(data: bytes, order: str) -> tuple[int, int, dict[int, _Tag]]:
    """Returns the position of the first directory, its number of entries, and the tags that `read_tiff` needs.

    The values of the tags together are not larger than the file.
    """
    (start,) = struct.unpack_from(order + "I", data, 4)
    (num_entries,) = struct.unpack_from(order + "H", data, start)
    if num_entries > _MAX_TAGS:
        raise ImageError(f"is a TIFF file with more than {_MAX_TAGS} tags")
    if start < 8:
        raise ImageError("is a corrupt TIFF file: its directory overlaps the header")
    tags: dict[int, _Tag] = {}
    num_bytes = 0
    for at in range(start + 2, start + 2 + 12 * num_entries, 12):
        number, kind, count, offset = struct.unpack_from(order + "HHII", data, at)
        if kind not in _SIZES or number in tags or (number not in _COPIED_TAGS and number not in (_ORIENTATION, _XMP)):
            continue
        size = count * _SIZES[kind]
        num_bytes += size
        if num_bytes > len(data):
            raise ImageError("is a corrupt TIFF file: its tags are larger than the file")
        first = at + 8 if size <= 4 else offset
        values = data[first : first + size]
        if len(values) == size:
            tags[number] = _Tag(data[at : at + 12], kind, count, values)
    return start, num_entries, tags


def _check_layout(tags: Mapping[int, _Tag], order: str, width: int, height: int, data: bytes) -> int:
    """Returns the pixels of all strips or tiles, counted once for each scan of a JPEG file in them.

    Raises:
        ImageError: The strips or tiles are more, or larger, than the image and the file.
    """
    compression = _integer(tags, order, _COMPRESSION, _RAW)
    if compression not in _COMPRESSIONS:
        raise ImageError(f"is a TIFF file with compression {compression}, which is not supported; save it as PNG")
    is_tiled = _TILE_OFFSETS in tags and _STRIP_OFFSETS not in tags
    tile_width = _integer(tags, order, _TILE_WIDTH, 0) if is_tiled else width
    tile_height = (
        _integer(tags, order, _TILE_HEIGHT, 0)
        if is_tiled
        else min(_integer(tags, order, _ROWS_PER_STRIP, height), height)
    )
    if tile_width < 1 or tile_height < 1 or (is_tiled and tile_width * tile_height > _MAX_TILE_PIXELS):
        raise ImageError(f"is a TIFF file with tiles or strips of {tile_width} x {tile_height} pixels")
    samples = _integer(tags, order, _SAMPLES, 1)
    if not 1 <= samples <= _MAX_SAMPLES:
        raise ImageError(f"is a TIFF file with {samples} samples in a pixel; at most {_MAX_SAMPLES} are supported")
    num_planes = samples if _integer(tags, order, _PLANAR, 1) == 2 else 1
    num_tiles = -(-width // tile_width) * -(-height // tile_height)
    expected = num_tiles * num_planes
    offsets = tags.get(_TILE_OFFSETS if is_tiled else _STRIP_OFFSETS)
    starts = _integers(offsets, order)
    sizes = _integers(tags.get(_TILE_BYTES if is_tiled else _STRIP_BYTES), order)
    if offsets is None or offsets.num_values > expected:
        raise ImageError(f"is a corrupt TIFF file: it needs {expected} strips or tiles")
    if compression != _RAW and (not len(starts) == len(sizes) == offsets.num_values or sum(sizes) > len(data)):
        raise ImageError("is a corrupt TIFF file: its strips or tiles have no size, or are larger than the file")
    num_scans = num_tiles
    if compression == _JPEG:  # the sizes limit the work although several strips may have one offset
        num_scans = 0
        max_markers = MAX_MARKERS
        for start, size in zip(starts, sizes, strict=True):
            scans = find_scans(data, start, start + size, max_markers)
            num_scans += scans.num_scans
            max_markers -= scans.num_markers
    return num_scans * tile_width * tile_height


def _integer(tags: Mapping[int, _Tag], order: str, number: int, default: int) -> int:
    values = _integers(tags.get(number), order)
    return values[0] if values else default


def _integers(tag: _Tag | None, order: str) -> Sequence[int]:
    if tag is None or tag.kind not in _INTEGERS:
        return ()
    if tag.num_values > _MAX_VALUES:
        raise ImageError(f"is a TIFF file with {tag.num_values} values of a tag; at most {_MAX_VALUES} are supported")
    values = struct.unpack(f"{order}{tag.num_values}{_INTEGERS[tag.kind]}", tag.data)
    if values and min(values) < 0:
        raise ImageError(f"is a corrupt TIFF file: a tag has the value {min(values)}")
    return values
