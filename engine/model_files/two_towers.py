"""Models with an encoder of texts and an encoder of images (CLIP, SigLIP): one config.json, two ModelInfos."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ..families.two_towers import CONFIGS
from ..protocol.errors import UnsupportedModelError
from ..protocol.images import ImageSpec
from ..protocol.model_info import ModelInfo
from ..protocol.tasks import PoolingTask

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
    own = dataclasses.replace(image, tasks=(PoolingTask.EMBED,), image_spec=spec, max_model_len=num_rows)
    tasks = tuple(task for task in text.tasks if task is not PoolingTask.TOKEN_EMBED)
    sources = {**text.sources, "image": _IMAGES, "tasks": _IMAGES}
    return dataclasses.replace(text, tasks=tasks, image=own, sources=sources)


def _part(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    part, old = config.get(name), config.get(f"{name}_dict")
    return {**(part if isinstance(part, dict) else {}), **(old if isinstance(old, dict) else {})}
