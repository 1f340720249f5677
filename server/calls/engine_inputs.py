"""Converts the inputs of a body to inputs of the engine: reads images and renders chats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from penstock.engine import RequestOptions
from penstock.engine.protocol.errors import InvalidRequestError
from penstock.engine.protocol.params import Input, Text
from penstock.engine.protocol.templates import ChatOptions

from ..schemas.chat import Chats, InputFields
from ..schemas.images import ImageChat, has_images
from .images import check_images, read_images, read_sources
from .model_call import ModelCall


async def engine_inputs(
    call: ModelCall, body: InputFields, options: RequestOptions
) -> tuple[Sequence[Input], RequestOptions]:
    """Returns the texts, images or rendered chats of a request, and the engine options.

    Chats get no prompt of the model.

    Raises:
        InvalidRequestError: The request has chats and a prompt of its own; also the errors of AsyncEngine.render_chats
            and `read_images`.
    """
    if body.messages is None:
        if body.add_special_tokens is False:
            options = replace(options, add_special_tokens=False)
        inputs = body.texts()
        if has_images(inputs):
            return await read_images(call, inputs, "input"), options
        return cast("Sequence[Text]", inputs), options
    if options.prompt:
        raise InvalidRequestError(
            "instruction and prefix have no effect on messages. Put their text into the messages.", param="messages"
        )
    options = replace(options, is_rendered=True, add_special_tokens=bool(body.add_special_tokens))
    return await _rendered_chats(call, body.messages, body.chat_options()), options


async def _rendered_chats(call: ModelCall, chats: Chats, template: ChatOptions) -> list[Input]:
    """Returns the prompt of each chat, with its images.

    A model with a separate encoder of images (CLIP) reads no images in chats. It gets the image instead of the chat.
    """
    image_chats = {i: chat for i, chat in enumerate(chats) if isinstance(chat, ImageChat)}
    if image_chats:
        check_images(call, [*image_chats.values()], "messages")
    images = await read_sources(call, [image for chat in image_chats.values() for image in chat.images], "messages")
    inputs: dict[int, Input] = {}
    if not call.info.mixes_images:
        inputs = {i: images[chat.images[0].path] for i, chat in image_chats.items()}
    messages = {i: chat.messages if isinstance(chat, ImageChat) else chat for i, chat in enumerate(chats)}
    to_render = [i for i in messages if i not in inputs]
    prompts = await call.engine.render_chats([messages[i] for i in to_render], template) if to_render else []
    for i, prompt in zip(to_render, prompts, strict=True):
        inputs[i] = prompt
        if (chat := image_chats.get(i)) is not None:
            inputs[i] = call.engine.insert_images(prompt, [images[image.path] for image in chat.images])
    return [inputs[i] for i in messages]
