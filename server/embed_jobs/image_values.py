"""Images as values of rows: the bytes of a file, a data URI, a path, or the objects of Hugging Face's datasets."""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ..errors import quote

SUFFIXES: Final = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"))
"""Of the files that a folder of images may have."""
_MAX_FILE_BYTES: Final = 1 << 28
_MAX_URI_HEAD: Final = 256


class ImageValueError(Exception):
    """A value is no image. The message is the reason for a bad row."""


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
    if not isinstance(value, str) or not value:
        raise ImageValueError("has no image: neither the bytes of a file, nor a path, nor a data URI")
    if value[:5].lower() == "data:":
        head, comma, data = value[:_MAX_URI_HEAD].partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise ImageValueError("has a data URI without base64; send data:image/png;base64,DATA")
        return _from_base64(value[len(head) + 1 :])
    if value[:8].lower().startswith(("http://", "https://")):
        raise ImageValueError(f"has the URL {quote(value)}; download the images first")
    return _checked_file(folder, value)


def _from_base64(data: str) -> bytes:
    try:
        return binascii.a2b_base64(data, strict_mode=True)
    except ValueError as error:
        raise ImageValueError(f"has an image whose base64 is not valid ({error})") from None


def _checked_file(folder: Path, name: str) -> Path:
    path = folder / name
    try:
        num_bytes = path.stat().st_size if path.is_file() else 0
    except (OSError, ValueError):  # such as a name that is too long, or has a null character
        num_bytes = 0
    if not num_bytes:
        raise ImageValueError(f"has {quote(name)}, which is no file, or an empty one")
    if num_bytes > _MAX_FILE_BYTES:
        raise ImageValueError(f"has {quote(name)}, which is larger than 256 MiB")
    return path
