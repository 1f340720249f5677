"""Gates on CUDA: one program reads a tile of gates and the matching tile of values and writes their product."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..backends import on_device

# Elements and maximum columns of a tile. Narrow tiles waste less in the last, partial tile of a row.
BLOCK_SIZE = 2048
MAX_BLOCK_COLUMNS = 512
# Elements and maximum rows of a tile of whole groups.
NORM_BLOCK_SIZE = 4096
MAX_BLOCK_ROWS = 16


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)) without overflow."""
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
    """Computes activation(gate) * up for one tile. Tiles of a row have consecutive program numbers."""
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
    offsets = rows[:, None] * width + columns[None, :]
    tl.store(out_ptr + offsets, (active * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    group_width,
    num_groups,
    stride_x,
    stride_gate,
    eps,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Computes norm(x * silu(gate)) for one group of BLOCK_ROWS rows. Groups of a row have consecutive numbers."""
    program = tl.program_id(0)
    rows = (program // num_groups).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    offsets = tl.arange(0, BLOCK_D)
    is_column = offsets < group_width
    columns = (program % num_groups) * group_width + offsets
    mask = (rows < num_rows)[:, None] & is_column[None, :]
    gate = tl.load(gate_ptr + rows[:, None] * stride_gate + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + rows[:, None] * stride_x + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    s = x * gate * _sigmoid(gate)
    inverse = tl.rsqrt(tl.sum(s * s, axis=1) / group_width + eps)
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0)
    out_offsets = rows[:, None] * (num_groups * group_width) + columns[None, :]
    normed = s * inverse[:, None] * weight[None, :]
    tl.store(out_ptr + out_offsets, normed.to(out_ptr.dtype.element_ty), mask=mask)


def gated_norm_triton(x: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float) -> Tensor:
    """Same as `gated_norm`, for groups of at most MAX_GROUP_WIDTH columns. Does not synchronise host and device."""
    num_rows, width = x.shape
    out = torch.empty((num_rows, width), dtype=gate.dtype, device=gate.device)
    if not out.numel():
        return out
    group_width = width // num_groups
    tile = norm_tile_options(group_width)
    num_programs = -(-num_rows // tile["BLOCK_ROWS"]) * num_groups
    with on_device(x):
        _gated_norm_kernel[(num_programs,)](
            *(x, gate, weight.contiguous(), out, num_rows, group_width, num_groups),
            *(x.stride(0), gate.stride(0), eps),
            **tile,
        )
    return out


def norm_tile_options(group_width: int) -> dict[str, int]:
    """Launch options. They depend on the width only, so that a row's sums have the same order in every batch."""
    block_d = max(64, 1 << (group_width - 1).bit_length())
    block_rows = min(MAX_BLOCK_ROWS, max(1, NORM_BLOCK_SIZE // block_d))
    return {"BLOCK_ROWS": block_rows, "BLOCK_D": block_d, "num_warps": 4 if block_d <= NORM_BLOCK_SIZE else 8}


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
    """Launch options for the width of the result."""
    block_columns = min(MAX_BLOCK_COLUMNS, max(64, 1 << (width - 1).bit_length()))
    return {"BLOCK_ROWS": BLOCK_SIZE // block_columns, "BLOCK_COLUMNS": block_columns, "num_warps": 4}
