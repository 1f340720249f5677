"""Language models that read images as a part of their input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final


class ImageProcessor(StrEnum):
    """Image processors of transformers, by the beginning of their class names.

    Attributes:
        QWEN2_VL: Resizes to an area; blocks of patches are tokens.
        SIGLIP: Resizes to one size; patches are tokens.
        GEMMA4: Resizes to a number of patches; blocks of patches are tokens.
        IDEFICS3: Cuts a page into tiles and adds the whole page as a tile.
    """

    QWEN2_VL = "Qwen2VL"
    SIGLIP = "Siglip"
    GEMMA4 = "Gemma4"
    IDEFICS3 = "Idefics3"


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePrompts:
    """The prompts of a model with one vector per token for pages and queries (ColPali). Defaults of its processor.

    Attributes:
        class_name: Class of the model in transformers.
        page: Prompt of a page. {image} stands for the image, {bos} for the bos_token of the tokenizer, {prefix} for the
            value `visual_prompt_prefix` of the processor.
        prefix: Default of `visual_prompt_prefix`. If it has the placeholder of images, it is the whole prompt.
        query: Text before a query. {bos} likewise, {prefix} for `query_prefix` of the processor.
        query_prefix: Default of `query_prefix`.
        expansion: Token after a query; None: the tokenizer's pad_token.
        after_query: Text after these tokens.
        adds_special_tokens: The tokenizer's special tokens are added around prompts.
    """

    class_name: str
    page: str = "{prefix}"
    prefix: str
    query: str = "{prefix}"
    query_prefix: str
    expansion: str | None = None
    after_query: str = ""
    adds_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionLanguageFamily:
    """Facts about one model_type.

    Attributes:
        processor: Its image processor.
        image_text: Text of one image in a prompt; "": config.json names the ids of its three tokens.
        placeholder: The token in `image_text` that the rows of the image replace; "" likewise.
        has_chat: Embedding models render an input with the chat template. Otherwise the prompt precedes texts.
        instruction: Default instruction of embedding models without sentence-transformers' files.
        pages: Prompts of a model with one vector per token; None: the model makes one vector or score of an input.
    """

    processor: ImageProcessor
    image_text: str = ""
    placeholder: str = ""
    has_chat: bool = True
    instruction: str = ""
    pages: PagePrompts | None = None


UNREADABLE: Final = "penstock reads images only with the families in docs/models.md, and no audio or video."
"""Reason in errors about models with other inputs than text."""
_QWEN_IMAGE: Final = "<|vision_start|><|image_pad|><|vision_end|>"
NUM_EXPANSIONS: Final = 10
"""Tokens after a query of PagePrompts."""
VISION_LANGUAGE: Final = {
    # The code beside the weights of Qwen3-VL-Embedding; Li et al., arXiv 2601.04720.
    "qwen3_vl": VisionLanguageFamily(
        processor=ImageProcessor.QWEN2_VL,
        image_text=_QWEN_IMAGE,
        placeholder="<|image_pad|>",
        instruction="Represent the user's input.",
    ),
    "embedding_gemma2": VisionLanguageFamily(processor=ImageProcessor.GEMMA4, has_chat=False),
    # Faysse et al., ColPali, arXiv 2407.01449.
    "colpali": VisionLanguageFamily(
        processor=ImageProcessor.SIGLIP,
        image_text="<image>",
        placeholder="<image>",
        pages=PagePrompts(
            class_name="ColPaliForRetrieval",
            page="{image}{bos}{prefix}\n",
            prefix="Describe the image.",
            query="{bos}{prefix}",
            query_prefix="Question: ",
            after_query="\n",
            adds_special_tokens=False,
        ),
    ),
    "colqwen2": VisionLanguageFamily(
        processor=ImageProcessor.QWEN2_VL,
        image_text=_QWEN_IMAGE,
        placeholder="<|image_pad|>",
        pages=PagePrompts(
            class_name="ColQwen2ForRetrieval",
            prefix=f"<|im_start|>user\n{_QWEN_IMAGE}Describe the image.<|im_end|><|endoftext|>",
            query_prefix="Query: ",
            after_query="\n",
        ),
    ),
    # Teiletche et al., ModernVBERT, arXiv 2510.01149.
    "colmodernvbert": VisionLanguageFamily(
        processor=ImageProcessor.IDEFICS3,
        image_text="<image>",
        placeholder="<image>",
        pages=PagePrompts(
            class_name="ColModernVBertForRetrieval",
            prefix="<|begin_of_text|>User:<image>Describe the image.<end_of_utterance>\nAssistant:",
            query_prefix="",
            expansion="<end_of_utterance>",
        ),
    ),
}
"""By model_type."""


def vision_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of config.json with `vision_config` and `image_token_id`."""
    part = config.get("vlm_config")
    return part if isinstance(part, dict) else config
