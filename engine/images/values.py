"""Images as values of rows and arguments: bytes, data URIs, paths, and images of Pillow."""

from __future__ import annotations

import binascii
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_FILE_BYTES: Final = 256 << 20
_MAX_URI_HEAD: Final = 256
_PNG_MODES: Final = frozenset(("1", "L", "LA", "P", "RGB", "RGBA", "I;16"))
_SHOWN_CHARS: Final = 100


class ImageValueError(Exception):
    """A value is no image. The message continues a sentence that begins with the location of the value."""


def read_image_value(value: object, folder: Path) -> bytes | Path:
    """Returns the bytes of an image, or the path of a file that exists.

    Args:
        value: Bytes, a data URI in base64, a path, or an object with `bytes` or `path`.
        folder: Paths are relative to it.

    Raises:
        ImageValueError: The value has another type, or the file does not exist, is empty or is too large.
    """
    if isinstance(value, Mapping):
        data = value.get("bytes")
        value = _from_base64(data) if isinstance(data, str) else data or value.get("path")
    if isinstance(value, bytes) and value:
        return value
    if isinstance(value, Path):
        return _checked_file(folder, str(value))
    if not isinstance(value, str) or not value:
        raise ImageValueError("has no image: neither the bytes of a file, nor a path, nor a data URI")
    if value[:5].lower() == "data:":
        head, comma, data = value[:_MAX_URI_HEAD].partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise ImageValueError("has a data URI without base64; send data:image/png;base64,DATA")
        content = _from_base64(value[len(head) + 1 :])
        if not content:
            raise ImageValueError("has a data URI without data")
        return content
    if value[:8].lower().startswith(("http://", "https://")):
        raise ImageValueError(f"has the URL {value[:_SHOWN_CHARS]!r}; download the images first")
    return _checked_file(folder, value)


def file_of(image: Image) -> bytes:
    """Returns an image of Pillow as a lossless file. Its EXIF orientation is applied, as in transformers.

    Raises:
        ImageValueError: The image cannot be loaded, or no format has its mode.
    """
    from PIL import ImageOps

    file = io.BytesIO()
    try:
        upright = ImageOps.exif_transpose(image)
        if upright.mode in _PNG_MODES:
            upright.save(file, "PNG", compress_level=1)
        else:
            upright.save(file, "TIFF")
    except Exception as error:
        raise ImageValueError(f"is an image of Pillow that cannot be read ({error})") from error
    return file.getvalue()


def _from_base64(data: str) -> bytes:
    try:
        return binascii.a2b_base64("".join(data.split()), strict_mode=True)
    except ValueError as error:
        raise ImageValueError(f"has an image whose base64 is not valid ({error})") from None


def _checked_file(folder: Path, name: str) -> Path:
    path = folder / name
    try:
        num_bytes = path.stat().st_size if path.is_file() else 0
    except (OSError, ValueError):  # such as a name that is too long, or has a null character
        num_bytes = 0
    if not num_bytes:
        raise ImageValueError(f"has {name[:_SHOWN_CHARS]!r}, which is no file, or an empty one")
    if num_bytes > _MAX_FILE_BYTES:
        raise ImageValueError(f"has {name[:_SHOWN_CHARS]!r}, which is larger than {_MAX_FILE_BYTES >> 20} MiB")
    return path
