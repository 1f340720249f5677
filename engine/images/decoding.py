"""Decodes an image file to RGB, as transformers' image processors see it.

EXIF orientation is applied (transformers' `load_image`). Transparent images are laid on white, other modes are
converted by Pillow (transformers' `convert_to_rgb`); 16-bit values and floats are converted as Pillow does. Colour
profiles are ignored.
"""

from __future__ import annotations

import io
from typing import Final

from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
    features,
)

from ..protocol.errors import EngineUnavailableError
from .avif_process import decode_avif
from .header import ImageError
from .image_file import ImageFile

PLUGINS: Final = (BmpImagePlugin, GifImagePlugin, JpegImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin)
"""Imported before the first image: otherwise Pillow would import all its plugins then."""
_OPTIONAL: Final = ("WEBP", "AVIF")
"""Formats that Pillow may be built without."""
_BAND_PIXELS: Final = 1 << 17
"""Pixels to convert at a time: Pillow holds the interpreter lock for 22 ns per transparent pixel."""
_TRANSPOSES: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(file: ImageFile) -> Image.Image:
    """Returns the first frame or page of a file as an upright image of mode RGB.

    Raises:
        ImageError: The file is corrupt, truncated, or has a colour mode that cannot be converted to RGB.
        EngineUnavailableError: No process can be started for an AVIF file.
    """
    if file.format in _OPTIONAL and not features.check(file.format.lower()):
        raise ImageError(f"is a {file.format} image, which this server's Pillow cannot read; send PNG or JPEG")
    try:
        rgb = _load(file)  # the decoder's memory is free again
        transpose = _TRANSPOSES.get(file.orientation)
        return rgb if transpose is None else rgb.transpose(transpose)
    except (ImageError, EngineUnavailableError):
        raise
    except Exception as error:  # noqa: BLE001 - Pillow raises errors of many types for corrupt files
        raise ImageError(f"is a truncated or corrupt {file.format} file ({_reason(error)})") from None


def _load(file: ImageFile) -> Image.Image:
    if file.format == "AVIF":
        return _to_rgb(decode_avif(file.data, file.width, file.height))
    with Image.open(io.BytesIO(file.data), formats=[file.format]) as image:
        if image.width > file.width or image.height > file.height:
            raise ImageError(f"is a corrupt {file.format} file: its headers contradict each other")
        image.load()
        return _to_rgb(image)


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):  # its message shows an object
        return "its header is invalid"
    return str(error) or type(error).__name__


def _to_rgb(image: Image.Image) -> Image.Image:
    """Converts an image in bands of rows."""
    is_transparent = "A" in image.getbands() or image.info.get("transparency") is not None
    if image.mode == "RGB" and not is_transparent:
        return image
    convert = _on_white if is_transparent else _converted
    width, height = image.size
    if width * height <= _BAND_PIXELS:
        return convert(image)
    rgb = Image.new("RGB", image.size)
    rows = max(_BAND_PIXELS // width, 1)
    for top in range(0, height, rows):
        rgb.paste(convert(image.crop((0, top, width, min(top + rows, height)))), (0, top))
    return rgb


def _converted(image: Image.Image) -> Image.Image:
    return image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
