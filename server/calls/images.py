"""Reads the images of a request: decodes data URIs and base64, and fetches URLs."""

from __future__ import annotations

import asyncio
import binascii
import io
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from penstock.engine.images.header import ImageError
from penstock.engine.images.image_file import ImageLimits, read_image_file
from penstock.engine.protocol.config import MAX_IMAGE_PIXELS
from penstock.engine.protocol.errors import InvalidRequestError
from penstock.engine.protocol.images import ImageInput, ImageSpec, MixedInput

from ..errors import quote
from ..http.image_fetcher import FetchError
from ..schemas.images import Image, ImageChat, ImageSource, MixedContent
from ..schemas.inputs import Text
from .model_call import ModelCall

FETCHES_PER_REQUEST: Final = 8
"""Images of a request that are fetched at once."""
_SLICE_CHARS: Final = 256 * 1024
"""Characters of an image that are decoded at once, which takes about 1 ms. Other requests run between two slices."""
_WHITE_SPACE: Final = " \t\n\r\f\v"
_BAD_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_LARGEST: Final = ImageLimits(max_pixels=MAX_IMAGE_PIXELS)
_HEADERS_AT_ONCE: Final = 8
"""Images whose headers are read before their memory is reserved."""
_MAX_HEAD_CHARS: Final = 256
"""Maximum characters of a data URI before its data."""


T = TypeVar("T", bound=Text)


async def read_images(call: ModelCall, inputs: Sequence[T | Image], param: str) -> list[T | ImageInput | MixedInput]:
    """Returns the inputs of a request, its images as ImageInput, and texts with images as MixedInput.

    Args:
        call: The request.
        inputs: Texts, token ids and images that are not decoded yet.
        param: Field of the body that holds the inputs.

    Raises:
        InvalidRequestError: The model reads no images, or no image beside a text, there are too many images, or an
            image is too large, is not valid base64 or cannot be fetched.
        EngineOverloadedError: Too many images are being fetched.
        LimitError: 503 if the images do not fit into the memory for bodies.
    """
    images = [item for item in inputs if isinstance(item, ImageSource | MixedContent)]
    if not images:
        return [item for item in inputs if not isinstance(item, ImageSource | MixedContent)]
    check_images(call, images, param)
    sources = [source for item in images for source in _sources_of(item)]
    read = await read_sources(call, sources, param)
    engine_inputs: list[T | ImageInput | MixedInput] = []
    for item in inputs:
        if isinstance(item, ImageSource):
            engine_inputs.append(read[item.path])
        elif isinstance(item, MixedContent):
            parts = tuple(part if isinstance(part, str) else read[part.path] for part in item.parts)
            engine_inputs.append(MixedInput(parts))
        else:
            engine_inputs.append(item)
    return engine_inputs


async def read_sources(call: ModelCall, sources: Sequence[ImageSource], param: str) -> dict[str, ImageInput]:
    """Returns the images of a request by ImageSource.path.

    Raises the errors of `read_images` except those of `check_images`.
    """
    call.num_images += len(sources)
    if call.num_images > (limit := call.context.settings.max_images_per_request):
        holder = param if call.num_images == len(sources) else "the request"
        raise InvalidRequestError(
            f"{holder} has {call.num_images} images; the limit is {limit} (--max-images-per-request). "
            "Send fewer at once.",
            param=param,
        )
    urls = {i: source for i, source in enumerate(sources) if _is_url(source.text)}
    read = {i: await _decode(call, source, param) for i, source in enumerate(sources) if i not in urls}
    if urls:
        read |= await _fetch_all(call, urls, param)
    images = [ImageInput(read[i], f"{param}{source.path}") for i, source in enumerate(sources)]
    if call.info.image_spec is not None and images:
        await _reserve_pixels(call, call.info.image_spec, images)
    return {source.path: image for source, image in zip(sources, images, strict=True)}


async def _reserve_pixels(call: ModelCall, spec: ImageSpec, images: Sequence[ImageInput]) -> None:
    """Reserves memory for the preprocessed images of a language model, which may be larger than their files.

    Raises:
        InvalidRequestError: A file is not an image of a supported format.
        LimitError: 503 if they do not fit into the memory for bodies.
    """
    for first in range(0, len(images), _HEADERS_AT_ONCE):
        some = images[first : first + _HEADERS_AT_ONCE]
        num_bytes = await asyncio.to_thread(_num_pixel_bytes, spec, some, first, call.engine.image_limits)
        call.context.admission.reserve_images(call.request.scope, num_bytes)


