"""Patches equal the pixel values of transformers' processors on Pillow."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from penstock.engine.images.header import ImageError
from penstock.engine.images.preprocessing import preprocess, resize_part
from penstock.engine.protocol.images import ImagePatches, ImageResize, ImageSpec

from ...tables import cases
from .pictures import picture

_SIZES = [(1, 1), (1, 9), (3, 5), (224, 224), (225, 223), (321, 240), (40, 700)]
_CLIP = ImageSpec(
    patch_size=32,
    resize=ImageResize.SHORTEST_EDGE,
    size=(224, 224),
    crop=(224, 224),
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
    max_patches=49,
    num_class_rows=1,
)
_HALF: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
_AREA = ImageSpec(patch_size=14, resize=ImageResize.AREA, size=(0, 0), merge_size=2, max_patches=204, **_HALF)


def _normalized(patches: ImagePatches, spec: ImageSpec) -> NDArray[np.float64]:
    colours = patches.pixels.reshape(-1, 3).astype(np.float64) * spec.rescale
    return ((colours - spec.mean) / spec.std).reshape(patches.pixels.shape)


def _preprocess(image: Image.Image, spec: ImageSpec) -> ImagePatches:
    patches, gray = preprocess(image, spec), spec.gray()
    assert patches.pixels.nbytes <= spec.max_bytes(image.width, image.height)
    num_patches = gray.grid[0] * gray.grid[1] or 1
    assert gray.pixels.shape == (num_patches, patches.pixels.shape[1])
    assert gray.grid[0] % spec.merge_size == gray.grid[1] % spec.merge_size == 0
    assert num_patches <= spec.max_patches
    return patches


def _cut(pixel_values: NDArray[np.float32], grid: tuple[int, int], patch_size: int) -> NDArray[np.float32]:
    """Cuts [3, H, W] into patches with torch's unfold, in the order rows, columns, colours."""
    import torch

    rows, columns = grid
    whole = torch.from_numpy(pixel_values[:, : rows * patch_size, : columns * patch_size].copy())
    columns_first = torch.nn.functional.unfold(whole[None], patch_size, stride=patch_size)[0].T
    return columns_first.reshape(-1, 3, patch_size * patch_size).transpose(1, 2).reshape(rows * columns, -1).numpy()


@pytest.mark.parametrize(
    ("spec", "processor"),
    [
        (_CLIP, CLIPImageProcessorPil()),
        (  # larger than the resized image: black borders of odd width
            ImageSpec(
                patch_size=7, resize=ImageResize.SHORTEST_EDGE, size=(200, 200), crop=(231, 97), resample=1,
                max_patches=429, **_HALF,
            ),
            CLIPImageProcessorPil(
                size={"shortest_edge": 200}, crop_size={"height": 231, "width": 97}, resample=1,
                image_mean=[0.5] * 3, image_std=[0.5] * 3,
            ),
        ),
        (  # 48 and 62 are not multiples of 14
            ImageSpec(patch_size=14, resize=ImageResize.EXACT, size=(48, 62), max_patches=12, **_HALF),
            SiglipImageProcessorPil(size={"height": 48, "width": 62}),
        ),
    ],
    ids=["clip", "borders", "siglip"],
)  # fmt: skip
def test_patches_equal_pixel_values_of_processor(spec: ImageSpec, processor: Any) -> None:
    for seed, (width, height) in enumerate(_SIZES):
        image = picture("RGB", width, height, seed)
        patches = _preprocess(image, spec)
        assert patches.pixels.dtype == np.uint8
        assert patches.pixels.shape == (spec.max_patches, spec.patch_size**2 * 3)
        expected = _cut(processor(image, return_tensors="np")["pixel_values"][0], patches.grid, spec.patch_size)
        np.testing.assert_allclose(_normalized(patches, spec), expected, rtol=0, atol=1e-6)


def test_patches_of_siglip2_equal_processor() -> None:
    spec = ImageSpec(patch_size=16, resize=ImageResize.PATCHES, size=(0, 0), resample=2, max_patches=256, **_HALF)
    processor = Siglip2ImageProcessorPil()
    for seed, (width, height) in enumerate([*_SIZES, (1, 65_535), (65_535, 1)]):
        image = picture("RGB", width, height, seed)
        patches = _preprocess(image, spec)
        expected = processor(image, return_tensors="np")
        assert patches.grid == tuple(expected["spatial_shapes"][0])
        pixel_values = expected["pixel_values"][0][: len(patches.pixels)]
        np.testing.assert_allclose(_normalized(patches, spec), pixel_values, rtol=0, atol=1e-6)


def test_blocks_of_qwen_equal_processor() -> None:
    limits: dict[str, Any] = {"min_pixels": 3_136, "max_pixels": 40_000}
    spec = replace(_AREA, **limits)
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 3_136, "longest_edge": 40_000}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    for seed, (width, height) in enumerate([*_SIZES, (1, 200), (1_999, 10)]):
        image = picture("RGB", width, height, seed)
        patches = _preprocess(image, spec)
        expected = processor(image, return_tensors="np")
        assert [1, *patches.grid] == expected["image_grid_thw"][0].tolist()
        colours = _normalized(patches, spec).reshape(-1, 14, 14, 3).transpose(0, 3, 1, 2)
        frames = np.repeat(colours[:, :, None], 2, axis=2).reshape(len(patches.pixels), -1)
        np.testing.assert_allclose(frames, expected["pixel_values"], rtol=0, atol=1e-6)


