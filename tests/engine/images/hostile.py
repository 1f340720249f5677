"""Image files made to cost much memory or time, and files that are no images."""

import struct
import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np
from PIL import Image

from .pictures import encoded, picture

_NOISE: Final = np.random.default_rng(0).bytes(2_000)


def png(width: int, height: int, pixels: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """Returns a PNG file of mode RGB with further chunks before the pixels."""
    header = (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    file = b"\x89PNG\r\n\x1a\n"
    for kind, data in (header, *chunks, (b"IDAT", pixels), (b"IEND", b"")):
        file += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return file


def tiff(entries: Sequence[tuple[int, int, int, int]], *, following: int = 0) -> bytes:
    """Returns a TIFF file of one directory with entries (tag, type, number of values, value or offset)."""
    directory = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    head = b"II*\0" + struct.pack("<IH", 8, len(entries))
    return head + directory + struct.pack("<I", following) + bytes(4_096)


def tiff_page(width: int, height: int, *others: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
    """Returns the entries of a page of 8-bit grey pixels in one strip, with `others` in addition or instead."""
    entries = {256: (4, 1, width), 257: (4, 1, height), 258: (3, 1, 8), 259: (3, 1, 1), 262: (3, 1, 1)}
    entries |= {273: (4, 1, 512), 277: (3, 1, 1), 278: (4, 1, height), 279: (4, 1, width * height)}
    entries |= {tag: (kind, count, value) for tag, kind, count, value in others}
    return [(tag, *entry) for tag, entry in sorted(entries.items())]


def tiff_with_markers(num_strips: int, num_markers: int) -> bytes:
    """Returns a TIFF file of JPEG strips of one row, each with `num_markers` markers."""
    first, strip = 8_192, b"\xff\1" * num_markers
    tags = ((257, 4, 1, num_strips), (259, 3, 1, 7), (278, 4, 1, 1))
    tags = (*tags, (273, 4, num_strips, 4_096), (279, 4, num_strips, 6_144))
    file = tiff(tiff_page(8, num_strips, *tags)).ljust(first, b"\0")
    starts, sizes = range(first, first + num_strips * len(strip), len(strip)), [len(strip)] * num_strips
    for position, values in ((4_096, starts), (6_144, sizes)):
        packed = struct.pack(f"<{num_strips}I", *values)
        file = file[:position] + packed + file[position + len(packed) :]
    return file + strip * num_strips


def jpeg_with_scans(num_scans: int, *, progressive: bool = True) -> bytes:
    """Returns a JPEG file of 800 x 800 pixels with further scans without data before its last scan."""
    file = encoded(Image.new("L", (800, 800)), "JPEG", progressive=progressive)
    last = file.rindex(b"\xff\xda")
    return file[:last] + file[last : last + 10] * num_scans + file[last:]


def _truncated(format_: str) -> bytes:
    file = encoded(picture("RGB", 200, 150), format_)
    return file[: len(file) * 2 // 3]


def attacks() -> dict[str, tuple[bytes, str]]:
    """Returns files that must be rejected, with a part of the message."""
    jpeg, gif = encoded(picture("RGB", 40, 30), "JPEG"), encoded(picture("P", 40, 30), "GIF")
    size, scans, slow = struct.pack("<HH", 40, 30), jpeg_with_scans(2_000), "takes too long to decode"
    webp = encoded(picture("RGBA", 40, 30), "WEBP", save_all=True, append_images=[picture("RGBA", 40, 30, 1)])
    jpeg_size = jpeg[jpeg.index(b"\xff\xc0") :][:19]
    avif, avif_size = encoded(Image.new("RGB", (6_000, 5_000)), "AVIF", speed=10), struct.pack(">II", 6_000, 5_000)
    rle = bytearray(encoded(picture("P", 40, 30), "BMP"))
    rle[30] = 1
    return {
        "empty": (b"", "is empty"),
        "svg": (b"<svg height='1'/>", "begins with '<svg "),
        "html": (b"<!DOCTYPE html><html></html>", "begins with '<!DOCTYPE ht'"),
        "pdf": (b"%PDF-1.7\n", "begins with '%PDF"),
        "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n", "begins with '%!PS"),
        "random bytes": (_NOISE, "not an image"),
        "png of 50,000 x 50,000": (png(50_000, 50_000, zlib.compress(bytes(1_000_000))), "50000 x 50000 pixels"),
        "png of another kind": (png(9, 9, b"").replace(b"IHDR", b"CgBI"), "does not begin with IHDR"),
        "png of no width": (png(0, 9, b""), "0 x 9 pixels"),
        "png of no height": (png(9, 0, b""), "9 x 0 pixels"),
        "png with long edge": (png(65_536, 1, zlib.compress(bytes(196_609))), "at most 65535"),
        "png with too many chunks": (png(1, 1, zlib.compress(bytes(4)), *[(b"tEXt", b"")] * 70_000), "65536 chunks"),
        "png of 8,000 x 8,000 without pixels": (png(8_000, 8_000, zlib.compress(b"")), "truncated or corrupt PNG"),
        "truncated png": (_truncated("PNG"), "truncated"),
        "truncated jpeg": (_truncated("JPEG"), "truncated"),
        "truncated webp": (_truncated("WEBP"), "truncated"),
        "truncated gif": (_truncated("GIF"), "truncated"),
        "truncated bmp": (_truncated("BMP"), "truncated"),
        "truncated tiff": (_truncated("TIFF"), "truncated"),
        "heic": (b"\0\0\0\x18ftypheic" + bytes(99), "is a HEIC image, which is not supported"),
        "truncated avif": (_truncated("AVIF"), "truncated or corrupt AVIF file"),
        "avif without size": (avif.replace(b"ispe", b"ispx"), "its size is missing"),
        "avif of 65,535 x 65,535": (avif.replace(avif_size, b"\0\0\xff\xff" * 2), "65535 x 65535 pixels"),
        "avif of more pixels": (avif.replace(avif_size, struct.pack(">II", 9, 7)), "truncated or corrupt AVIF"),
        "jpeg of 65,500 x 65,500": (
            jpeg.replace(struct.pack(">HH", 30, 40), struct.pack(">HH", 65_500, 65_500), 1),
            "65500 x 65500 pixels",
        ),
        "jpeg with too many scans": (scans, slow),
        "baseline jpeg with too many scans": (jpeg_with_scans(2_000, progressive=False), slow),
        "jpeg with comments": (jpeg[:-2] + b"\xff\xfe\0\2" * 70_000 + jpeg[-2:], "more than 65536 JPEG markers"),
        "tiff with scans": (tiff(tiff_page(800, 800, (259, 3, 1, 7), (279, 4, 1, len(scans))))[:512] + scans, slow),
        "jpeg without pixels": (jpeg[: jpeg.index(b"\xff\xda")], "ends before the pixels"),
        "jpeg that ends early": (jpeg.replace(b"\xff\xda", b"\xff\xd9"), "ends before the pixels"),
        "jpeg with too many markers": (b"\xff\xd8" + b"\xff\xd0" * 70_000, "65536 JPEG markers"),
        "jpeg with too many fill bytes": (jpeg[:2] + b"\xff" * 70_000 + jpeg[2:], "65536 JPEG markers"),
        "jpeg with markers before and in its pixels": (
            jpeg[:2] + b"\xff\xd0" * 40_000 + jpeg[2:-2] + b"\xff\x01" * 40_000 + jpeg[-2:],
            "65536 JPEG markers",
        ),
        "jpeg without size": (jpeg.replace(jpeg_size, b""), "its size is missing"),
        "jpeg with two sizes": (jpeg.replace(jpeg_size, 2 * jpeg_size), "it has two sizes"),
        "gif of 65,535 x 65,535": (gif[:6] + b"\xff\xff\xff\xff" + gif[10:], "65535 x 65535 pixels"),
        "gif with a far frame": (
            gif.replace(b",\0\0\0\0" + size, b",\xff\xff\xff\xff" + size, 1),
            "an edge may have at most 65535",
        ),
        "gif with many small blocks": (
            gif[:13] + bytes(768) + (b"!\xfe" + b"\1\1" * 9_000 + b"\0") * 8 + gif[781:],
            "more than 65536 blocks",
        ),
        "gif without frame": (gif[:13] + bytes(768) + b";", "contains no frame"),
        "gif of noise": (gif[:13] + bytes(768) + b"\1" * 70_000, "more than 65536 blocks before its frame"),
        "webp without pixels": (webp[:12] + b"ICCP" + webp[16:], "contains no image"),
        "webp with too many chunks": (webp[:30] + (b"ICCP" + bytes(4)) * 70_000, "65536 chunks"),
        "webp of 16,384 x 16,384": (webp[:24] + b"\xff\x3f\0\xff\x3f\0" + webp[30:], "16384 x 16384 pixels"),
        "bmp of 2**31 - 1 pixels": (
            encoded(picture("RGB", 9, 7), "BMP").replace(struct.pack("<i", 9), b"\xff\xff\xff\x7f", 1),
            "an edge may have at most",
        ),
        "compressed bmp": (bytes(rle), "compressed BMP"),
        "tiff with a loop of directories": (tiff([], following=8), "strips of 0 x 0 pixels"),
        "tiff with a directory in its header": (b"II*\0" + struct.pack("<I", 4) + bytes(99), "overlaps the header"),
        "tiff with 1,025 tags": (tiff([(256, 4, 1, 8)] * 1_025), "more than 1024 tags"),
        "tiff with 200 samples": (tiff(tiff_page(8, 8, (277, 3, 1, 200))), "200 samples in a pixel"),
        "tiff with large tags": (tiff(tiff_page(9, 9, (320, 3, 1 << 30, 0))), "tags are larger than the file"),
        "tiff with overlapping tags": (
            tiff(tiff_page(9, 9, (317, 1, 3_000, 8), (320, 1, 3_000, 8))),
            "tags are larger than the file",
        ),
        "tiff with markers in all strips": (tiff_with_markers(5, 15_000), "65536 JPEG markers"),
        "tiff with a long size": (
            tiff(tiff_page(8, 8, (256, 1, 70_000, 0))) + bytes(70_000),
            "70000 values of a tag; at most 65536",
        ),
        "tiff with many strips": (tiff(tiff_page(8, 8, (273, 4, 200, 512), (279, 4, 200, 512))), "it needs 1 strips"),
        "tiff with overlapping strips": (
            tiff(tiff_page(8, 8, (259, 3, 1, 5), (279, 4, 1, 1 << 20))),
            "strips or tiles have no size, or are larger",
        ),
        "tiff with huge tiles": (
            tiff([*tiff_page(8, 8)[:5], *((tag, 4, 1, 1 << 20) for tag in (322, 323, 324, 325))]),
            "tiles or strips of 1048576 x 1048576 pixels",
        ),
        "tiff with padded tiles": (
            tiff([(tag, 4, 1, size) for tag, size in ((256, 9_000), (257, 1), (322, 16), (323, 1 << 20), (324, 0))]),
            slow,
        ),
        "tiff with a negative size": (tiff(tiff_page(8, 8, (279, 9, 1, 0xFFFFFFFF))), "has the value -1"),
        "tiff with odd compression": (tiff(tiff_page(8, 8, (259, 3, 1, 34_925))), "compression 34925"),
        "tiff of 60,000 x 60,000": (tiff(tiff_page(60_000, 60_000)), "60000 x 60000 pixels"),
    }  # fmt: skip


def large_but_valid() -> dict[str, bytes]:
    """Returns files that must be read although a careless reader would need much memory or time for them."""
    rows = zlib.compress(bytes(100 * 301))
    exif = b"II*\0" + struct.pack("<IH", 8, 1_000)
    exif += b"".join(struct.pack("<HHII", 40_000 + tag, 7, 60_000, 0) for tag in range(1_000)) + bytes(50_000)
    jpeg = encoded(picture("RGB", 40, 30), "JPEG")
    segment = b"\xff\xe1" + struct.pack(">H", len(exif) + 8) + b"Exif\0\0" + exif
    gif = encoded(picture("P", 4, 4), "GIF")
    frame = gif[gif.index(b",\0\0\0\0") : -1]
    return {
        "png of 1 x 65,535": encoded(picture("RGB", 1, 65_535), "PNG"),
        "png with text bomb": png(100, 100, rows, (b"zTXt", b"k\0\0" + zlib.compress(bytes(50_000_000)))),
        "png with colour profile bomb": png(100, 100, rows, (b"iCCP", b"k\0\0" + zlib.compress(bytes(50_000_000)))),
        "png with pixels for 50 MB": png(100, 100, zlib.compress(bytes(50_000_000))),
        "jpeg with 1,000 overlapping tags": jpeg[:2] + segment + jpeg[2:],
        "jpeg with some fill bytes": jpeg[:2] + b"\xff" * 60_000 + jpeg[2:],
        "gif with a large comment": gif[:-1].replace(
            b",\0\0\0\0", b"!\xfe" + (b"\xff" + bytes(255)) * 300 + b"\0,\0\0\0\0", 1
        )
        + b";",
        "jpeg with a video": jpeg + b"\xff\xda" * 1_000_000,
        "gif with 10,000 frames": gif[:-1] + frame * 10_000 + b";",
        "tiff that repeats its directory": tiff(tiff_page(8, 8), following=8),
        "tiff with a signed width": tiff(tiff_page(8, 8, (256, 9, 1, 8))),
    }