def _num_pixel_bytes(spec: ImageSpec, images: Sequence[ImageInput], first: int, limits: ImageLimits) -> int:
    num_bytes = 0
    for index, image in enumerate(images, first):
        try:
            file = read_image_file(image.data, limits)
        except ImageError as error:
            raise image.error(index, str(error)) from None
        num_bytes += spec.max_bytes(file.width, file.height)
    return num_bytes


def _sources_of(item: ImageSource | MixedContent) -> list[ImageSource]:
    return [item] if isinstance(item, ImageSource) else [part for part in item.parts if isinstance(part, ImageSource)]


class ImageSize(NamedTuple):
    """Properties of an image from the header of its file.

    Attributes:
        format: Such as "PNG".
        width: Pixels.
        height: Pixels.
    """

    format: str
    width: int
    height: int


class ImageUsage(NamedTuple):
    """The images of a request, for responses.

    Attributes:
        num_tokens: Tokens of all images.
        sizes: Properties of each image.
    """

    num_tokens: int
    sizes: Sequence[ImageSize]


async def image_usage(inputs: Sequence[object], num_tokens: Sequence[int]) -> ImageUsage:
    """Returns the usage of images that the engine has read.

    Args:
        inputs: Inputs of the engine.
        num_tokens: Tokens of each input.
    """
    pictured = [i for i, item in enumerate(inputs) if isinstance(item, ImageInput | MixedInput)]
    if not pictured:
        return ImageUsage(0, ())
    images = [image for i in pictured for image in _images_of(inputs[i])]
    tokens = sum(num_tokens[i] for i in pictured)
    return ImageUsage(tokens, await asyncio.to_thread(lambda: [_size(image) for image in images]))


def _images_of(item: object) -> tuple[ImageInput, ...]:
    if isinstance(item, ImageInput):
        return (item,)
    return item.images if isinstance(item, MixedInput) else ()


def _size(image: ImageInput) -> ImageSize:
    file = read_image_file(image.data, _LARGEST)
    return ImageSize(file.format, file.width, file.height)


def check_images(call: ModelCall, images: Sequence[ImageSource | MixedContent | ImageChat], param: str) -> None:
    """Raises InvalidRequestError for a model without images, or for an image beside a text that it does not read."""
    if not call.info.reads_images:
        first = images[0].images[0] if isinstance(images[0], ImageChat) and images[0].is_single else images[0]
        raise InvalidRequestError(
            f"{param}{first.path} is an image, but {call.name} reads text only. Send texts.", param=param
        )
    mixed = next((item for item in images if not _is_single(item)), None)
    if mixed is not None and not call.info.mixes_images:
        raise InvalidRequestError(
            f"{param}{mixed.path} has an image beside a text or another image, but {call.name} embeds each text and "
            "each image to a vector of its own. Send them as separate inputs.",
            param=param,
        )


def _is_single(item: ImageSource | MixedContent | ImageChat) -> bool:
    return isinstance(item, ImageSource) or (isinstance(item, ImageChat) and item.is_single)


def _is_url(text: str) -> bool:
    return text[:8].lower().startswith(("http://", "https://"))