@cases(__file__, "size", "limit", "smallest", "message")
def test_image_that_a_language_model_cannot_read_is_rejected(
    size: tuple[int, int], limit: int, smallest: int, message: str
) -> None:
    spec = replace(_AREA, max_patches=limit, min_pixels=smallest, max_pixels=40_000)
    with pytest.raises(ImageError, match=message):
        preprocess(picture("RGB", *size), spec)


def test_filled_blocks_of_gemma4_equal_processor() -> None:
    spec = ImageSpec(
        patch_size=4,
        resize=ImageResize.FILL,
        size=(0, 0),
        merge_size=2,
        max_patches=280,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
    )
    processor = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    for seed, (width, height) in enumerate([*_SIZES, (1, 200), (1_999, 10)]):
        image = picture("RGB", width, height, seed)
        patches = _preprocess(image, spec)
        expected = processor(image, return_tensors="np")
        count = int(expected["num_soft_tokens_per_image"][0])
        assert spec.num_tokens(patches) == count
        rows, columns = patches.grid
        blocks = _normalized(patches, spec).reshape(rows // 2, columns // 2, 2, 2, -1)
        found = blocks.swapaxes(1, 2).reshape(rows * columns, -1)
        np.testing.assert_allclose(found, expected["pixel_values"][0][: len(found)], rtol=0, atol=1e-6)
        assert expected["image_position_ids"][0][len(found) - 1].tolist() == [columns - 1, rows - 1]


def test_tiles_of_idefics3_equal_processor() -> None:
    spec = ImageSpec(patch_size=30, resize=ImageResize.TILES, size=(100, 100), resample=1, max_patches=17, **_HALF)
    processor = Idefics3ImageProcessorPil(size={"longest_edge": 100}, max_image_size={"longest_edge": 30})
    small = replace(spec, size=(30, 30))
    small_processor = Idefics3ImageProcessorPil(size={"longest_edge": 30}, max_image_size={"longest_edge": 30})
    sizes = [*_SIZES, (1, 65_535), (65_535, 1)]
    cases = [(spec, processor, size) for size in sizes] + [(small, small_processor, size) for size in _SIZES]
    for seed, (own, reference, (width, height)) in enumerate(cases):
        image = picture("RGB", width, height, seed)
        patches = _preprocess(image, own)
        expected = reference(image, return_tensors="np", return_row_col_info=True)
        assert patches.grid == (expected["rows"][0][0], expected["cols"][0][0])
        colours = _normalized(patches, own).reshape(-1, 30, 30, 3).transpose(0, 3, 1, 2)
        np.testing.assert_allclose(colours, expected["pixel_values"][0], rtol=0, atol=1e-6)
    with pytest.raises(ImageError, match="100 x 99 pixels; its edges differ too much"):
        preprocess(picture("RGB", 100, 99), replace(spec, max_patches=16))


@pytest.mark.parametrize("resample", [1, 2, 3])
def test_part_of_enlarged_image_equals_pillow(resample: int) -> None:
    rng = np.random.default_rng(resample)
    for seed in range(60):
        width, height = (int(edge) for edge in rng.integers(1, 60, 2))
        more = rng.integers(0, 99, 2) * [(1, 1), (0, 1), (1, 0)][seed % 3]  # one edge may stay
        larger = width + int(more[0]), height + int(more[1])
        (left, right), (top, bottom) = (sorted(rng.choice(edge + 1, 2, replace=False).tolist()) for edge in larger)
        image, method = picture("RGB", width, height, seed), Image.Resampling(resample)
        part = resize_part(image, larger[::-1], (top, bottom), (left, right), method)
        np.testing.assert_array_equal(part, np.asarray(image.resize(larger, method))[top:bottom, left:right])


def test_narrow_image_is_enlarged_inside_the_crop_only(monkeypatch: pytest.MonkeyPatch) -> None:
    image = picture("RGB", 3, 1_500)
    expected = preprocess(image, _CLIP).pixels
    monkeypatch.setattr("penstock.engine.images.preprocessing._MAX_ENLARGED_PIXELS", 1)
    np.testing.assert_array_equal(preprocess(image, _CLIP).pixels, expected)
    monkeypatch.undo()
    assert preprocess(picture("RGB", 1, 65_535), _CLIP).grid == (7, 7)  # 224 x 14,679,840 pixels as a whole


@pytest.mark.parametrize("size", [(90, 40), (40, 90), (28, 28)])
def test_cells_of_tiles_cover_the_image(size: tuple[int, int]) -> None:
    side, tile = 2, 28
    spec = ImageSpec(
        patch_size=tile, resize=ImageResize.TILES, size=(84, 84), mean=(0.5,) * 3, std=(0.5,) * 3, max_patches=10
    )
    height, width = size
    image = Image.fromarray(np.arange(height * width, dtype=np.uint8).reshape(size)).convert("RGB")
    patches = preprocess(image, spec)
    num_tiles = len(patches.pixels)
    cells = spec.cells(patches, num_tiles * side**2)
    rows, columns = patches.grid if num_tiles > 1 else (1, 1)
    assert cells.shape == (rows * side, columns * side)
    # Each tile has its own tokens, from left to right, then from top to bottom; the whole image is the last tile.
    for number in range(rows * columns):
        top, left = number // columns * side, number % columns * side
        own = cells[top : top + side, left : left + side]
        assert own.tolist() == [[4 * number, 4 * number + 1], [4 * number + 2, 4 * number + 3]]


def test_cells_of_an_area_are_blocks_of_patches() -> None:
    spec = replace(_AREA, patch_size=4, max_patches=400, min_pixels=64, max_pixels=6_400)
    patches = preprocess(Image.new("RGB", (48, 32)), spec)
    cells = spec.cells(patches, spec.num_tokens(patches))
    assert cells.shape == (4, 6)
    assert cells.ravel().tolist() == list(range(24))
