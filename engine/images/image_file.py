"""Reads the headers of image files before anything is decoded.

`read_image_file` finds the format and the size of an image, and copies the parts of the file that decoding needs: one
image without colour profiles, EXIF data, comments and further frames. So the decoder never sees metadata, and the
number of pixels is known before memory is allocated.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ..protocol.config import IMAGE_PIXELS, MAX_IMAGE_PIXELS
from .avif import is_avif, read_avif
from .header import Header, ImageError
from .jpeg import read_jpeg
from .tiff import read_orientation, read_tiff

FORMATS: Final = "PNG, JPEG, WebP, AVIF, GIF, BMP or TIFF"
_MAX_CHUNKS: Final = 65_536
"""Chunks of a PNG or WebP file, and blocks of a GIF file. Each takes about a microsecond."""
_MAX_DECODED_PIXELS: Final = 1_000_000_000
"""Pixels of all scans or tiles of a file; decoding takes up to 5 ns for each."""
_SCANS_PER_PASS: Final = 8
"""Scans of a JPEG file that take as long as an image without scans. Usual files have at most ten."""
_SHOWN_BYTES: Final = 12
"""Bytes of a file in an unknown format to show in the message."""
_XMP_ORIENTATION: Final = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')

_PNG_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_PNG_CHUNKS: Final = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"))
_WEBP_CHUNKS: Final = frozenset((b"VP8X", b"VP8 ", b"VP8L", b"ALPH", b"ANIM", b"ANMF"))
_BMP_RAW, _BMP_BITFIELDS = 0, 3
_HEIC_BRANDS: Final = frozenset(b"ftyp" + brand for brand in (b"mif1", b"msf1", b"heic", b"heix"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Limits of an image; each is checked before it is decoded.

    Attributes:
        max_pixels: Width times height.
        max_edge: Pixels of the width and of the height.
    """

    max_pixels: int = IMAGE_PIXELS
    max_edge: int = 65_535

    def __post_init__(self) -> None:
        if not 0 < self.max_pixels <= MAX_IMAGE_PIXELS:
            raise ValueError(f"max_pixels is {self.max_pixels}; it must be from 1 to {MAX_IMAGE_PIXELS}.")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ImageFile:
    """An image file of known format and size.

    Attributes:
        format: Pillow's name of the format.
        data: The parts of the file that decoding needs.
        width: Pixels, before the orientation is applied.
        height: Likewise.
        orientation: The value of the EXIF tag Orientation, 1 to 8.
        num_decoded_pixels: Width times height; more for a file of many scans or large tiles, and for AVIF.
        num_bytes: Bytes of memory at most while the image is decoded and converted to RGB.
    """

    format: str
    data: bytes
    width: int
    height: int
    orientation: int
    num_decoded_pixels: int
    num_bytes: int


