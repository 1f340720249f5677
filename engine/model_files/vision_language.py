"""Resolves how a language model reads images as a part of its input."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ..families.vision_language import VISION_LANGUAGE, ImageProcessor, vision_part
from ..protocol.errors import ModelLoadError
from ..protocol.images import ImageSpec
from ..protocol.model_info import ModelKind, PairChat
from ..protocol.multi_vector import MultiVector
from .draft import ModelDraft
from .image_processor import IMAGE_PROCESSOR_FILE, PROCESSOR_FILE, read_area_spec, read_image_spec, read_tile_spec

_CHAT: Final = PairChat(is_structured=True, arguments={"add_generation_prompt": True})
_DEFAULT_PROMPT: Final = "default"


def resolve_vision_language(draft: ModelDraft, folder: Path) -> None:
    """Resolves the images and the chat of a language model that reads both. Needs the other fields.

    A folder without the files of an image processor serves texts only.

    Raises:
        UnsupportedModelError: penstock does not support a value of the image processor.
        ModelLoadError: A setting does not fit the model.
    """
    draft.set("image_spec", None, "default")
    draft.set("input_chat", None, "default")
    family = VISION_LANGUAGE.get(draft.fields["model_type"])
    source = next((name for name in (PROCESSOR_FILE, IMAGE_PROCESSOR_FILE) if (folder / name).is_file()), None)
    if family is None or (source is None and family.pages is None):
        return
    if draft.fields["enable_chunked_processing"]:
        raise ModelLoadError(
            f"--pooler-config: enable_chunked_processing does not fit {draft.name}, which reads images."
        )
    spec = _image_spec(family.processor, folder, draft)
    draft.set("image_spec", spec, source or PROCESSOR_FILE)
    if family.pages is not None:
        if draft.fields["multi_vector"] is None:
            draft.set("multi_vector", MultiVector(), draft.sources["model_type"])
        return
    if draft.fields["kind"] is not ModelKind.EMBEDDING:
        return
    files = draft.files
    if files is None:
        draft.set("input_chat", _CHAT, draft.sources["model_type"])
        if draft.fields["default_prompt_name"] is None:
            draft.fields["prompts"] = {**draft.fields["prompts"], _DEFAULT_PROMPT: family.instruction}
            draft.set("default_prompt_name", _DEFAULT_PROMPT, draft.sources["model_type"])
    else:
        draft.set("input_chat", files.pair_chat or PairChat(is_structured=True), files.transformer_source)


def _image_spec(processor: ImageProcessor, folder: Path, draft: ModelDraft) -> ImageSpec:
    part, overrides = vision_part(draft.config), draft.engine.mm_processor_kwargs
    match processor:
        case ImageProcessor.QWEN2_VL:
            return read_area_spec(folder, part, overrides, draft.fields["max_model_len"])
        case ImageProcessor.SIGLIP:
            config = {"model_type": "siglip", "vision_config": part.get("vision_config")}
            return read_image_spec(folder, config, overrides)
        case ImageProcessor.IDEFICS3:
            return read_tile_spec(folder, part, overrides)
