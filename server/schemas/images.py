"""Images in request bodies, as the clients of each dialect send them.

An image is a data URI, plain base64 or an https URL. The parsers of this module do not decode it: calls/images.py reads
the images of a request after its model is known. Parsers raise ValueError for a value of the wrong type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import quote


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image that is not decoded yet.

    Attributes:
        text: A data URI, base64 or a URL.
        path: Place in the field of the body, such as `[2].image`.
    """

    text: str
    path: str


@dataclass(frozen=True, slots=True)
class MixedContent:
    """An input that holds an image beside a text or another image.

    Attributes:
        path: Place in the field of the body, such as `[2]`.
        parts: Its texts and images, in order.
    """

    path: str
    parts: tuple[str | ImageSource, ...]


@dataclass(frozen=True, slots=True)
class ImageChat:
    """The messages of a chat with at least one image.

    Attributes:
        path: Place in the field of the body, such as `[2]`; "" for the whole field.
        messages: The messages. A part of type "image" marks the position of an image.
        images: The images, in order.
        is_single: The chat holds one image and no text.
    """

    path: str
    messages: list[dict[str, Any]]
    images: tuple[ImageSource, ...]
    is_single: bool


Image = ImageSource | MixedContent
_IMAGE_TYPES: Final = frozenset((ImageSource, MixedContent))


def has_images(inputs: Iterable[object]) -> bool:
    """Returns whether an input of a body is an image."""
    return not _IMAGE_TYPES.isdisjoint(map(type, inputs))


INPUT_KEYS: Final = ("image", "url", "bytes")
"""Keys of an image in the objects of Jina's `input`. LangChain and LlamaIndex send `url` and `bytes`."""
_PART_KEYS: Final = {
    "image_url": "image_url",
    "image_base64": "image_base64",
    "input_image": "image_url",
    "image": "image",
}
"""The key of the image by the `type` of a content part: of OpenAI, Cohere and vLLM, of Voyage, and of others."""
OBJECT_KEYS: Final = ("text", "image", "content", "type", "image_url", "image_base64")
"""Keys of the objects that hold a text or an image: of Jina, of content parts, and of lists of content parts."""


def parse_image(value: Any, path: str) -> ImageSource:
    """Returns an image given as a text."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"needs an image at {path}: a data URI, base64 or an https URL, not {quote(value)}")
    return ImageSource(value, path)


def parse_image_object(value: Mapping[str, Any], path: str, keys: Sequence[str] = ("image",)) -> Image | None:
    """Returns the image of an object such as Jina's `{"image": ...}`, or None if it has none.

    MixedContent if the object also has a text or a second image. Images come before the text.

    Args:
        value: The object.
        path: Its place in the field of the body.
        keys: Keys that may have the image.
    """
    images = [parse_image(value[key], f"{path}.{key}") for key in keys if value.get(key) is not None]
    if not images:
        return None
    text = value.get("text")
    if text and not isinstance(text, str):
        raise ValueError(f"needs a text at {path}.text, not {quote(text)}")
    if len(images) > 1 or text:
        return MixedContent(path, (*images, text) if text else tuple(images))
    return images[0]


def parse_content(content: Any, path: str) -> str | Image:
    """Returns the text of `content` or its image; MixedContent for an image beside anything else.

    Args:
        content: A text, or a list of parts. Texts are joined by newlines.
        path: Place of `content` in the field of the body.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError('has no content; send {"content": [{"type": "text", "text": ...}]}')
    parts: list[str | ImageSource] = []
    for i, part in enumerate(content):
        if (image := parse_image_part(part, f"{path}[{i}]")) is not None:
            parts.append(image)
            continue
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError('has a content that is neither {"type": "text", "text": ...} nor an image')
        parts.append(part["text"])
    if all(isinstance(part, str) for part in parts):
        return "\n".join(part for part in parts if isinstance(part, str))
    filled = tuple(part for part in parts if isinstance(part, ImageSource) or part.strip())
    return filled[0] if len(filled) == 1 else MixedContent(path, filled)


def parse_image_part(part: Any, path: str) -> ImageSource | None:
    """Returns the image of a content part, or None for a part of another type."""
    kind = part.get("type") if isinstance(part, dict) else None
    key = _PART_KEYS.get(kind) if isinstance(kind, str) else None
    if key is None:
        return None
    value, path = part.get(key), f"{path}.{key}"
    if isinstance(value, dict):
        value, path = value.get("url"), f"{path}.url"
    return parse_image(value, path)