def read_image_file(data: bytes, limits: ImageLimits) -> ImageFile:
    """Reads the header of an image file.

    Raises:
        ImageError: The format is not supported, the header is invalid, or the image exceeds a limit.
    """
    reader = next((reader for reader in _READERS if reader.accepts(data)), None)
    if reader is None:
        if not data:
            raise ImageError(f"is empty; send an image file ({FORMATS})")
        if data[4:12] in _HEIC_BRANDS:
            raise ImageError(f"is a HEIC image, which is not supported; save it as {FORMATS}")
        start = data[:_SHOWN_BYTES].decode("latin-1")
        raise ImageError(f"is not an image in a supported format ({FORMATS}); it begins with {start!a}")
    try:
        header = reader.read(data)
    except (struct.error, IndexError, OverflowError):
        raise ImageError(f"is a truncated or corrupt {reader.name} file") from None
    _check_size(header.width, header.height, limits)
    num_decoded_pixels = max(header.num_decoded_pixels, header.width * header.height)
    if num_decoded_pixels > _MAX_DECODED_PIXELS:
        raise ImageError(
            f"is a {reader.name} file of {header.width} x {header.height} pixels whose scans or tiles have "
            f"{num_decoded_pixels} pixels together, which takes too long to decode; save it with fewer scans or tiles"
        )
    orientation = header.orientation
    if orientation is None:
        orientation = read_orientation(header.exif) or _xmp_orientation(header.xmp) or 1
    return ImageFile(
        format=reader.format,
        data=header.data,
        width=header.width,
        height=header.height,
        orientation=orientation,
        num_decoded_pixels=header.num_queued_pixels
        or max(header.width * header.height, num_decoded_pixels // _SCANS_PER_PASS),
        num_bytes=header.width * header.height * reader.bytes_per_pixel,
    )


def _check_size(width: int, height: int, limits: ImageLimits) -> None:
    if width < 1 or height < 1:
        raise ImageError(f"has {width} x {height} pixels; it must have at least one")
    if max(width, height) > limits.max_edge:
        raise ImageError(f"has {width} x {height} pixels; an edge may have at most {limits.max_edge}. Make it smaller")
    if width * height > limits.max_pixels:
        raise ImageError(
            f"has {width} x {height} pixels; an image may have at most {limits.max_pixels} in all "
            "(--max-image-pixels). Make it smaller"
        )


def _xmp_orientation(xmp: bytes) -> int | None:
    match = _XMP_ORIENTATION.search(xmp)
    return int(match[1]) if match else None


def _read_png(data: bytes) -> Header:
    """Keeps the chunks of the image; leaves out text, colour profiles and the frames of an animation."""
    width, height = struct.unpack_from(">II", data, 16)
    if data[12:16] != b"IHDR":
        raise ImageError("is a corrupt PNG file: it does not begin with IHDR")
    view = memoryview(data)
    kept, exif, xmp = [view[:8]], b"", b""
    start = 8
    is_after_pixels = False
    has_pixels = False
    for _ in range(_MAX_CHUNKS):
        if start + 8 > len(data):
            break
        length, kind = struct.unpack_from(">I4s", data, start)
        end = start + 12 + length
        if kind == b"eXIf":
            exif = exif or data[start + 8 : end - 4]
        elif kind == b"iTXt" and data.startswith(b"XML:com.adobe.xmp\0\0", start + 8):
            xmp = xmp or data[start + 8 : end - 4]
        elif kind == b"IDAT":
            has_pixels = True
        elif has_pixels:  # Pillow ends the image at any other chunk
            is_after_pixels = True
        if kind in _PNG_CHUNKS and (kind == b"IEND" or not is_after_pixels):
            kept.append(view[start:end])
        if kind == b"IEND":
            break
        start = end
    else:
        raise ImageError(f"is a PNG file with more than {_MAX_CHUNKS} chunks")
    return Header(b"".join(kept), width, height, exif=exif, xmp=xmp)


def _read_gif(data: bytes) -> Header:
    """Keeps the palette and the first frame; leaves out comments and application data."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    start = 13 + (3 << (flags & 7) + 1 if flags & 128 else 0)
    kept: list[bytes | memoryview] = [data[:start]]
    blocks = iter(range(_MAX_CHUNKS))
    for _ in blocks:
        if data[start : start + 1] == b",":
            left, top, frame_width, frame_height = struct.unpack_from("<4H", data, start + 1)
            kept.append(memoryview(data)[start:])
            # Pillow enlarges the image if the frame lies outside.
            return Header(b"".join(kept), max(width, left + frame_width), max(height, top + frame_height))
        if data[start : start + 1] == b"!":
            end = start + 2
            for _ in blocks:
                if not data[end]:
                    break
                end += data[end] + 1
            end += 1
            if data[start + 1] == 0xF9:  # the transparent colour
                kept.append(data[start:end])
            start = end
        elif data[start : start + 1] in (b";", b""):
            raise ImageError("is a corrupt GIF file: it contains no frame")
        else:
            start += 1
    raise ImageError(f"is a GIF file with more than {_MAX_CHUNKS} blocks before its frame")


def _read_webp(data: bytes) -> Header:
    """Keeps the pixels and the first frame of an animation."""
    kind = data[12:16]
    if kind == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        struct.unpack_from("<10s", data, 20)
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 ":
        width, height = (edge & 0x3FFF for edge in struct.unpack_from("<HH", data, 26))
    else:
        raise ImageError("is a corrupt WebP file: it contains no image")
    view = memoryview(data)
    kept, exif, xmp = list[memoryview](), b"", b""
    start = 12
    num_frames = 0
    for _ in range(_MAX_CHUNKS):
        if start + 8 > len(data):
            break
        name, length = struct.unpack_from("<4sI", data, start)
        end = start + 8 + length + length % 2
        num_frames += name == b"ANMF"
        if name == b"EXIF":
            exif = exif or data[start + 8 : start + 8 + length]
        elif name == b"XMP ":
            xmp = xmp or data[start + 8 : start + 8 + length]
        elif name in _WEBP_CHUNKS and (name != b"ANMF" or num_frames == 1):
            kept.append(view[start:end])
        start = end
    else:
        raise ImageError(f"is a WebP file with more than {_MAX_CHUNKS} chunks")
    body = b"".join(kept)
    return Header(b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body, width, height, exif=exif, xmp=xmp)


def _read_bmp(data: bytes) -> Header:
    (header_size,) = struct.unpack_from("<I", data, 14)
    if header_size == 12:
        width, height = struct.unpack_from("<HH", data, 18)
        return Header(data, width, height)
    width, height, _, _, compression = struct.unpack_from("<iiHHI", data, 18)
    if compression not in (_BMP_RAW, _BMP_BITFIELDS):
        raise ImageError("is a compressed BMP file, which is not supported; save it as PNG")
    return Header(data, width, abs(height))


@dataclass(frozen=True, slots=True)
class _Reader:
    """A format.

    Attributes:
        name: Name in messages.
        format: Pillow's name.
        read: Reads the header.
        accepts: Whether a file begins like this format.
        bytes_per_pixel: Memory of Pillow's decoder and of the conversion to RGB, measured.
    """

    name: str
    format: str
    read: Callable[[bytes], Header]
    accepts: Callable[[bytes], bool]
    bytes_per_pixel: int


def _begins(*signatures: bytes) -> Callable[[bytes], bool]:
    return lambda data: data.startswith(signatures)


_READERS: Final[Sequence[_Reader]] = (
    _Reader("PNG", "PNG", _read_png, _begins(_PNG_SIGNATURE), 12),
    _Reader("JPEG", "JPEG", read_jpeg, _begins(b"\xff\xd8\xff"), 16),
    _Reader("GIF", "GIF", _read_gif, _begins(b"GIF87a", b"GIF89a"), 12),
    _Reader("WebP", "WEBP", _read_webp, lambda data: data.startswith(b"RIFF") and data[8:12] == b"WEBP", 20),
    _Reader("AVIF", "AVIF", read_avif, is_avif, 32),
    _Reader("BMP", "BMP", _read_bmp, _begins(b"BM"), 12),
    _Reader("TIFF", "TIFF", read_tiff, _begins(b"II*\0", b"MM\0*"), 16),
)
