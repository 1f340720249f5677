"""Language models that read images as a part of their input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionLanguageFamily:
    """Facts about one model_type.

    Attributes:
        image_text: Text of one image in a prompt.
        placeholder: The token in `image_text` that the rows of the image replace.
        instruction: Default instruction of embedding models without sentence-transformers' files.
    """

    image_text: str
    placeholder: str
    instruction: str


VISION_LANGUAGE: Final = {
    # The code beside the weights of Qwen3-VL-Embedding; Li et al., arXiv 2601.04720.
    "qwen3_vl": VisionLanguageFamily(
        image_text="<|vision_start|><|image_pad|><|vision_end|>",
        placeholder="<|image_pad|>",
        instruction="Represent the user's input.",
    ),
}
"""By model_type."""
