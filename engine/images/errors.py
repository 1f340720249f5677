"""The error of one image. ImageEncoder adds the number of the input."""

from __future__ import annotations


class ImageError(ValueError):
    """An image that cannot be read. The message continues a sentence that begins with "Input 3"."""