async def _decode(call: ModelCall, source: ImageSource, param: str) -> bytes:
    """Returns the bytes of a data URI or of base64."""
    text = source.text
    where = f"{param}{source.path}"
    start = 0
    is_base64 = True
    if text[:5].lower() == "data:":
        start = text.find(",", 0, _MAX_HEAD_CHARS) + 1
        if not start:
            raise InvalidRequestError(
                f"{where} is a data URI without a comma in its first {_MAX_HEAD_CHARS} characters. "
                "Send data:image/png;base64,DATA.",
                param=param,
            )
        media, *parameters = text[5 : start - 1].lower().split(";")
        if media and not media.strip().startswith("image/"):
            raise InvalidRequestError(f"{where} is a data URI of {quote(media)}, not of an image.", param=param)
        is_base64 = parameters[-1:] == ["base64"]
    num_chars = len(text) - start
    if not num_chars:
        raise InvalidRequestError(f"{where} is an image without data.", param=param)
    has_escapes = not is_base64 or text.find("%", start) >= 0
    num_bytes = num_chars if has_escapes else num_chars * 3 // 4
    _check_size(call, num_bytes // 3 if has_escapes else num_bytes - 2, where, param)
    # Escaped base64 exists three times for a moment: unescaped, as text and as image.
    call.context.admission.reserve_images(call.request.scope, 3 * num_bytes if has_escapes else num_bytes)
    try:
        if not has_escapes:
            data = await _decode_base64(text, start)
        else:
            data = await _decode_escapes(text, start)
            if is_base64:
                data = await _decode_base64(data.decode("latin-1"), 0)
    except ValueError as error:
        kind = "base64" if is_base64 else "percent-encoding"
        raise InvalidRequestError(
            f"{where} is neither a data URI nor a URL, and is not valid base64 ({error})."
            if source.text[:5].lower() != "data:"
            else f"{where} is a data URI whose {kind} is not valid ({error}).",
            param=param,
        ) from None
    _check_size(call, len(data), where, param)
    return data


async def _decode_escapes(text: str, start: int) -> bytes:
    """Decodes percent-encoding in slices. Raises ValueError for % without two hexadecimal digits."""
    data = io.BytesIO()  # unlike a list of parts, it is not copied at the end
    while start < len(text):
        end = start + _SLICE_CHARS
        if end < len(text) and (escape := text.rfind("%", end - 2, end)) >= 0:
            end = escape  # do not split an escape
        part = text[start:end]
        if _BAD_ESCAPE.search(part):
            raise ValueError("% must precede two hexadecimal digits")
        # Quoted-printable is the same encoding with = instead of %, and binascii decodes it.
        data.write(binascii.a2b_qp(part.encode().replace(b"=", b"=3D").replace(b"%", b"=")))
        start = end
        await asyncio.sleep(0)
    return data.getvalue()


async def _decode_base64(text: str, start: int) -> bytes:
    """Decodes base64 in slices, without ASCII white space. Raises ValueError for other characters and wrong padding."""
    data = io.BytesIO()
    rest = ""
    is_padded = False
    for begin in range(start, len(text), _SLICE_CHARS):
        if begin > start:
            await asyncio.sleep(0)
        part = rest + text[begin : begin + _SLICE_CHARS]
        for space in _WHITE_SPACE:  # five times as fast as a regular expression
            part = part.replace(space, "")
        is_last = begin + _SLICE_CHARS >= len(text)
        end = len(part) if is_last else len(part) - len(part) % 4
        if (is_padded and part) or 0 <= part.find("=") < len(part) - 2:
            raise ValueError("it has = before its end")
        data.write(binascii.a2b_base64(part[:end], strict_mode=True))
        rest = part[end:]
        is_padded = is_padded or "=" in part[:end]
    return data.getvalue()


def _check_size(call: ModelCall, num_bytes: int, where: str, param: str) -> None:
    limit = call.context.settings.max_image_bytes
    if num_bytes > limit:
        raise InvalidRequestError(
            f"{where} is larger than the limit of {limit} bytes (--max-image-bytes). Send a smaller image.", param=param
        )


async def _fetch_all(call: ModelCall, sources: Mapping[int, ImageSource], param: str) -> dict[int, bytes]:
    """Returns the images of URLs. An error of one ends the others."""
    fetcher = call.context.fetcher
    admission = call.context.admission
    scope = call.request.scope
    if fetcher is None:
        raise InvalidRequestError(
            f"{param}{next(iter(sources.values())).path} is a URL, but this server fetches no images. Send a data URI "
            "(data:image/png;base64,DATA), or start the server with --allowed-media-domains HOST.",
            param=param,
        )
    admission.reserve_fetches(scope, min(len(sources), FETCHES_PER_REQUEST))
    slots = asyncio.Semaphore(FETCHES_PER_REQUEST)
    images: dict[int, bytes] = {}

    async def fetch(index: int, source: ImageSource) -> None:
        async with slots:
            try:
                images[index] = await fetcher.fetch(source.text, lambda n: admission.reserve_images(scope, n))
            except FetchError as error:
                raise InvalidRequestError(f"{param}{source.path} {error}.", param=param) from None

    try:
        async with asyncio.TaskGroup() as group:
            for index, source in sources.items():
                group.create_task(fetch(index, source))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        admission.release_fetches(scope)
    return images
