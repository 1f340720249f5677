"""The decoder sees only the parts of a file that it needs, and the cost of an image is known before."""

import struct
import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.engine.images.decoding import decode
from penstock.engine.images.image_file import ImageLimits, read_image_file

from .hostile import tiff, tiff_page
from .pictures import encoded, picture

_SECRET = b"<secret>"


def _files() -> Iterator[tuple[str, bytes, bytes]]:
    """Returns files with metadata, and the same files without."""
    png = encoded(picture("P", 33, 17), "PNG", transparency=bytes(range(256)))
    pixels = png[png.index(b"IDAT") - 4 : -12]
    text = struct.pack(">I", 8) + b"tEXt" + _SECRET + struct.pack(">I", zlib.crc32(b"tEXt" + _SECRET))
    yield "png", png[:33] + text + png[33:-12] + text + pixels + png[-12:] + _SECRET, png
    for mode in ("RGB", "CMYK"):  # with JFIF's and with Adobe's segment
        jpeg = encoded(picture(mode, 33, 17), "JPEG", progressive=True)
        segments = b"".join(b"\xff" + kind + struct.pack(">H", 10) + _SECRET for kind in (b"\xe1", b"\xe2", b"\xfe"))
        yield f"jpeg {mode}", jpeg[:2] + segments + b"\0\x12\xff" + jpeg[2:] + _SECRET, jpeg
    gif = encoded(picture("P", 33, 17), "GIF", transparency=3)
    start = 13 + 768
    blocks = b"!\xfe\x08" + _SECRET + b"\x08" + _SECRET + b"\0!\xff\x08" + _SECRET + b"\0\0\0"
    yield "gif", gif[:start] + blocks + gif[start:], gif
    webp = encoded(picture("RGBA", 33, 17), "WEBP")
    chunks = b"".join(kind + struct.pack("<I", 7) + _SECRET for kind in (b"EXIF", b"XMP ", b"ICCP"))
    longer = webp[:30] + chunks + webp[30:]
    yield "webp", b"RIFF" + struct.pack("<I", len(longer) - 8) + longer[8:] + _SECRET[:7], webp
    page = tiff_page(8, 8)
    marked = sorted([*page, (270, 2, 4, 1 << 20), (34_665, 4, 1, 8), (65_000, 2, 4, 1)])
    yield "tiff", tiff(marked, following=8), tiff(page) + bytes(36)


def test_metadata_never_reach_the_decoder() -> None:
    for name, data, plain in _files():
        files = [read_image_file(each, ImageLimits()) for each in (data, plain)]
        for file in files:
            assert file.data == plain, name
        np.testing.assert_array_equal(*(np.asarray(decode(file)) for file in files))


@pytest.mark.parametrize(
    ("format", "num_bytes"), [("PNG", 12), ("JPEG", 16), ("GIF", 12), ("WEBP", 20), ("BMP", 12), ("TIFF", 16)]
)
def test_memory_of_an_image_is_known_from_its_header(format: str, num_bytes: int) -> None:  # noqa: A002
    file = read_image_file(encoded(picture("RGB", 33, 17), format), ImageLimits())
    assert (file.format, file.num_bytes, file.num_decoded_pixels) == (format, 33 * 17 * num_bytes, 33 * 17)
