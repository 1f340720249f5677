"""Reads the preprocessing of a model's images: preprocessor_config.json, or processor_config.json of newer models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..protocol.errors import UnsupportedModelError
from ..protocol.images import ImageResize, ImageSpec
from .model_folder import read_object

PROCESSOR_FILE: Final = "processor_config.json"
IMAGE_PROCESSOR_FILE: Final = "preprocessor_config.json"
_BILINEAR, _BICUBIC = 2, 3
_RESAMPLES: Final = (1, _BILINEAR, _BICUBIC)
_QWEN2_VL: Final = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
    "resample": _BICUBIC,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
"""Defaults of Qwen2VLImageProcessor."""
_GEMMA4: Final = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": False,
    "rescale_factor": 1 / 255,
    "resample": _BICUBIC,
    "image_mean": [0.0, 0.0, 0.0],
    "image_std": [1.0, 1.0, 1.0],
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "max_soft_tokens": 280,
}
"""Defaults of Gemma4ImageProcessor."""
_IDEFICS3: Final = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_image_splitting": True,
    "rescale_factor": 1 / 255,
    "resample": 1,
    "size": {"longest_edge": 4 * 364},
    "max_image_size": {"longest_edge": 364},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""Defaults of Idefics3ImageProcessor."""
_SIGLIP_IMAGE_SIZE: Final = 224
"""Default of SiglipVisionConfig."""
_MAX_EDGE: Final = 4096
"""Pixels. Idefics3ImageProcessor reduces larger images."""
_CLASS_SUFFIXES: Final = ("ImageProcessor", "ImageProcessorFast", "ImageProcessorPil", "FeatureExtractor")
_MUST_BE_OFF: Final = ("do_pad", "use_square_size", "do_flip_channel_order", "do_image_splitting", "do_thumbnail")

_OVERRIDES: Final = (
    *("size", "min_pixels", "max_pixels", "max_image_size", "max_num_patches", "crop_size", "do_center_crop"),
    "max_soft_tokens",
    *("resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std"),
)
"""Keys of --mm-processor-kwargs."""
_MUST_BE_OFF_FOR_TILES: Final = ("use_square_size", "do_flip_channel_order", "do_thumbnail")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defaults:
    """Default values of an image processor of transformers, and of its vision model.

    Attributes:
        values: Of the processor, by key.
        image_size: Pixels of the edges; None: images keep their proportions (naflex).
        patch_size: Pixels of the edges.
        num_class_rows: Rows that the model puts before the patches.
    """

    values: Mapping[str, Any]
    image_size: int | None
    patch_size: int
    num_class_rows: int = 0


