"""How a model reads images: with an encoder of its own (CLIP, SigLIP), or as a part of the input of a language model.

A model with two encoders has one config.json and becomes two ModelInfos.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..families.two_towers import CONFIGS
from ..families.vision_language import VISION_LANGUAGE, ImageProcessor, vision_part
from ..protocol.errors import ModelLoadError, UnsupportedModelError
from ..protocol.images import ImageSpec
from ..protocol.model_info import ModelInfo, ModelKind, PairChat
from ..protocol.multi_vector import MultiVector
from ..protocol.tasks import PoolingTask
from .draft import ModelDraft
from .image_processor import (
    IMAGE_PROCESSOR_FILE,
    PROCESSOR_FILE,
    read_area_spec,
    read_fill_spec,
    read_image_spec,
    read_tile_spec,
)

TWO_TOWER_TYPES: Final = ("clip", "siglip", "siglip2")
_IMAGES: Final = "config.json: vision_config"


class TowerConfigs(NamedTuple):
    """The config.json of each encoder.

    Attributes:
        text: config.json of the text encoder.
        image: config.json of the image encoder.
    """

    text: dict[str, Any]
    image: dict[str, Any]


def tower_configs(config: Mapping[str, Any]) -> TowerConfigs | None:
    """Returns the config.json of each encoder, as if it were a model of its own; None for other models.

    Like transformers, takes a missing part as empty, and CLIP's old keys "text_config_dict" and "vision_config_dict"
    before the new ones.
    """
    model_type = config.get("model_type")
    if model_type not in TWO_TOWER_TYPES:
        return None
    dtype = {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
    # Both parts of CLIP use the projection_dim of the whole model.
    shared = {"projection_dim": config.get("projection_dim", 512)} if model_type == "clip" else {}
    towers = []
    for name in ("text", "vision"):
        own_type = f"{model_type}_{name}_model"
        values = {**dtype, **_part(config, f"{name}_config"), **shared, "model_type": own_type, "architectures": []}
        towers.append({**CONFIGS[own_type].defaults(), **values})
    return TowerConfigs(*towers)


def with_image(text: ModelInfo, image: ModelInfo, spec: ImageSpec) -> ModelInfo:
    """Returns the model of texts and images.

    Raises:
        UnsupportedModelError: Texts and images have vectors of different widths.
    """
    if text.embedding_size != image.embedding_size:
        raise UnsupportedModelError(
            f"{text.name} gives texts vectors of width {text.embedding_size}, and images of width "
            f"{image.embedding_size}."
        )
    num_rows = spec.max_patches + spec.num_class_rows
    encoder = dataclasses.replace(image, tasks=(PoolingTask.EMBED,), image_spec=spec, max_model_len=num_rows)
    tasks = tuple(task for task in text.tasks if task is not PoolingTask.TOKEN_EMBED)
    sources = {**text.sources, "image": _IMAGES, "tasks": _IMAGES}
    return dataclasses.replace(text, tasks=tasks, image=encoder, sources=sources)


def _part(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    part, old = config.get(name), config.get(f"{name}_dict")
    return {**(part if isinstance(part, dict) else {}), **(old if isinstance(old, dict) else {})}


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
    if draft.fields["kind"] is not ModelKind.EMBEDDING or not family.has_chat:
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
    part = vision_part(draft.config)
    overrides = draft.engine.mm_processor_kwargs
    match processor:
        case ImageProcessor.QWEN2_VL:
            return read_area_spec(folder, part, overrides, draft.fields["max_model_len"])
        case ImageProcessor.SIGLIP:
            config = {"model_type": "siglip", "vision_config": part.get("vision_config")}
            return read_image_spec(folder, config, overrides)
        case ImageProcessor.GEMMA4:
            return read_fill_spec(folder, part, overrides)
        case ImageProcessor.IDEFICS3:
            return read_tile_spec(folder, part, overrides)
