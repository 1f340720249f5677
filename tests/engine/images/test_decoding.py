"""Decoded images equal those of transformers for the same files."""

import io
import struct
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps, PngImagePlugin
from transformers.image_transforms import convert_to_rgb

from penstock.engine.images.decoding import decode
from penstock.engine.images.header import ImageError
from penstock.engine.images.image_file import ImageLimits, read_image_file
from penstock.engine.images.tiff import read_orientation
from penstock.engine.protocol.errors import EngineUnavailableError

from .pictures import encoded, picture

_SIZES = [(1, 1), (1, 7), (33, 17), (129, 64)]
_FILES: list[tuple[str, str, dict[str, Any]]] = [
    *(("PNG", mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")),
    ("PNG", "P", {"transparency": 3}),
    ("PNG", "P", {"transparency": bytes(range(256))}),
    ("PNG", "L", {"transparency": 3}),
    ("PNG", "RGB", {"transparency": (1, 2, 3), "icc_profile": b"x" * 70_000}),
    *(("JPEG", mode, {}) for mode in ("L", "RGB", "CMYK")),
    ("JPEG", "RGB", {"restart_marker_blocks": 2}),
    ("JPEG", "RGB", {"progressive": True, "comment": b"hello", "icc_profile": b"x" * 70_000}),
    ("WEBP", "RGB", {}),
    ("WEBP", "RGBA", {"lossless": True}),
    *(("GIF", mode, {}) for mode in ("L", "P", "RGB")),
    ("GIF", "P", {"transparency": 3, "comment": b"x" * 1_000}),
    *(("BMP", mode, {}) for mode in ("1", "L", "P", "RGB", "RGBA")),
    *(("TIFF", mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F")),
    *(("TIFF", "RGBA", {"compression": name}) for name in ("tiff_lzw", "tiff_deflate", "packbits")),
    ("TIFF", "RGB", {"compression": "jpeg"}),
    ("TIFF", "1", {"compression": "group4"}),
]


def _decoded(data: bytes) -> NDArray[np.uint8]:
    return np.asarray(decode(read_image_file(data, ImageLimits())))


def _expected(data: bytes) -> NDArray[np.uint8]:
    pixels: NDArray[np.uint8] = convert_to_rgb(ImageOps.exif_transpose(Image.open(io.BytesIO(data))), return_numpy=True)
    return pixels


@pytest.mark.parametrize(("format", "mode", "options"), _FILES)
def test_every_mode_equals_transformers(format: str, mode: str, options: dict[str, Any]) -> None:  # noqa: A002
    for seed, (width, height) in enumerate(_SIZES):
        data = encoded(picture(mode, width, height, seed), format, **options)
        file = read_image_file(data, ImageLimits(max_pixels=width * height, max_edge=max(width, height)))
        assert (file.width, file.height, file.orientation) == (width, height, 1)
        np.testing.assert_array_equal(np.asarray(decode(file)), _expected(data))


@pytest.mark.skipif(sys.platform != "linux", reason="its process needs Linux")
def test_avif_equals_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = picture("RGBA", 33, 17), picture("RGBA", 33, 17, 1)
    data = encoded(picture("RGB", 33, 17), "AVIF", orientation=6)
    as_container = data.replace(b"ftypavif", b"ftypmif1", 1)
    animation = encoded(first, "AVIF", save_all=True, append_images=[other])
    for file in (data, as_container, animation, encoded(picture("L", 1, 9), "AVIF")):
        np.testing.assert_array_equal(_decoded(file), _expected(file))
    assert _decoded(data).shape == (33, 17, 3)
    # The start of its process counts as 4 Mi pixels.
    assert read_image_file(data, ImageLimits()).num_decoded_pixels == (4 << 20) + 2 * 33 * 17
    for name in ("_START_S", "_S_PER_PIXEL", "_S_PER_BYTE"):
        monkeypatch.setattr(f"penstock.engine.images.avif_process.{name}", 1e-12)
    with pytest.raises(ImageError, match="takes too long to decode"):
        _decoded(encoded(picture("RGB", 1_500, 1_000), "AVIF", speed=10))
    for command, message in (("/nowhere/python", "at the moment: .*No such file"), ("/bin/sh", "was killed")):
        monkeypatch.setattr("sys.executable", command)
        monkeypatch.setattr("penstock.engine.images.avif_process._FLAGS", ("-c", "kill -9 $$"))
        with pytest.raises(EngineUnavailableError, match=message):
            _decoded(data)


@pytest.mark.parametrize("num_missing", [12, 6])
def test_png_without_its_last_chunk_is_read(num_missing: int) -> None:
    data = encoded(picture("RGB", 33, 17), "PNG")
    np.testing.assert_array_equal(_decoded(data[:-num_missing]), _expected(data))


def test_unusual_files_are_read() -> None:
    jpeg, bmp = encoded(picture("RGB", 33, 17), "JPEG"), encoded(picture("RGB", 33, 17), "BMP")
    for data in (
        b"BM" + struct.pack("<IIIIHHHH", 50, 0, 26, 12, 3, 2, 1, 24) + bytes(range(24)),
        bmp.replace(struct.pack("<ii", 33, 17), struct.pack("<ii", 33, -17), 1),  # rows from top to bottom
        jpeg.replace(b"\xff\xdb", b"\0\x12\xff\xff\xff\xdb", 1),  # bytes between the markers
    ):
        np.testing.assert_array_equal(_decoded(data), _expected(data))


@pytest.mark.parametrize("order", ["<", ">"])
def test_tiff_of_tiles_and_of_planes_is_read(order: str) -> None:
    def tiff(tags: dict[int, list[int]]) -> bytes:
        start = 10 + 12 * len(tags)
        directory, values = b"", np.random.default_rng(0).bytes(2_000)
        for tag, numbers in sorted(tags.items()):
            packed = struct.pack(f"{order}{len(numbers)}I", *numbers)
            at = packed if len(numbers) == 1 else struct.pack(order + "I", start + 4 + len(values))
            directory += struct.pack(order + "HHI", tag, 4, len(numbers)) + at
            values += packed if len(numbers) > 1 else b""
        head = (b"II" if order == "<" else b"MM") + struct.pack(order + "HIH", 42, 8, len(tags))
        return head + directory + bytes(4) + values

    gray = {256: [20], 257: [18], 258: [8], 259: [1], 262: [1], 277: [1]}
    places = [200 + 256 * i for i in range(5)]
    tiled = gray | {322: [16], 323: [16], 324: places[:4], 325: [256] * 4}
    planes = gray | {258: [8] * 3, 262: [2], 273: places[:3], 277: [3], 278: [18], 279: [360] * 3, 284: [2]}
    for tags in (tiled, planes, planes | {274: [6]}):
        data = tiff(tags)
        np.testing.assert_array_equal(_decoded(data), _expected(data))
    for tags, number in ((tiled | {324: places}, 4), (planes | {273: places[:4]}, 3), (gray, 1)):
        with pytest.raises(ImageError, match=f"needs {number} strips or tiles"):
            _decoded(tiff(tags))


def test_orientation_is_an_integer_in_the_first_directory() -> None:
    def exif(order: str, tag: int, kind: str, count: int = 1, start: int = 8) -> bytes:
        number = {"B": 1, "H": 3, "I": 4, "b": 6, "h": 8, "i": 9, "f": 11}[kind]
        entries = struct.pack(order + "HHIHHHHI", 270, 3, 1, 7, 0, tag, number, count) + struct.pack(order + kind, 6)
        return (b"II" if order == "<" else b"MM") + struct.pack(order + "HIH", 42, start, 2) + entries

    for order in "<>":
        for kind in "BHIbhi":
            assert read_orientation(exif(order, 274, kind)) == 6
            assert read_orientation(b"Exif\0\0" + exif(order, 274, kind)) == 6
        for other in (
            exif(order, 275, "H"),
            exif(order, 274, "f"),
            exif(order, 274, "H", 2),
            exif(order, 274, "H", 1, 99),
        ):
            assert read_orientation(other) is None
    assert read_orientation(b"XX" + exif("<", 274, "H")[2:]) is None


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_exif_orientation_is_applied(format: str) -> None:  # noqa: A002
    for orientation in range(1, 9):
        data = encoded(picture("RGB", 33, 17), format, orientation=orientation)
        pixels = _decoded(data)
        assert pixels.shape[:2] == ((17, 33) if orientation < 5 else (33, 17))
        np.testing.assert_array_equal(pixels, _expected(data))


def test_xmp_orientation_is_applied() -> None:
    xmp, png_info = b'<x tiff:Orientation="6"/>', PngImagePlugin.PngInfo()
    png_info.add_itxt("XML:com.adobe.xmp", xmp.decode())
    files = (
        ("JPEG", {"xmp": xmp}),
        ("WEBP", {"xmp": xmp}),
        ("PNG", {"pnginfo": png_info}),
        ("TIFF", {"tiffinfo": {700: xmp}}),
    )
    for format_, options in files:
        data = encoded(picture("RGB", 33, 17), format_, **options)
        np.testing.assert_array_equal(_decoded(data), _expected(data))
        assert _decoded(data).shape == (33, 17, 3)


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize("format", ["PNG", "GIF", "WEBP", "TIFF"])
def test_first_frame_of_animation_is_read(format: str, mode: str) -> None:  # noqa: A002
    first, *others = (picture(mode, 33, 17, seed) for seed in range(3))
    data = encoded(first, format, save_all=True, append_images=others)
    np.testing.assert_array_equal(_decoded(data), _expected(data))


@pytest.mark.parametrize("mode", ["1", "LA", "P", "RGBA", "I;16"])
def test_image_is_converted_in_bands(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr("penstock.engine.images.decoding._BAND_PIXELS", 100)
    sizes: list[int] = []
    convert = Image.Image.convert

    def record(image: Image.Image, mode: str) -> Image.Image:
        sizes.append(image.width * image.height)
        return convert(image, mode)

    for options in ({"transparency": bytes(range(256))}, {}) if mode == "P" else ({},):
        data = encoded(picture(mode, 33, 17), "PNG", **options)
        with monkeypatch.context() as patch:
            patch.setattr(Image.Image, "convert", record)
            pixels = _decoded(data)
        np.testing.assert_array_equal(pixels, _expected(data))
    assert set(sizes) == {33 * 3, 33 * 2}
