"""The recurrence of Mamba-2 over packed sequences ("state space duality"). The caller stores the states."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..backends import Backend, Recurrence, check_rows, check_tensor, choose, describe

__all__ = ["Backend", "ssd"]

DEFAULT_CHUNK_SIZE = 64
MIN_SIZE = 16
# Maximum number of weights of a block (1 MiB in float32).
MAX_WEIGHTS = 1 << 18
# 2 ** -300 is 0 in float32, so a step size of zero has no weight.
MIN_LOG_DT = -300.0


def ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Sequence[int],
    *,
    d: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    chunk_size: int | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Runs the selective state space recurrence with a scalar decay per head over every sequence of a packed batch.

    For each head h of a sequence, with group g = h // (H / G) and the initial state as state_{-1} (zeros without one):

        state_t = exp(dt_t a) state_{t-1} + dt_t x_t b_t^T        [P, S]
        y_t     = state_t c_t + d x_t                             [P]

    Chunks of a sequence give the same rows as the whole sequence if the final state of each chunk is the initial state
    of the next. A NaN in one sequence does not affect another.

    States, decays and sums are float32. Tests allow a difference to the reference of 1e-5 of the largest absolute value
    for float32, and 1e-2 for 16-bit x.

    Args:
        x: [T, H, P], float32/bfloat16/float16, last axis contiguous. Not modified.
        dt: [T, H], float32: step sizes, at least 0, after bias, softplus and limits.
        a: [H], float32, negative.
        b: [T, G, S], dtype of x: input weights; H is a multiple of G.
        c: [T, G, S], dtype of x: output weights.
        cu_seqlens: [N+1], int32, same device: prefix sums of seq_lens.
        seq_lens: N lengths on the host; a length may be 0.
        d: [H], any float dtype: weight of the skip connection; None: no skip connection.
        initial_states: [N, H, P, S], float32. Not modified.
        return_final_states: Whether to return the state after the last row of each sequence.
        chunk_size: Rows to compute at once, a power of two from 16 to 256. Affects speed only. None is 64, or 128 on
            the triton backend for 16-bit x. That backend uses at most 128, and at most 64 for float32.
        backend: None selects "triton" if it is installed and the compute capability is at least 8.0, else "torch".

    Returns:
        y, [T, H, P], dtype and device of x, contiguous; and the final states, [N, H, P, S], float32, or
        None. The final state of an empty sequence is its initial state.

    Raises:
        ValueError: Shapes, dtypes, devices or lengths do not match; the message gives expected and actual values.
    """
    if x.dim() != 3 or b.dim() != 3 or x.shape[1] % max(b.shape[1], 1):
        raise ValueError(
            f"x must be [T, H, P] and b [T, G, S] with H a multiple of G, got {describe(x)} and {describe(b)}"
        )
    check_rows(x, cu_seqlens, seq_lens)
    num_rows, num_heads, head_size = x.shape
    _, num_groups, state_size = b.shape
    check_tensor("dt", dt, (num_rows, num_heads), torch.float32, x.device)
    check_tensor("a", a, (num_heads,), torch.float32, x.device)
    check_tensor("b", b, (num_rows, num_groups, state_size), x.dtype, x.device)
    check_tensor("c", c, (num_rows, num_groups, state_size), x.dtype, x.device)
    if d is not None and d.shape != (num_heads,):
        raise ValueError(f"d must be [{num_heads}], got {describe(d)}")
    states_shape = (len(seq_lens), num_heads, head_size, state_size)
    check_tensor("initial_states", initial_states, states_shape, torch.float32, x.device)
    if chunk_size is not None and (not 16 <= chunk_size <= 256 or chunk_size & (chunk_size - 1)):
        raise ValueError(f"chunk_size must be a power of two from 16 to 256, got {chunk_size}")

    backend = choose(backend, x, has_products=True)
    scan = Recurrence(x, dt, a, b, c, cu_seqlens, seq_lens, d, initial_states, return_final_states)
    if backend == "triton":
        from ._triton import ssd_triton

        return ssd_triton(scan, chunk_size)
    return ssd_torch(scan, chunk_size or DEFAULT_CHUNK_SIZE)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of one sequence.

    Attributes:
        sequence: Number of the sequence in the batch.
        start: First packed row.
        length: Number of rows, at most the size of the block.
        is_first: Whether it is the first chunk of its sequence.
        is_last: Whether it is the last chunk of its sequence.
    """

    sequence: int
    start: int
    length: int
    is_first: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class Block:
    """Chunks that are computed together, each padded to `size` rows.

    Attributes:
        size: Rows of a chunk, padding included.
        chunks: The chunks. Chunks of one sequence are in order.
        start: First packed row of a block without padding.
        end: Row after the last packed row of a block without padding.
        rows: [chunks * size], int64, on the host: packed row of each row; a padding row is the last row of its
            sequence. None if the block is exactly the rows `start` to `end`.
        is_padding: [chunks, size], bool, on the host. None if `rows` is None.
    """

    size: int
    chunks: tuple[Chunk, ...]
    start: int
    end: int
    rows: Tensor | None
    is_padding: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _Decays:
    """Decays of a block, float32. log_i is the sum of dt * rate up to row i of a chunk.

    Attributes:
        row_log: [Z, H, Q], log_i rounded to float32.
        row_rest: [Z, H, Q], 2 ** (the rounding error).
        column_log: [Z, H, Q], log_j - log2(dt_j) rounded to float32.
        column_rest: [Z, H, Q], 2 ** -(the rounding error).
        from_start: [Z, Q, H], 2 ** log_i: decay of the incoming state up to row i.
        to_end: [Z, Q, H], dt_j 2 ** (log_last - log_j): step size and decay of row j up to the end of the chunk.
        chunk_decay: [Z, H], 2 ** log_last: decay over the whole chunk.
    """

    row_log: Tensor
    row_rest: Tensor
    column_log: Tensor
    column_rest: Tensor
    from_start: Tensor
    to_end: Tensor
    chunk_decay: Tensor

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
            chunk_decay=last_Z1H[:, 0].float().exp2_(),
        )


@torch.no_grad()
def ssd_torch(scan: Recurrence, chunk_size: int) -> tuple[Tensor, Tensor | None]:
    """Same as `ssd`: matrix products within chunks, a state between chunks.

    Within a chunk the recurrence is masked attention with decays as weights. One state per head carries the effect of
    earlier rows. README.md has the derivation and explains why decays are powers of two in two parts.

    Shape letters: Z chunks of a block, Q rows of a chunk, G groups, P head size.
    """
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
    # State of the current sequence. K: columns of all heads of a group, contiguous as both products require.
    state_GSK = torch.empty(num_groups, state_size, num_heads // num_groups * head_size, device=x.device)
    for block in make_blocks(scan.seq_lens, chunk_size, num_heads):
        _run_block(scan, block, state_GSK, final_NHPS, y_THP)
    return y_THP, final_NHPS


def _by_head(rows_ZQH: Tensor) -> Tensor:
    return rows_ZQH.transpose(1, 2).contiguous()


def _run_block(scan: Recurrence, block: Block, state_GSK: Tensor, final_NHPS: Tensor | None, y_THP: Tensor) -> None:
    """Writes the rows of the block to `y_THP` and the final states of its sequences to `final_NHPS`.

    `state_GSK` has the state of a sequence that continues from the previous block. It is updated for the next block.
    `scan.a` [H] is float64 and multiplied by log2(e); `scan.d` is float32.
    """
    shape = (len(block.chunks), block.size)
    rows = None if block.rows is None else block.rows.to(scan.x.device)
    selected = slice(block.start, block.end) if rows is None else rows
    x, dt, b, c = scan.x[selected], scan.dt[selected], scan.b[selected], scan.c[selected]
    # bfloat16 products are several times as fast; torch sums them in float32.
    dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    x_ZQHP, dt_ZQH = x.to(dtype).unflatten(0, shape), dt.unflatten(0, shape)
    b_ZQGS, c_ZQGS = b.to(dtype).unflatten(0, shape), c.to(dtype).unflatten(0, shape)
    if block.is_padding is not None:
        dt_ZQH = dt_ZQH.masked_fill(block.is_padding.to(dt.device)[:, :, None], 0.0)
    decays = _Decays.of(dt_ZQH, scan.a)
    out_ZQHP = _within_chunks(x_ZQHP, b_ZQGS, c_ZQGS, scan.d, decays)
    for z, chunk in enumerate(block.chunks):
        inputs = (x_ZQHP[z], b_ZQGS[z], c_ZQGS[z])
        _run_recurrence(scan.initial_states, chunk, *inputs, decays, z, state_GSK, final_NHPS, out_ZQHP[z])
    out = out_ZQHP.flatten(0, 1)
    if rows is None:
        y_THP[block.start : block.end] = out
    else:
        assert block.is_padding is not None
        is_valid = ~block.is_padding.to(out.device).flatten()
        y_THP[rows[is_valid]] = out[is_valid].to(y_THP.dtype)


def _within_chunks(x_ZQHP: Tensor, b_ZQGS: Tensor, c_ZQGS: Tensor, d_H: Tensor | None, decays: _Decays) -> Tensor:
    """[Z, Q, H, P], float32: the output of each row from the rows of its own chunk."""
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
        _update_state(state_GSK, x_QHP, b_QGS, decays.to_end[z], decays.chunk_decay[z])
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


def _update_state(state_GSK: Tensor, x_QHP: Tensor, b_QGS: Tensor, to_end_QH: Tensor, chunk_decay_H: Tensor) -> None:
    size, num_groups, state_size = b_QGS.shape
    device, dtype = b_QGS.device, b_QGS.dtype
    b_GSQ = b_QGS.permute(1, 2, 0)
    decayed_QHP = torch.empty(x_QHP.shape, dtype=torch.float32, device=device)
    state_GSHP = state_GSK.view(num_groups, state_size, -1, x_QHP.shape[2])
    chunk_decay_G1H1 = chunk_decay_H.view(num_groups, 1, -1, 1)
    if dtype == torch.float32:
        decayed_QGK = torch.mul(x_QHP, to_end_QH[:, :, None], out=decayed_QHP).view(size, num_groups, -1)
        state_GSHP.mul_(chunk_decay_G1H1)
        state_GSK.baddbmm_(b_GSQ, decayed_QGK.transpose(0, 1))
        return
    decayed_QHP.copy_(x_QHP).mul_(to_end_QH[:, :, None])
    decayed_QGK = decayed_QHP.to(dtype).view(size, num_groups, -1)
    new_GSK = torch.empty(state_GSK.shape, dtype=dtype, device=device)
    torch.bmm(b_GSQ, decayed_QGK.transpose(0, 1), out=new_GSK)
    new_GSHP = new_GSK.view(state_GSHP.shape).float()
    torch.addcmul(new_GSHP, state_GSHP, chunk_decay_G1H1, out=state_GSHP)


def make_blocks(seq_lens: Sequence[int], chunk_size: int, num_heads: int) -> Iterator[Block]:
    """Yields the blocks of a batch. Blocks of one sequence are consecutive and in order.

    Chunks start at the first row of their sequence and their sizes depend on its length only, so that results do not
    depend on the batch. Sequences of a single chunk share blocks with others of the same chunk size.
    """
    short: dict[int, list[Chunk]] = defaultdict(list)
    for n, (start, length) in enumerate(zip(accumulate(seq_lens, initial=0), seq_lens, strict=False)):
        if length == 0:
            continue
        if length <= chunk_size:
            short[size_of(length, chunk_size)].append(Chunk(n, start, length, True, True))
            continue
        end = start + length
        chunks = [
            Chunk(n, row, min(chunk_size, end - row), row == start, row + chunk_size >= end)
            for row in range(start, end, chunk_size)
        ]
        num_full = length // chunk_size
        yield from _split(chunks[:num_full], chunk_size, num_heads)
        for chunk in chunks[num_full:]:
            yield _make_block([chunk], size_of(chunk.length, chunk_size))
    for size, chunks in short.items():
        yield from _split(chunks, size, num_heads)


def size_of(length: int, chunk_size: int) -> int:
    """Rows to compute for a chunk of `length` rows, a power of two."""
    return min(chunk_size, max(MIN_SIZE, 1 << (length - 1).bit_length()))


def _split(chunks: list[Chunk], size: int, num_heads: int) -> Iterator[Block]:
    """Yields blocks with a power of two of chunks.

    oneDNN compiles a product for each new number of matrices and caches a limited number of products.
    """
    max_chunks = 1 << max(0, (MAX_WEIGHTS // (num_heads * size * size)).bit_length() - 1)
    first = 0
    while first < len(chunks):
        count = min(max_chunks, 1 << ((len(chunks) - first).bit_length() - 1))
        yield _make_block(chunks[first : first + count], size)
        first += count


def _make_block(chunks: list[Chunk], size: int) -> Block:
    start = chunks[0].start
    end = chunks[-1].start + chunks[-1].length
    if all(chunk.length == size and chunk.start == start + z * size for z, chunk in enumerate(chunks)):
        return Block(size, tuple(chunks), start, end, None, None)
    starts_Z1 = torch.tensor([chunk.start for chunk in chunks])[:, None]
    lengths_Z1 = torch.tensor([chunk.length for chunk in chunks])[:, None]
    offsets_1Q = torch.arange(size)
    rows_ZQ = starts_Z1 + torch.minimum(offsets_1Q, lengths_Z1 - 1)
    return Block(size, tuple(chunks), start, end, rows_ZQ.flatten(), offsets_1Q >= lengths_Z1)
