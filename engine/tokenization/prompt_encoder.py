"""Encodes texts and images for a language model that reads both: one prompt, with placeholders for the images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..images.preprocessor import ImagePreprocessor
from ..protocol.errors import InvalidRequestError, RequestTooLongError
from ..protocol.images import ImageInput, ImagePatches, MixedInput, PatchGrid
from ..protocol.messages import TokenizedInput
from ..protocol.params import Input, Text, TextOrImage
from ..protocol.templates import InputPrompts, PromptTemplate
from .model_tokenizer import Truncation
from .tokenizer import TokenizerPool

Patches = tuple[ImagePatches, ...]
_MAX_CACHED_TEXTS: Final = 64
_MAX_CACHED_CHARS: Final = 4_096
"""Characters of the longest text of a prompt whose ids are kept; it may have an instruction of the client."""


class PromptEncoder:
    """Encodes the inputs of one model. Safe to use from many tasks of one event loop.

    Every method raises the errors of TokenizerPool and of ImagePreprocessor, RequestTooLongError for images above the
    limit, and InvalidRequestError for a text with the placeholder of images.

    Args:
        prompts: Prompts of the model.
        tokenizer: Tokenizes the texts around images.
        images: Decodes images.
    """

    def __init__(self, prompts: InputPrompts, tokenizer: TokenizerPool, images: ImagePreprocessor) -> None:
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._images = images
        self._cached_prompt_ids: dict[str, NDArray[np.int32]] = {}

    async def encode(
        self,
        inputs: Sequence[Input],
        truncation: Truncation,
        *,
        instruction: str,
        is_rendered: bool,
        add_special_tokens: bool,
    ) -> list[TokenizedInput]:
        """Returns each input as one sequence.

        Args:
            inputs: At least one.
            truncation: Limit of a whole prompt. Only the input itself is truncated, and no image.
            instruction: Instruction of the prompt; "" for none.
            is_rendered: Inputs are whole prompts, such as rendered chats.
            add_special_tokens: Add the tokenizer's special tokens around a prompt.
        """
        if not self._prompts.mixes and any(isinstance(item, MixedInput) for item in inputs):
            index = next(i for i, item in enumerate(inputs) if isinstance(item, MixedInput))
            raise InvalidRequestError(
                f"Input {index} has a text and an image, but the model reads one of them. Send two inputs.",
                param="input",
            )
        add_special_tokens = add_special_tokens and (is_rendered or self._prompts.adds_special_tokens)
        image_text = self._prompts.placeholder if is_rendered else self._prompts.image_text
        patches = await self._decode(inputs)
        encoded: dict[int, TokenizedInput] = {}
        for template, has_images in ((self._prompts.text, False), (self._prompts.image, True)):
            indices = [i for i in range(len(inputs)) if bool(patches[i]) is has_images]
            if not indices:
                continue
            template = PromptTemplate() if is_rendered else template
            ends = await self._ends(template, add_special_tokens=add_special_tokens)
            for limit, positions in self._by_limit(truncation, patches, indices):
                items = [self._prompt_text(inputs[i], image_text) for i in positions]
                tokenized = await self._encode(items, template.beginning(instruction), ends, limit)
                encoded.update(zip(positions, tokenized, strict=True))
        return [self._add_patches(encoded[i], patches[i], i, truncation) for i in range(len(inputs))]

    async def pairs(
        self, pairs: Sequence[tuple[TextOrImage, TextOrImage]], truncation: Truncation, instruction: str | None
    ) -> list[TokenizedInput]:
        """Returns each pair, such as a query and a document, as one sequence in the model's prompt for pairs."""
        texts_or_images = list(dict.fromkeys(item for pair in pairs for item in pair))
        decoded = dict(zip(texts_or_images, await self._decode(texts_or_images), strict=True))
        texts = {item: self._text_of(item) for item in texts_or_images}
        patches = [(*decoded[left], *decoded[right]) for left, right in pairs]
        encoded: dict[int, TokenizedInput] = {}
        for limit, positions in self._by_limit(truncation, patches, range(len(pairs))):
            text_pairs = [(texts[left], texts[right]) for left, right in (pairs[i] for i in positions)]
            tokenized = await self._tokenizer.encode_pairs(text_pairs, limit, instruction=instruction)
            encoded.update(zip(positions, tokenized, strict=True))
        return [self._add_patches(encoded[i], patches[i], i, truncation) for i in range(len(pairs))]

    def insert_images(self, prompt: str, images: Sequence[ImageInput]) -> MixedInput:
        """Replaces the placeholders of a prompt by images. Raises InvalidRequestError if their numbers differ."""
        placeholder = self._prompts.placeholder
        texts = prompt.split(placeholder)
        if len(texts) != len(images) + 1:
            raise InvalidRequestError(
                f"The chat template renders {len(texts) - 1} placeholders {placeholder} for {len(images)} "
                "images. Remove the placeholder from texts; the server puts it in the place of each image.",
                param="messages",
            )
        parts: list[str | ImageInput] = [texts[0]]
        for image, text in zip(images, texts[1:], strict=True):
            parts += [image, text]
        return MixedInput(tuple(parts))

    def patch_grid(self, tokens: TokenizedInput, token_ids: Sequence[int]) -> PatchGrid | None:
        """Returns the grid of the vectors of an image; None without exactly one image or if its vectors are left out.

        Args:
            tokens: The input.
            token_ids: The ids of the tokens with a vector.
        """
        if len(tokens.images) != 1:
            return None
        (image,) = tokens.images
        positions = np.flatnonzero(np.array(token_ids, np.int32) == self._prompts.placeholder_id)
        cells = self._images.spec.cells(image, len(positions))
        if cells.size > len(positions):
            return None
        rows, columns = cells.shape
        return PatchGrid(rows, columns, positions[cells].ravel().tolist())

    async def _decode(self, inputs: Sequence[Input]) -> list[Patches]:
        """Returns the patches of the images of each input."""
        images = [(i, image) for i, item in enumerate(inputs) for image in _images_of(item)]
        if not images:
            return [()] * len(inputs)
        found = await self._images.preprocess([image for _, image in images], [i for i, _ in images])
        patches: list[list[ImagePatches]] = [[] for _ in inputs]
        for (i, _), image in zip(images, found, strict=True):
            patches[i].append(image)
        return [tuple(images) for images in patches]

    async def _ends(
        self, template: PromptTemplate, *, add_special_tokens: bool
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns the special tokens before a prompt, and the ids after the input."""
        ids = await self._prompt_ids(template.after)
        special = self._tokenizer.special_tokens
        if special is None or not add_special_tokens:
            return ids[:0], ids
        return special.leading, np.concatenate([ids, special.trailing])

    async def _prompt_ids(self, text: str) -> NDArray[np.int32]:
        """Returns the ids of a text before or after an input, and keeps those of the last texts for later requests."""
        if not text:
            return np.empty(0, np.int32)
        ids = self._cached_prompt_ids.pop(text, None)
        if ids is None:
            (found,) = await self._tokenizer.token_ids([text], add_special_tokens=False)
            ids = np.array(found, np.int32)
        if len(text) <= _MAX_CACHED_CHARS:
            if len(self._cached_prompt_ids) >= _MAX_CACHED_TEXTS:
                del self._cached_prompt_ids[next(iter(self._cached_prompt_ids))]
            self._cached_prompt_ids[text] = ids
        return ids

    async def _encode(
        self,
        inputs: Sequence[Text],
        before: str,
        ends: tuple[NDArray[np.int32], NDArray[np.int32]],
        truncation: Truncation,
    ) -> list[TokenizedInput]:
        """Adds the prompt around texts and never truncates it. Token ids stay as they are."""
        token_ids = {i: item for i, item in enumerate(inputs) if not isinstance(item, str)}
        encoded: dict[int, TokenizedInput] = {}
        if token_ids:
            unchanged = await self._tokenizer.encode(list(token_ids.values()), truncation.of(list(token_ids)))
            encoded.update(zip(token_ids, unchanged, strict=True))
        texts = {i: item for i, item in enumerate(inputs) if isinstance(item, str)}
        if texts:
            encoded.update(await self._encode_texts(texts, before, ends, truncation))
        return [encoded[i] for i in range(len(inputs))]

    async def _encode_texts(
        self,
        texts: dict[int, str],
        before: str,
        ends: tuple[NDArray[np.int32], NDArray[np.int32]],
        truncation: Truncation,
    ) -> dict[int, TokenizedInput]:
        leading, trailing = ends
        if len(before) > truncation.max_chars:
            raise truncation.no_space_error(f"the model's prompt and instruction have {len(before)} characters")
        before_ids = await self._prompt_ids(before)
        num_ends = len(leading) + len(trailing)
        if num_ends + len(before_ids) >= truncation.max_num_tokens:
            num_tokens = num_ends + len(before_ids)
            raise truncation.no_space_error(f"the model's prompt and special tokens take {num_tokens} tokens")
        limit = truncation.of(list(texts)).without(num_ends)
        tokenized = await self._tokenizer.encode(list(texts.values()), limit, prompt=before, add_special_tokens=False)
        encoded = dict(zip(texts, tokenized, strict=True))
        if before and self._tokenizer.truncates_left(truncation):
            # The beginning of the prompt was truncated with the text: keep it, and truncate the text alone.
            for i in [i for i, tokens in encoded.items() if tokens.is_truncated]:
                limit = truncation.of([i]).without(num_ends + len(before_ids))
                (tokens,) = await self._tokenizer.encode([texts[i]], limit, add_special_tokens=False)
                ids = np.concatenate([before_ids, tokens.token_ids])
                encoded[i] = replace(tokens, token_ids=ids, is_truncated=True)
        return {
            i: replace(tokens, token_ids=np.concatenate([leading, tokens.token_ids, trailing]))
            for i, tokens in encoded.items()
        }

    def _prompt_text(self, item: Input, image_text: str) -> Text:
        """Returns an input with a text for each image; token ids stay as they are."""
        if isinstance(item, ImageInput | MixedInput):
            return self._text_of(item, image_text)
        return item

    def _text_of(self, item: TextOrImage, image_text: str | None = None) -> str:
        if isinstance(item, str):
            return item
        image_text = self._prompts.image_text if image_text is None else image_text
        if isinstance(item, ImageInput):
            return image_text
        return "".join(part if isinstance(part, str) else image_text for part in item.parts)

    def _by_limit(
        self, truncation: Truncation, patches: Sequence[Patches], indices: Sequence[int]
    ) -> list[tuple[Truncation, list[int]]]:
        """Groups inputs by the limit of their prompts, in which each image is one placeholder.

        Args:
            truncation: Limit with all tokens of images.
            patches: Images of each input.
            indices: Inputs to group.
        """
        positions: dict[int, list[int]] = {}
        for index in indices:
            added = sum(len(self._ids_of(image)) - 1 for image in patches[index])
            if added and added + 1 >= truncation.max_num_tokens:
                num_tokens = added + len(patches[index])
                raise RequestTooLongError.over_limit(
                    f"the images of input {index} have {num_tokens} tokens",
                    "Please send fewer or smaller images.",
                    num_tokens=num_tokens,
                    max_num_tokens=truncation.max_num_tokens,
                    limit_name=truncation.name,
                    param=truncation.param,
                )
            positions.setdefault(added, []).append(index)
        return [(truncation.of(indices).without(added), indices) for added, indices in positions.items()]

    def _add_patches(
        self, tokens: TokenizedInput, patches: Patches, index: int, truncation: Truncation
    ) -> TokenizedInput:
        """Replaces the placeholder of each image by its tokens."""
        positions = np.flatnonzero(tokens.token_ids == self._prompts.placeholder_id)
        if len(positions) < len(patches) and tokens.is_truncated:
            raise truncation.no_space_error(f"truncation would remove an image of input {index}; shorten its text")
        if len(positions) != len(patches):
            raise InvalidRequestError(
                f"Input {index} contains the token {self._prompts.placeholder}, which stands for an image. Remove it; "
                "the server puts it in the place of each image.",
                param="input",
            )
        if not patches:
            return tokens
        parts = np.split(tokens.token_ids, positions)
        following = [np.concatenate([self._ids_of(i), part[1:]]) for i, part in zip(patches, parts[1:], strict=True)]
        return replace(tokens, token_ids=np.concatenate([parts[0], *following]), images=patches)

    def _ids_of(self, image: ImagePatches) -> NDArray[np.int32]:
        """Returns the tokens of an image."""
        placeholder_id, tiles = self._prompts.placeholder_id, self._prompts.tiles
        if tiles is None:
            return np.full(self._images.spec.num_tokens(image), placeholder_id, np.int32)
        return np.array(tiles.image_ids(image.grid, placeholder_id), np.int32)


def _images_of(item: Input) -> tuple[ImageInput, ...]:
    if isinstance(item, ImageInput):
        return (item,)
    return item.images if isinstance(item, MixedInput) else ()