_ALL_STEPS: Final = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255}
_HALF: Final = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_CLIP: Final = _Defaults(
    values={
        **_ALL_STEPS,
        "size": {"shortest_edge": 224},
        "do_center_crop": True,
        "crop_size": {"height": 224, "width": 224},
        "resample": _BICUBIC,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
    image_size=224,
    patch_size=32,
    num_class_rows=1,
)
_SIGLIP: Final = _Defaults(
    values={
        **_ALL_STEPS,
        **_HALF,
        "size": {"height": 224, "width": 224},
        "do_center_crop": False,
        "resample": _BICUBIC,
    },
    image_size=224,
    patch_size=16,
)
_SIGLIP2: Final = _Defaults(
    values={**_ALL_STEPS, **_HALF, "patch_size": 16, "max_num_patches": 256, "resample": _BILINEAR},
    image_size=None,
    patch_size=16,
)
_KINDS: Final = {"CLIP": _CLIP, "Siglip": _SIGLIP, "Siglip2": _SIGLIP2}
"""By the prefix of transformers' class names."""
_KIND_OF_MODEL: Final = {"clip": "CLIP", "siglip": "Siglip", "siglip2": "Siglip2"}
"""By the beginning of model_type, for files that name no class."""


def read_image_spec(folder: Path, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> ImageSpec:
    """Reads the preprocessing of the images of a CLIP, SigLIP or SigLIP 2 model.

    Args:
        folder: Folder with the files of the processor.
        config: config.json of the model, or of its vision tower.
        overrides: Values that replace those of the files.

    Raises:
        UnsupportedModelError: There is no such file, or it has a value that penstock does not support.
        ModelLoadError: A file is not valid JSON.
    """
    source = _Source.read(folder, overrides)
    kind = _kind(source, config)
    defaults = _KINDS[kind]
    values = source.with_defaults(defaults.values)
    vision = config.get("vision_config") or config
    patch_size = values.count("patch_size", _value(vision, "patch_size", defaults.patch_size))
    if (model_patch_size := _value(vision, "patch_size", defaults.patch_size)) != patch_size:
        raise values.unsupported("patch_size", f"the patch_size of config.json, {model_patch_size!r}")
    colours = _colours(values, _MUST_BE_OFF)
    if defaults.image_size is None:
        return ImageSpec(
            patch_size=patch_size,
            resize=ImageResize.PATCHES,
            size=(0, 0),
            max_patches=values.count("max_num_patches"),
            **colours,
        )
    image_size = _value(vision, "image_size", defaults.image_size)
    resize, size = values.size("size")
    crop = values.size("crop_size", is_crop=True)[1] if values.get("do_center_crop") else None
    if (crop or size) != (image_size, image_size) or (crop is None and resize is ImageResize.SHORTEST_EDGE):
        raise values.unsupported(
            "crop_size" if crop else "size", f"the image_size of config.json, {image_size!r}, for height and width"
        )
    return ImageSpec(
        patch_size=patch_size,
        resize=resize,
        size=size,
        crop=crop,
        max_patches=(image_size // patch_size) ** 2,
        num_class_rows=defaults.num_class_rows,
        **colours,
    )


def read_area_spec(
    folder: Path, config: Mapping[str, Any], overrides: Mapping[str, Any], max_model_len: int
) -> ImageSpec:
    """Reads the preprocessing of the images of a language model with a Qwen2VLImageProcessor.

    Args:
        folder: Folder with the files of the processor.
        config: config.json of the model.
        overrides: Values that replace those of the files.
        max_model_len: Tokens. An image with more blocks of patches is rejected.

    Raises:
        UnsupportedModelError: A value that penstock does not support.
        ModelLoadError: A file is not valid JSON.
    """
    if "size" in overrides:  # min_pixels and max_pixels of the file would take precedence
        overrides = {"min_pixels": None, "max_pixels": None, **overrides}
    values = _Source.read(folder, overrides).of_class("Qwen2VL", _QWEN2_VL)
    vision = config.get("vision_config") or {}
    for key, config_key in (("patch_size", "patch_size"), ("merge_size", "spatial_merge_size")):
        if values.count(key) != _value(vision, config_key, values.count(key)):
            raise values.unsupported(key, f"the {config_key} of config.json, {vision.get(config_key)!r}")
    size = values.get("size")
    size = size if isinstance(size, dict) else {}
    min_pixels = values.get("min_pixels") or size.get("shortest_edge")
    max_pixels = values.get("max_pixels") or size.get("longest_edge")
    if type(min_pixels) is not int or type(max_pixels) is not int or not 0 < min_pixels <= max_pixels:
        raise values.unsupported("size", "shortest_edge and longest_edge, the limits of the area in pixels")
    patch_size, merge_size = values.count("patch_size"), values.count("merge_size")
    return ImageSpec(
        patch_size=patch_size,
        resize=ImageResize.AREA,
        size=(0, 0),
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        max_patches=min(max_pixels // patch_size**2, max_model_len * merge_size**2),
        merge_size=merge_size,
        **_colours(values, _MUST_BE_OFF),
    )


def read_fill_spec(folder: Path, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> ImageSpec:
    """Reads the preprocessing of the images of a language model with a Gemma4ImageProcessor.

    Args:
        folder: Folder with the files of the processor.
        config: config.json of the model.
        overrides: Values that replace those of the files.

    Raises:
        UnsupportedModelError: A value that penstock does not support.
        ModelLoadError: A file is not valid JSON.
    """
    values = _Source.read(folder, overrides).of_class("Gemma4", _GEMMA4)
    vision = config.get("vision_config") or {}
    for key in ("patch_size", "pooling_kernel_size"):
        if values.count(key) != _value(vision, key, values.count(key)):
            raise values.unsupported(key, f"the {key} of config.json, {vision.get(key)!r}")
    merge_size = values.count("pooling_kernel_size")
    if values.count("max_soft_tokens") * merge_size > (edge := _value(vision, "position_embedding_size", 10_240)):
        raise values.unsupported(
            "max_soft_tokens", f"images of up to {edge} patches in a row (position_embedding_size)"
        )
    return ImageSpec(
        patch_size=values.count("patch_size"),
        resize=ImageResize.FILL,
        size=(0, 0),
        max_patches=values.count("max_soft_tokens") * merge_size**2,
        merge_size=merge_size,
        **_colours(values, _MUST_BE_OFF),
    )


def read_tile_spec(folder: Path, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> ImageSpec:
    """Reads the preprocessing of the images of a language model with an Idefics3ImageProcessor.

    Args:
        folder: Folder with the files of the processor.
        config: config.json of the model.
        overrides: Values that replace those of the files.

    Raises:
        UnsupportedModelError: A value that penstock does not support.
        ModelLoadError: A file is not valid JSON.
    """
    values = _Source.read(folder, overrides).of_class("Idefics3", _IDEFICS3)
    if not values.get("do_image_splitting"):
        raise values.unsupported("do_image_splitting", "true")
    edges = []
    for key in ("size", "max_image_size"):
        value = values.get(key)
        edge = value.get("longest_edge") if isinstance(value, dict) else None
        if type(edge) is not int or not 0 < edge <= _MAX_EDGE:
            raise values.unsupported(key, f"longest_edge, up to {_MAX_EDGE} pixels")
        edges.append(edge)
    longest, tile = edges
    vision = config.get("vision_config") or {}
    if _value(vision, "image_size", _SIGLIP_IMAGE_SIZE) != tile:
        raise values.unsupported("max_image_size", f"the image_size of config.json, {vision.get('image_size')!r}")
    return ImageSpec(
        patch_size=tile,
        resize=ImageResize.TILES,
        size=(longest, longest),
        max_patches=(-(-longest // tile)) ** 2 + 1,
        **_colours(values, _MUST_BE_OFF_FOR_TILES),
    )


def _colours(values: _Source, must_be_off: Sequence[str]) -> dict[str, Any]:
    """Returns the resampling and the normalisation of colours."""
    for key in must_be_off:
        if values.get(key):
            raise values.unsupported(key, "false")
    if not values.get("do_resize"):
        raise values.unsupported("do_resize", "true")
    if values.get("resample") not in _RESAMPLES:
        raise values.unsupported("resample", "1 (Lanczos), 2 (bilinear) or 3 (bicubic)")
    return {
        "resample": values.get("resample"),
        "rescale": values.positive("rescale_factor") if values.get("do_rescale") else 1.0,
        "mean": values.colours("image_mean") if values.get("do_normalize") else (0.0, 0.0, 0.0),
        "std": values.colours("image_std", must_be_positive=True) if values.get("do_normalize") else (1.0, 1.0, 1.0),
    }


def _kind(source: _Source, config: Mapping[str, Any]) -> str:
    """Returns a key of _KINDS."""
    for key in ("image_processor_type", "feature_extractor_type"):
        if (name := source.get(key)) is not None:
            kind = next((kind for kind in _KINDS for suffix in _CLASS_SUFFIXES if name == kind + suffix), None)
            if kind is None:
                wanted = ", ".join(f"{kind}ImageProcessor" for kind in _KINDS)
                raise source.unsupported(key, f"one of {wanted}")
            return kind
    model_type = str(config.get("model_type"))
    kind = _KIND_OF_MODEL.get(model_type.partition("_")[0])
    if kind is None:
        raise UnsupportedModelError(
            f"{source.path} names no image_processor_type, and model_type in config.json is {model_type!r}; penstock "
            f"reads images for {', '.join(_KIND_OF_MODEL)}."
        )
    return kind


def _value(vision: Mapping[str, Any], key: str, default: int) -> int:
    value = vision.get(key)
    if value is None:
        return default
    if not _is_count(value):
        raise UnsupportedModelError(
            f"config.json: {key} of the vision model is {value!r}; it must be an integer above 0."
        )
    return int(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 16


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class _Source:
    """The values of a file.

    Attributes:
        path: The file of the image processor.
        values: The parsed JSON object.
    """

    path: Path
    values: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path, overrides: Mapping[str, Any]) -> _Source:
        """Reads the file that transformers prefers: image_processor in processor_config.json.

        Args:
            folder: Folder of the model.
            overrides: Values that replace those of the file.

        Raises:
            UnsupportedModelError: There is no such file, or a key in `overrides` is not supported.
        """
        if unknown := sorted(overrides.keys() - _OVERRIDES):
            raise UnsupportedModelError(
                f"--mm-processor-kwargs: {unknown[0]!r} is not supported; penstock supports {', '.join(_OVERRIDES)}."
            )
        nested = read_object(folder / PROCESSOR_FILE).get("image_processor")
        if isinstance(nested, dict):
            return cls(folder / PROCESSOR_FILE, {**nested, **overrides})
        path = folder / IMAGE_PROCESSOR_FILE
        if not path.exists():
            raise UnsupportedModelError(
                f"{path} is missing; penstock needs it to prepare images. Add it to the folder."
            )
        return cls(path, {**read_object(path), **overrides})

    def of_class(self, prefix: str, defaults: Mapping[str, Any]) -> _Source:
        """Returns the values with the defaults of one class of transformers.

        Args:
            prefix: Name of the class without "ImageProcessor".
            defaults: Values of the class for missing ones and null.

        Raises:
            UnsupportedModelError: The file names another class.
        """
        names = [f"{prefix}{suffix}" for suffix in _CLASS_SUFFIXES[:3]]
        if (name := self.get("image_processor_type")) not in (None, *names):
            raise self.unsupported("image_processor_type", f"{names[0]}, not {name!r},")
        return self.with_defaults(defaults)

    def with_defaults(self, defaults: Mapping[str, Any]) -> _Source:
        """Returns the values with those of transformers' class for missing ones and null."""
        return _Source(
            self.path, {**defaults, **{key: value for key, value in self.values.items() if value is not None}}
        )

    def get(self, key: str) -> Any:
        """Returns a value; None if it is missing."""
        return self.values.get(key)

    def count(self, key: str, default: int | None = None) -> int:
        """Returns an integer above 0."""
        value = self.values.get(key, default)
        if not _is_count(value):
            raise self.unsupported(key, "an integer above 0")
        return int(value)

    def positive(self, key: str) -> float:
        """Returns a number above 0."""
        value = self.values[key]
        if not _is_number(value) or value <= 0:
            raise self.unsupported(key, "a number above 0")
        return float(value)

    def colours(self, key: str, *, must_be_positive: bool = False) -> tuple[float, float, float]:
        """Returns a number for red, green and blue."""
        value = self.values[key]
        numbers = value if isinstance(value, list) else [value] * 3
        if len(numbers) != 3 or not all(_is_number(n) and (n > 0 or not must_be_positive) for n in numbers):
            raise self.unsupported(key, "three numbers" + (" above 0" if must_be_positive else ""))
        red, green, blue = map(float, numbers)
        return red, green, blue

    def size(self, key: str, *, is_crop: bool = False) -> tuple[ImageResize, tuple[int, int]]:
        """Returns the kind of a size, and its height and width.

        An integer is the shorter edge of the resized image, or both edges of the crop. A list is height and width.
        """
        value = self.values[key]
        if isinstance(value, int):
            value = {"height": value, "width": value} if is_crop else {"shortest_edge": value}
        elif isinstance(value, list) and len(value) == 2:
            value = {"height": value[0], "width": value[1]}
        if isinstance(value, dict) and all(map(_is_count, value.values())):
            if value.keys() == {"height", "width"}:
                return ImageResize.EXACT, (value["height"], value["width"])
            if value.keys() == {"shortest_edge"} and not is_crop:
                return ImageResize.SHORTEST_EDGE, (value["shortest_edge"], value["shortest_edge"])
        raise self.unsupported(key, "height and width" if is_crop else "shortest_edge, or height and width")

    def unsupported(self, key: str, wanted: str) -> UnsupportedModelError:
        """Returns the error of a value."""
        return UnsupportedModelError(f"{self.path}: {key} is {self.values.get(key)!r}; penstock supports {wanted}.")
