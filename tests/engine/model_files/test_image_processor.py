"""The preprocessing of images from the files of a model."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from penstock.engine.images.preprocessing import preprocess
from penstock.engine.model_files.image_processor import read_area_spec, read_fill_spec, read_image_spec, read_tile_spec
from penstock.engine.protocol.errors import UnsupportedModelError
from penstock.engine.protocol.images import ImageResize, ImageSpec

from ...tables import cases, table

_CLIP_CONFIG = {"model_type": "clip", "vision_config": {"image_size": 224, "patch_size": 32}}
_SIGLIP_CONFIG = {"model_type": "siglip", "vision_config": {"image_size": 64, "patch_size": 16}}


def _read(
    folder: Path, values: dict[str, Any], config: dict[str, Any], file: str = "preprocessor_config.json"
) -> ImageSpec:
    (folder / file).write_text(json.dumps(values), encoding="utf-8")
    return read_image_spec(folder, config, {})


@cases(__file__, "values", "config")
def test_file_is_read_like_transformers(tmp_path: Path, values: dict[str, Any], config: dict[str, Any]) -> None:
    spec = _read(tmp_path, values, config)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (91, 75, 3), np.uint8))
    patches = preprocess(image, spec)
    processor = AutoImageProcessor.from_pretrained(tmp_path, use_fast=False, backend="pil")
    expected = np.asarray(processor(image, return_tensors="np")["pixel_values"][0], np.float64)
    actual = (patches.pixels.reshape(-1, 3) * spec.rescale - spec.mean) / spec.std
    if spec.resize is ImageResize.PATCHES:
        expected = expected[: math.prod(patches.grid)].reshape(-1, 3)
    else:
        rows, columns = patches.grid
        cut = expected.reshape(3, rows, spec.patch_size, columns, spec.patch_size)
        expected = cut.transpose(1, 3, 2, 4, 0).reshape(-1, 3)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_patches_and_class_rows_follow_the_vision_model(tmp_path: Path) -> None:
    spec = _read(tmp_path, {"image_processor_type": "CLIPImageProcessor"}, _CLIP_CONFIG)
    assert (spec.max_patches, spec.num_class_rows, spec.crop) == (49, 1, (224, 224))
    vision = {"model_type": "siglip_vision_model", "image_size": 224, "patch_size": 14}
    spec = _read(tmp_path, {}, vision)
    assert (spec.max_patches, spec.num_class_rows, spec.patch_size) == (256, 0, 14)
    spec = _read(tmp_path, {"image_processor_type": "Siglip2ImageProcessor"}, {"model_type": "siglip2"})
    assert (spec.max_patches, spec.patch_size) == (256, 16)


def test_processor_config_takes_precedence(tmp_path: Path) -> None:
    nested = {"image_processor": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 64, "width": 64}}}
    _read(tmp_path, nested, _SIGLIP_CONFIG, "processor_config.json")
    assert _read(tmp_path, {"size": 1}, _SIGLIP_CONFIG).size == (64, 64)


@cases(__file__, "values", "message")  # fmt: skip
def test_unsupported_value_is_named(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        _read(tmp_path, {"image_processor_type": "CLIPImageProcessor"} | values, _CLIP_CONFIG)
    assert message in str(error.value)


def test_missing_file_or_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"preprocessor_config\.json is missing"):
        read_image_spec(tmp_path, _CLIP_CONFIG, {})
    with pytest.raises(
        UnsupportedModelError, match=r"names no image_processor_type, and model_type in config\.json is 'bert'"
    ):
        _read(tmp_path, {}, {"model_type": "bert"})
    with pytest.raises(UnsupportedModelError, match="image_size of the vision model is 'x'"):
        _read(tmp_path, {}, {"model_type": "clip", "vision_config": {"image_size": "x"}})


_QWEN_CONFIG = {"vision_config": {"patch_size": 16, "spatial_merge_size": 2}}
_QWEN_VALUES = table(__file__, "qwen_values")
_TILE_VALUES = {"size": {"longest_edge": 2_048}, "max_image_size": {"longest_edge": 512}}


def _read_area(
    folder: Path, values: dict[str, Any], overrides: dict[str, Any], config: dict[str, Any] = _QWEN_CONFIG
) -> ImageSpec:
    (folder / "preprocessor_config.json").write_text(json.dumps(values), encoding="utf-8")
    return read_area_spec(folder, config, overrides, 8_192)


def test_area_is_read_from_either_form_and_replaced_by_the_operator(tmp_path: Path) -> None:
    spec = _read_area(tmp_path, _QWEN_VALUES, {})
    assert (spec.min_pixels, spec.max_pixels, spec.max_patches) == (65_536, 16_777_216, 4 * 8_192)
    assert (spec.patch_size, spec.merge_size, spec.mean) == (16, 2, (0.5, 0.5, 0.5))
    assert spec.max_bytes(10, 10) < spec.max_bytes(4_000, 3_000) < 3 * 16_777_216 + 1
    older = _read_area(tmp_path, _QWEN_VALUES | {"size": None, "min_pixels": 3_136, "max_pixels": 200_000}, {})
    assert (older.min_pixels, older.max_pixels) == (3_136, 200_000)
    assert _read_area(tmp_path, _QWEN_VALUES, {"max_pixels": 1_843_200}).max_patches == 7_200
    size = {"size": {"shortest_edge": 4_096, "longest_edge": 100_000}}
    replaced = _read_area(tmp_path, _QWEN_VALUES | {"min_pixels": 3_136, "max_pixels": 200_000}, size)
    assert (replaced.min_pixels, replaced.max_pixels) == (4_096, 100_000)


def _read_fill(folder: Path, values: dict[str, Any], vision: dict[str, Any]) -> ImageSpec:
    (folder / "preprocessor_config.json").write_text(json.dumps(values), encoding="utf-8")
    return read_fill_spec(folder, {"vision_config": vision}, {})


def _read_tiles(folder: Path, values: dict[str, Any], edge: int = 512) -> ImageSpec:
    (folder / "preprocessor_config.json").write_text(json.dumps(values), encoding="utf-8")
    return read_tile_spec(folder, {"vision_config": {"image_size": edge}}, {})


def test_missing_values_are_those_of_transformers(tmp_path: Path) -> None:
    for processor, read in (
        (Qwen2VLImageProcessorPil(), lambda values: _read_area(tmp_path, values, {}, config={})),
        (Gemma4ImageProcessorPil(), lambda values: _read_fill(tmp_path, values, {})),
        (Idefics3ImageProcessorPil(), lambda values: _read_tiles(tmp_path, values, 364)),
    ):
        assert read({}) == read(processor.to_dict())


def test_limits_of_patches_are_read(tmp_path: Path) -> None:
    limits = {"shortest_edge": 4_096, "longest_edge": 4_096}
    assert _read_area(tmp_path, _QWEN_VALUES | {"size": limits}, {}).max_patches == 16
    spec = _read_fill(tmp_path, {"max_soft_tokens": 70, "pooling_kernel_size": 2}, {"position_embedding_size": 140})
    assert (spec.max_patches, spec.merge_size, spec.size) == (280, 2, (0, 0))
    longest = {edge: _TILE_VALUES | {"size": {"longest_edge": edge}} for edge in (513, 4_096)}
    assert [_read_tiles(tmp_path, values).max_patches for values in longest.values()] == [5, 65]
    for values, vision, message in table(__file__, "test_limits_of_patches_are_read"):
        with pytest.raises(UnsupportedModelError) as error:
            _read_fill(tmp_path, values, vision)
        assert message in str(error.value)


@cases(__file__, "values", "overrides", "message")
def test_unsupported_value_of_an_area_is_named(
    tmp_path: Path, values: dict[str, Any], overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        _read_area(tmp_path, _QWEN_VALUES | values, overrides)
    assert message in str(error.value)


@cases(__file__, "values", "message")
def test_tiles_are_read_or_the_unsupported_value_is_named(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    assert _read_tiles(tmp_path, _TILE_VALUES).max_patches == 17
    with pytest.raises(UnsupportedModelError) as error:
        _read_tiles(tmp_path, _TILE_VALUES | values)
    assert message in str(error.value)
