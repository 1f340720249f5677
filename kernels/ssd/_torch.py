"""State space duality in torch: chunks of rows by products of matrices, a state from chunk to chunk.

Within a chunk the recurrence is written as masked attention whose weights are decays; what came before the chunk
reaches it through one state per head. README.md has the derivation, and says why decays are powers of two and come in
two parts.

Letters beside those of the layer: Z chunks of a block, Q rows of a chunk, G groups, P head size.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .._packed import Recurrence
from ._blocks import Block, Chunk, make_blocks

# Below every power of two that float32 can hold, so that a step size of zero weighs nothing.
MIN_LOG_DT = -300.0


@torch.no_grad()
def ssd_torch(scan: Recurrence, chunk_size: int) -> tuple[Tensor, Tensor | None]:
    """Same as `ssd`."""
    x, initial_states = scan.x, scan.initial_states
    _, num_heads, head_size = x.shape
    y_THP = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final_NHPS = None
    if scan.return_final_states:
        final_NHPS = torch.zeros(len(scan.seq_lens), num_heads, head_size, scan.b.shape[2], device=x.device)
        if initial_states is not None:
            final_NHPS.copy_(initial_states)
    scan = scan._replace(a=scan.a.double() * math.log2(math.e), d=None if scan.d is None else scan.d.float())
    num_groups, state_size = scan.b.shape[1:]
    # Of the sequence at hand, K the columns of all heads of a group: rows of K are what both products want.
    state_GSK = torch.empty(num_groups, state_size, num_heads // num_groups * head_size, device=x.device)
    for block in make_blocks(scan.seq_lens, chunk_size, num_heads):
        _run_block(scan, block, state_GSK, final_NHPS, y_THP)
    return y_THP, final_NHPS


@dataclass(frozen=True, slots=True, eq=False)
class _Decays:
    """The decays of a block, float32. Below, log_i is the sum of dt * rate up to row i of its chunk.

    Attributes:
        row_log: [Z, H, Q], log_i rounded to float32.
        row_rest: [Z, H, Q], 2 ** (the rounding error).
        column_log: [Z, H, Q], log_j - log2(dt_j) rounded to float32.
        column_rest: [Z, H, Q], 2 ** -(the rounding error).
        from_start: [Z, Q, H], 2 ** log_i: the share of the incoming state that is left at row i.
        to_end: [Z, Q, H], dt_j 2 ** (log_last - log_j): the share of row j that is left at the end of the chunk.
        whole: [Z, H], 2 ** log_last.
    """

    row_log: Tensor
    row_rest: Tensor
    column_log: Tensor
    column_rest: Tensor
    from_start: Tensor
    to_end: Tensor
    whole: Tensor

    @classmethod
    def of(cls, dt_ZQH: Tensor, rate_H: Tensor) -> "_Decays":
        log_ZQH = (dt_ZQH.double() * rate_H).cumsum(1)
        source_ZQH = log_ZQH - dt_ZQH.double().log2().clamp_(min=MIN_LOG_DT)
        last_Z1H = log_ZQH[:, -1:]
        row_log, column_log = log_ZQH.float(), source_ZQH.float()
        return cls(
            row_log=_by_head(row_log),
            row_rest=_by_head((log_ZQH - row_log).float().exp2_()),
            column_log=_by_head(column_log),
            column_rest=_by_head((column_log - source_ZQH).float().exp2_()),
            from_start=row_log.exp2(),
            to_end=(last_Z1H - source_ZQH).float().exp2_(),
            whole=last_Z1H[:, 0].float().exp2_(),
        )


def _by_head(rows_ZQH: Tensor) -> Tensor:
    return rows_ZQH.transpose(1, 2).contiguous()


def _run_block(scan: Recurrence, block: Block, state_GSK: Tensor, final_NHPS: Tensor | None, y_THP: Tensor) -> None:
    """Writes the rows of the block to `y_THP`, and the final states of its sequences to `final_NHPS`.

    `state_GSK` is the state of the sequence that goes on from the block before, then of that which goes on after it.


    `scan.a` [H] is float64 here, and in powers of two; `scan.d` is float32.
    """
    shape = (block.num_chunks, block.size)
    rows = None if block.rows is None else block.rows.to(scan.x.device)
    picked = slice(block.start, block.end) if rows is None else rows
    x, dt, b, c = scan.x[picked], scan.dt[picked], scan.b[picked], scan.c[picked]
    # Products of bfloat16 are several times as fast; torch sums them in float32.
    dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    x_ZQHP, dt_ZQH = x.to(dtype).unflatten(0, shape), dt.unflatten(0, shape)
    b_ZQGS, c_ZQGS = b.to(dtype).unflatten(0, shape), c.to(dtype).unflatten(0, shape)
    if block.is_padding is not None:
        dt_ZQH = dt_ZQH.masked_fill(block.is_padding.to(dt.device)[:, :, None], 0.0)
    decays = _Decays.of(dt_ZQH, scan.a)
    out_ZQHP = _within_chunks(x_ZQHP, b_ZQGS, c_ZQGS, scan.d, decays)
    for z, chunk in enumerate(block.chunks):
        of_chunk = (chunk, x_ZQHP[z], b_ZQGS[z], c_ZQGS[z], decays, z)
        _run_recurrence(scan.initial_states, *of_chunk, state_GSK, final_NHPS, out_ZQHP[z])
    out = out_ZQHP.flatten(0, 1)
    if rows is None:
        y_THP[block.start : block.end] = out
    else:
        assert block.is_padding is not None
        is_true = ~block.is_padding.to(out.device).flatten()
        y_THP[rows[is_true]] = out[is_true].to(y_THP.dtype)


def _within_chunks(x_ZQHP: Tensor, b_ZQGS: Tensor, c_ZQGS: Tensor, d_H: Tensor | None, decays: _Decays) -> Tensor:
    """[Z, Q, H, P], float32: the contribution of the rows of a chunk to each other."""
    num_chunks, size, num_groups, _ = b_ZQGS.shape
    num_heads, head_size = x_ZQHP.shape[2:]
    device, dtype = x_ZQHP.device, x_ZQHP.dtype
    is_exact = dtype == torch.float32
    # weights_ij = dt_j 2 ** (log_i - log_j) c_i b_j for j <= i.
    weights_ZHQQ = torch.empty((num_chunks, num_heads, size, size), dtype=torch.float32, device=device)
    torch.sub(decays.row_log[:, :, :, None], decays.column_log[:, :, None, :], out=weights_ZHQQ)
    weights_ZHQQ.add_(torch.full((size, size), float("-inf"), device=device).triu_(1)).exp2_()
    products_ZGQQ = torch.matmul(c_ZQGS.transpose(1, 2), b_ZQGS.permute(0, 2, 3, 1)).float()
    weights_ZHQQ.view(num_chunks, num_groups, -1, size, size).mul_(products_ZGQQ[:, :, None])
    if d_H is not None:
        rest = decays.row_rest * decays.column_rest if is_exact else 1.0
        weights_ZHQQ.diagonal(dim1=2, dim2=3).add_(d_H[:, None] / rest)
    x_ZHQP = torch.empty((num_chunks, num_heads, size, head_size), dtype=dtype, device=device)
    out_ZHQP = torch.empty(x_ZHQP.shape, dtype=dtype, device=device)
    out_ZQHP = torch.empty(x_ZQHP.shape, dtype=torch.float32, device=device)
    if is_exact:
        torch.mul(x_ZQHP.transpose(1, 2), decays.column_rest[..., None], out=x_ZHQP)
    else:
        x_ZHQP.copy_(x_ZQHP.transpose(1, 2))
        weights_ZHQQ = weights_ZHQQ.to(dtype)
    torch.bmm(weights_ZHQQ.flatten(0, 1), x_ZHQP.flatten(0, 1), out=out_ZHQP.flatten(0, 1))
    if is_exact:
        return torch.mul(out_ZHQP.transpose(1, 2), decays.row_rest.transpose(1, 2)[..., None], out=out_ZQHP)
    return out_ZQHP.copy_(out_ZHQP.transpose(1, 2))


def _run_recurrence(
    initial_NHPS: Tensor | None,
    chunk: Chunk,
    x_QHP: Tensor,
    b_QGS: Tensor,
    c_QGS: Tensor,
    decays: _Decays,
    z: int,
    state_GSK: Tensor,
    final_NHPS: Tensor | None,
    out_QHP: Tensor,
) -> None:
    """Adds the contribution of the state before chunk `z` to its rows, and updates the state.

    The state is read and written only if it is needed.
    """
    num_heads, head_size = x_QHP.shape[1:]
    num_groups, state_size = b_QGS.shape[1:]
    by_group = (num_groups, num_heads // num_groups * head_size, state_size)
    has_past = not chunk.is_first or initial_NHPS is not None
    if chunk.is_first and initial_NHPS is not None:
        state_GSK.copy_(initial_NHPS[chunk.sequence].view(by_group).transpose(1, 2))
    if has_past:
        _add_past(out_QHP, c_QGS, decays.from_start[z], state_GSK)
    if not chunk.is_last or final_NHPS is not None:
        if not has_past:
            state_GSK.zero_()
        _move_state(state_GSK, x_QHP, b_QGS, decays.to_end[z], decays.whole[z])
    if chunk.is_last and final_NHPS is not None:
        final_NHPS[chunk.sequence].view(by_group).copy_(state_GSK.transpose(1, 2))


def _add_past(out_QHP: Tensor, c_QGS: Tensor, from_start_QH: Tensor, state_GSK: Tensor) -> None:
    size, num_groups, _ = c_QGS.shape
    device, dtype = c_QGS.device, c_QGS.dtype
    if dtype != torch.float32:
        state_GSK = state_GSK.to(dtype)
    past_GQK = torch.empty((num_groups, size, state_GSK.shape[2]), dtype=dtype, device=device)
    torch.bmm(c_QGS.transpose(0, 1), state_GSK, out=past_GQK)
    past_QGK = past_GQK.transpose(0, 1)
    if num_groups > 1 or dtype != torch.float32:
        past_QGK = past_QGK.float().contiguous()
    out_QHP.addcmul_(past_QGK.view(out_QHP.shape), from_start_QH[:, :, None])


def _move_state(state_GSK: Tensor, x_QHP: Tensor, b_QGS: Tensor, to_end_QH: Tensor, whole_H: Tensor) -> None:
    size, num_groups, state_size = b_QGS.shape
    device, dtype = b_QGS.device, b_QGS.dtype
    b_GSQ = b_QGS.permute(1, 2, 0)
    left_QHP = torch.empty(x_QHP.shape, dtype=torch.float32, device=device)
    state_GSHP = state_GSK.view(num_groups, state_size, -1, x_QHP.shape[2])
    whole_G1H1 = whole_H.view(num_groups, 1, -1, 1)
    if dtype == torch.float32:
        left_QGK = torch.mul(x_QHP, to_end_QH[:, :, None], out=left_QHP).view(size, num_groups, -1)
        state_GSHP.mul_(whole_G1H1)
        state_GSK.baddbmm_(b_GSQ, left_QGK.transpose(0, 1))
        return
    left_QHP.copy_(x_QHP).mul_(to_end_QH[:, :, None])
    left_QGK = left_QHP.to(dtype).view(size, num_groups, -1)
    new_GSK = torch.empty(state_GSK.shape, dtype=dtype, device=device)
    torch.bmm(b_GSQ, left_QGK.transpose(0, 1), out=new_GSK)
    new_GSHP = new_GSK.view(state_GSHP.shape).float()
    torch.addcmul(new_GSHP, state_GSHP, whole_G1H1, out=state_GSHP)
