"""Patches to rows and rows to one vector, compared with torch."""

import numpy as np
import pytest

from penstock.engine.executors.cpu.image_layers import AttentionPool, PatchEmbedding, resized_grid
from penstock.engine.protocol.images import ImagePatches, ImageResize, ImageSpec
from penstock.kernels.cpu import ActivationCode, CpuLibrary, Format, LinearWeights, NormWeights

torch = pytest.importorskip("torch")
NUMBERS = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return NUMBERS.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("grid", [(4, 4), (1, 1), (1, 16), (9, 2), (3, 5), (16, 16)], ids=str)
def test_positions_are_resized_as_in_torch(grid: tuple[int, int]) -> None:
    table = normal(16, 7)
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(table.reshape(1, 4, 4, 7)).permute(0, 3, 1, 2),
        size=grid,
        mode="bilinear",
        align_corners=False,
        antialias=True,
    )
    expected = expected[0].permute(1, 2, 0).reshape(-1, 7).numpy()
    assert np.abs(resized_grid(table, grid) - expected).max() < 1e-5


@pytest.mark.parametrize("rows", [3, 5, 16])
def test_positions_of_one_column_are_resized(rows: int) -> None:
    # On a CPU torch 2.13 repeats the first row if the result has one column: compare with the transposed table.
    table = normal(4, 4, 7)
    row = resized_grid(np.ascontiguousarray(table.swapaxes(0, 1)).reshape(16, 7), (1, rows))
    assert np.abs(resized_grid(table.reshape(16, 7), (rows, 1)) - row).max() < 1e-6


@pytest.mark.parametrize("form", [Format.F32, Format.DOT])
@pytest.mark.parametrize("has_class_row", [False, True])
def test_patches_equal_a_convolution_of_the_preprocessed_image(
    three_lane_library: CpuLibrary, has_class_row: bool, form: Format
) -> None:
    if form not in three_lane_library.formats:
        pytest.skip("this processor has no products in bfloat16")
    side, rows, columns, width = 4, 2, 3, 8
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.1)
    spec = ImageSpec(
        patch_size=side, resize=ImageResize.EXACT, size=(8, 12), mean=mean, std=std, max_patches=rows * columns
    )
    pixels = NUMBERS.integers(0, 256, (rows * side, columns * side, 3), dtype=np.uint8)
    patches = pixels.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(rows * columns, -1)
    weight, bias, positions, class_row = normal(width, 3, side, side), normal(width), normal(6, width), normal(width)
    embedding = PatchEmbedding(
        three_lane_library,
        spec,
        form=form,
        weight=np.ascontiguousarray(weight.transpose(0, 2, 3, 1).reshape(width, -1)),
        bias=bias,
        class_row=class_row if has_class_row else None,
        positions=positions,
        resizes_positions=False,
    )
    image = torch.from_numpy((pixels / 255 - np.array(mean)) / np.array(std)).float().permute(2, 0, 1)[None]
    convolved = torch.nn.functional.conv2d(image, torch.from_numpy(weight), torch.from_numpy(bias), stride=side)
    expected = convolved[0].flatten(1).T.numpy() + positions
    expected = np.concatenate([class_row[None], expected]) if has_class_row else expected
    found = embedding([ImagePatches(patches, (rows, columns))] * 2)
    difference = found - np.concatenate([expected, expected])
    if form is Format.F32:
        assert np.abs(difference).max() < 1e-4
    assert np.linalg.norm(difference) < 0.005 * np.linalg.norm(found)


def test_attention_pool_equals_torch_and_does_not_depend_on_the_batch(three_lane_library: CpuLibrary) -> None:
    width, inner, num_heads, lengths = 24, 40, 3, (1, 7, 20)
    attention, norm = torch.nn.MultiheadAttention(width, num_heads, batch_first=True), torch.nn.LayerNorm(width, 1e-6)
    first, second = torch.nn.Linear(width, inner), torch.nn.Linear(inner, width)
    for module in (attention, norm, first, second):
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    query = normal(width)

    def weights(linear: torch.nn.Linear, activation: ActivationCode = ActivationCode.NONE) -> LinearWeights:
        return LinearWeights(
            weight=linear.weight.detach().numpy(), bias=linear.bias.detach().numpy(), activation=activation
        )

    pool = AttentionPool(
        three_lane_library,
        query=query,
        in_projection=(attention.in_proj_weight.detach().numpy(), attention.in_proj_bias.detach().numpy()),
        out_projection=weights(attention.out_proj),
        norm=NormWeights(weight=norm.weight.detach().numpy(), bias=norm.bias.detach().numpy(), eps=1e-6),
        mlp=(weights(first, ActivationCode.GELU_TANH), weights(second)),
        num_heads=num_heads,
    )
    rows = [normal(length, width) for length in lengths]
    bounds = np.cumsum([0, *lengths], dtype=np.int32)
    pooled = pool(np.concatenate(rows), bounds)
    for each, found in zip(rows, pooled, strict=True):
        with torch.no_grad():
            sequence = torch.from_numpy(each)[None]
            row = attention(torch.from_numpy(query).view(1, 1, -1), sequence, sequence)[0]
            expected = row + second(torch.nn.functional.gelu(first(norm(row)), approximate="tanh"))
        assert np.abs(found - expected[0, 0].numpy()).max() < 1e-5
        alone = pool(each, np.array([0, len(each)], np.int32))
        assert np.array_equal(alone[0], found)
