"""The header of an image file, as the reader of each format returns it, and the error of an image."""

from __future__ import annotations

from dataclasses import dataclass


class ImageError(ValueError):
    """An image that cannot be read. The message continues a sentence that begins with "Input 3" or its place."""


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """Contents of a header.

    Attributes:
        data: The parts of the file that decoding needs.
        width: Pixels.
        height: Pixels.
        exif: EXIF data, which begin with a TIFF header; empty without any.
        xmp: XMP data; empty without any.
        orientation: The orientation, if the format has it elsewhere; None: it is in `exif` or `xmp`.
        num_decoded_pixels: Pixels of all scans or tiles; 0: width times height.
        num_queued_pixels: Pixels of another format that take as long to decode; 0: by `num_decoded_pixels`.
    """

    data: bytes
    width: int
    height: int
    exif: bytes = b""
    xmp: bytes = b""
    orientation: int | None = None
    num_decoded_pixels: int = 0
    num_queued_pixels: int = 0
