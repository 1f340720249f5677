"""The gates on CUDA: one program reads a tile of gates and the tile of values beside it, and writes their product."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._packed import on_device

# Elements of a tile, and its most columns: the last tile of a row is cut, and a narrow one wastes less.
BLOCK_SIZE = 2048
MAX_BLOCK_COLUMNS = 512


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)), without an exponential that overflows."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_kernel(
    x_ptr,
    out_ptr,
    num_rows,
    width,
    stride_x,
    ACTIVATION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """The product of activation(gate) and up for one tile; the tiles of a row follow each other."""
    num_blocks = tl.cdiv(width, BLOCK_COLUMNS)
    program = tl.program_id(0)
    rows = (program // num_blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = (program % num_blocks) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    addresses = x_ptr + rows[:, None] * stride_x + columns[None, :]
    gate = tl.load(addresses, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(addresses + width, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        active = gate * _sigmoid(gate)
    elif ACTIVATION == "gelu":
        active = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # (1 + tanh(u)) / 2 = sigmoid(2 u), with u = sqrt(2 / pi) * (gate + 0.044715 * gate^3).
        active = gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    places = rows[:, None] * width + columns[None, :]
    tl.store(out_ptr + places, (active * up).to(out_ptr.dtype.element_ty), mask=mask)


def gated_triton(x: Tensor, activation: str) -> Tensor:
    """Same as `gated`. Does not synchronise host and device."""
    num_rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    tile = tile_options(width)
    num_programs = -(-num_rows // tile["BLOCK_ROWS"]) * -(-width // tile["BLOCK_COLUMNS"])
    with on_device(x):
        _gated_kernel[(num_programs,)](x, out, num_rows, width, x.stride(0), ACTIVATION=activation, **tile)
    return out


def tile_options(width: int) -> dict[str, int]:
    """Launch options by the width of the result."""
    block_columns = min(MAX_BLOCK_COLUMNS, max(64, 1 << (width - 1).bit_length()))
    return {"BLOCK_ROWS": BLOCK_SIZE // block_columns, "BLOCK_COLUMNS": block_columns, "num_warps": 4}
