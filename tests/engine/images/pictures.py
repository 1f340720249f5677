"""Random pictures of every mode, and their files."""

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

_CHANNELS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}


def picture(mode: str, width: int, height: int, seed: int = 0) -> Image.Image:
    """Returns a picture of random pixels."""
    rng = np.random.default_rng(seed)
    shape = (height, width)
    if mode == "1":
        return Image.fromarray(rng.integers(0, 2, shape, np.uint8) * 255).convert("1")
    if mode == "P":
        image = Image.frombytes("P", (width, height), rng.integers(0, 256, shape, np.uint8).tobytes())
        image.putpalette(rng.integers(0, 256, 768, np.uint8).tobytes())
        return image
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 65_536, shape, np.uint16))
    if mode == "I":
        return Image.fromarray(rng.integers(-1_000, 65_536, shape, np.int32))
    if mode == "F":
        return Image.fromarray(rng.random(shape, np.float32) * 300)
    return Image.frombytes(mode, (width, height), rng.integers(0, 256, (*shape, _CHANNELS[mode]), np.uint8).tobytes())


def encoded(image: Image.Image, format: str, *, orientation: int | None = None, **options: Any) -> bytes:  # noqa: A002
    """Returns the file of a picture."""
    if orientation is not None:
        exif = Image.Exif()
        exif[0x010E] = "a description"
        exif[0x0112] = orientation
        options["exif"] = exif
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def colored(color: str, format: str = "PNG", size: tuple[int, int] = (4, 3)) -> bytes:  # noqa: A002
    """Returns the file of a picture of one colour."""
    return encoded(Image.new("RGB", size, color), format)


def data_uri(image: Image.Image) -> str:
    """Returns a picture as a data URI of a PNG file."""
    return "data:image/png;base64," + base64.b64encode(encoded(image, "PNG")).decode()
