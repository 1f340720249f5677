"""The forms of inputs that LLM accepts: texts, token ids, images, and objects that contain a text, ids or an image."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from .images.values import ImageValueError, file_of, read_image_value
from .protocol.errors import InvalidRequestError
from .protocol.images import ImageInput, MixedInput
from .protocol.params import Text

if TYPE_CHECKING:
    from PIL.Image import Image

ImageSource: TypeAlias = "bytes | Path | Image | ImageInput"
"""An image: the bytes of its file, its path, or an image of Pillow."""
Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, Any] | ImageSource | MixedInput"
Side: TypeAlias = "str | Mapping[str, Any] | ImageSource | MixedInput"


def inputs_of(prompts: Any) -> list[Text | UnreadImage | MixedInput]:
    """Returns the inputs of `embed`, `classify` or `encode`. Raises InvalidRequestError for an unknown form."""
    if _is_single(prompts) or (len(prompts) and isinstance(prompts[0], int | np.integer)):
        return [_input(prompts, 0)]
    return [_input(prompt, index) for index, prompt in enumerate(prompts)]


def sides_of(values: Any) -> list[Any]:
    """Returns the queries or documents of `score`. Raises InvalidRequestError for an unknown form."""
    sides = [values] if _is_single(values) else list(values)
    return [side if isinstance(side, str) else _input(side, index) for index, side in enumerate(sides)]


def _input(prompt: Any, index: int) -> Text | UnreadImage | MixedInput:
    given = prompt
    if isinstance(prompt, MixedInput):
        return prompt
    if isinstance(prompt, Mapping) and prompt.get("image") is not None:
        return UnreadImage(prompt["image"], prompt.get("text"))
    if isinstance(prompt, bytes | Path | ImageInput) or _is_picture(prompt):
        return UnreadImage(prompt, None)
    if isinstance(prompt, Mapping):
        given = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(given, str):
        return given
    if isinstance(given, Sequence | np.ndarray) and all(isinstance(i, int | np.integer) for i in given):
        return [int(i) for i in given]
    raise InvalidRequestError(
        f"Input {index} is {str(prompt)[:60]!r}; it must be a text, token ids, an image, or an object with prompt, "
        "prompt_token_ids or image.",
        param="input",
    )


class UnreadImage(NamedTuple):
    """An input with an image that is not read yet.

    Attributes:
        image: The image in one of the forms of LLM.embed.
        text: Text after the image; None: there is none.
    """

    image: Any
    text: str | None

    def read(self, index: int) -> ImageInput | MixedInput:
        """Reads the image. Raises InvalidRequestError, which names `index`."""
        try:
            if isinstance(self.image, ImageInput):
                image = self.image
            else:
                file = file_of(self.image) if _is_picture(self.image) else read_image_value(self.image, Path())
                image = ImageInput(file if isinstance(file, bytes) else file.read_bytes())
        except ImageValueError as error:
            raise InvalidRequestError(f"Input {index} {error}.", param="input") from error
        except OSError as error:
            raise InvalidRequestError(f"Input {index} cannot be read ({error}).", param="input") from error
        return image if self.text is None else MixedInput((image, self.text))


async def read_images(inputs: Sequence[Any]) -> list[Any]:
    """Reads the images of inputs, in a thread. Raises InvalidRequestError, which names the index of the input."""
    if not any(isinstance(item, UnreadImage) for item in inputs):
        return list(inputs)

    def read() -> list[Any]:
        return [item.read(index) if isinstance(item, UnreadImage) else item for index, item in enumerate(inputs)]

    return await asyncio.to_thread(read)


def _is_single(value: Any) -> bool:
    return isinstance(value, (str, bytes, Mapping, Path, ImageInput, MixedInput)) or _is_picture(value)


def _is_picture(value: object) -> bool:
    """Returns whether a value is an image of Pillow, without an import of Pillow."""
    return any(kind.__module__ == "PIL.Image" and kind.__name__ == "Image" for kind in type(value).__mro__)
