"""The error of one image. ImagePreprocessor adds the place of the image."""

from __future__ import annotations


class ImageError(ValueError):
    """An image that cannot be read. The message continues a sentence that begins with "Input 3" or its place."""
