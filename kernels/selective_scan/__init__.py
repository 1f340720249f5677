"""The recurrence of Mamba over packed sequences ("selective scan"). The caller stores the states."""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..backends import Backend, Recurrence, check_rows, check_tensor, choose, describe

__all__ = ["Backend", "selective_scan"]

# Elements of the states of one block (4 MiB). Two such arrays are allocated.
BLOCK_ELEMENTS = 1 << 20
# Elements of the states of a group of sequences at one time step: they fit in a core's cache, and torch's overhead per
# call is small compared with the arithmetic.
GROUP_ELEMENTS = 1 << 17
MAX_BLOCK_TOKENS = 64


def selective_scan(
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
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Runs the selective state space recurrence with a decay per channel and state over every sequence of a batch.

    For each channel of a sequence, with its initial state as state_{-1} (zeros without one):

        state_t = exp(dt_t a) * state_{t-1} + dt_t x_t b_t        [S]
        y_t     = sum(state_t * c_t) + d x_t

    Chunks of a sequence give the same rows as the whole sequence if the final state of each chunk is the initial state
    of the next. A NaN in one sequence does not affect another.

    States, decays and sums are float32 for every dtype of x. Tests allow a difference to the reference of 5e-6 of the
    largest absolute value for float32, else one unit in the last place of the dtype.

    Args:
        x: [T, C], float32/bfloat16/float16, last axis contiguous. Not modified.
        dt: [T, C], float32: step sizes, at least 0, after bias and softplus.
        a: [C, S], float32, negative.
        b: [T, S], dtype of x: input weights, the same for all channels.
        c: [T, S], dtype of x: output weights, the same for all channels.
        cu_seqlens: [N+1], int32, same device: prefix sums of seq_lens.
        seq_lens: N lengths on the host; a length may be 0.
        d: [C], any float dtype: weight of the skip connection; None: no skip connection.
        initial_states: [N, C, S], float32. Not modified.
        return_final_states: Whether to return the state after the last row of each sequence.
        backend: None selects "triton" for CUDA tensors if it is installed, else "torch".

    Returns:
        y, [T, C], dtype and device of x, contiguous; and the final states, [N, C, S], float32, or None.
        The final state of an empty sequence is its initial state.

    Raises:
        ValueError: Shapes, dtypes, devices or lengths do not match; the message gives expected and actual values.
    """
    if x.dim() != 2 or a.dim() != 2:
        raise ValueError(f"x must be [T, C] and a [C, S], got {describe(x)} and {describe(a)}")
    check_rows(x, cu_seqlens, seq_lens)
    num_rows, channels = x.shape
    state_size = a.shape[1]
    check_tensor("dt", dt, (num_rows, channels), torch.float32, x.device)
    check_tensor("a", a, (channels, state_size), torch.float32, x.device)
    check_tensor("b", b, (num_rows, state_size), x.dtype, x.device)
    check_tensor("c", c, (num_rows, state_size), x.dtype, x.device)
    if d is not None and d.shape != (channels,):
        raise ValueError(f"d must be [{channels}], got {describe(d)}")
    check_tensor("initial_states", initial_states, (len(seq_lens), channels, state_size), torch.float32, x.device)

    backend = choose(backend, x)
    scan = Recurrence(x, dt, a, b, c, cu_seqlens, seq_lens, d, initial_states, return_final_states)
    if backend == "triton":
        from ._triton import selective_scan_triton

        return selective_scan_triton(scan)
    return selective_scan_torch(scan)


@torch.no_grad()
def selective_scan_torch(scan: Recurrence) -> tuple[Tensor, Tensor | None]:
    """Same as `selective_scan`: computes a block of tokens of a group of sequences at a time.

    Decays and inputs do not depend on the state and are computed for the whole block, as are the outputs afterwards.
    The recurrence is one multiply-add per token over the states of all sequences of a group. States are [S, C], so that
    the long axis is contiguous. README.md explains why there is no parallel scan.

    Shape letters: C channels, M sequences of a group, B tokens of a block.
    """
    a, seq_lens, initial_states, x = scan.a, scan.seq_lens, scan.initial_states, scan.x
    channels, state_size = a.shape
    # The decay is 2 ** (dt * rate): torch computes exp2 several times as fast as exp.
    rate_SC = a.t().contiguous() * math.log2(math.e)
    y_TC = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final_NCS = torch.empty(len(seq_lens), channels, state_size, device=x.device) if scan.return_final_states else None
    starts = list(accumulate(seq_lens, initial=0))
    order = sorted(range(len(seq_lens)), key=lambda n: -seq_lens[n])
    group_size = max(1, GROUP_ELEMENTS // (channels * state_size))
    for first in range(0, len(order), group_size):
        members = order[first : first + group_size]
        if initial_states is None:
            state_MSC = torch.zeros(len(members), state_size, channels, device=x.device)
        else:
            state_MSC = initial_states[members].transpose(1, 2).contiguous()
        lengths = [seq_lens[n] for n in members]
        _scan_group(scan, rate_SC, [starts[n] for n in members], lengths, state_MSC, y_TC)
        if final_NCS is not None:
            final_NCS[members] = state_MSC.transpose(1, 2)
    return y_TC, final_NCS


def _scan_group(
    scan: Recurrence, rate_SC: Tensor, starts: list[int], lengths: list[int], state_MSC: Tensor, y_TC: Tensor
) -> None:
    """Writes the rows of sequences, sorted by descending length, to `y_TC` and updates `state_MSC`."""
    x, dt, b, c, d = scan.x, scan.dt, scan.b, scan.c, scan.d
    num_seqs, state_size, channels = state_MSC.shape
    if not lengths[0]:
        return
    block_tokens = min(max(1, BLOCK_ELEMENTS // state_MSC.numel()), MAX_BLOCK_TOKENS, lengths[0])
    starts_M = torch.tensor(starts, device=x.device)
    lengths_M = torch.tensor(lengths, device=x.device)
    num_active = num_seqs
    for t in range(0, lengths[0], block_tokens):
        while lengths[num_active - 1] <= t:
            num_active -= 1
        num_steps = min(block_tokens, lengths[0] - t)
        times_B1 = torch.arange(t, t + num_steps, device=x.device)[:, None]
        is_past_BM = times_B1 >= lengths_M[:num_active]
        # Past its end a sequence reads its last row with a step size of 0, which does not change its state.
        rows_BM = starts_M[:num_active] + torch.minimum(times_B1, lengths_M[:num_active] - 1)
        rows = rows_BM.flatten()
        shape = (num_steps, num_active, state_size, channels)
        x_BMC = x[rows].float().view(num_steps, num_active, channels)
        dt_BMC = dt[rows].view(num_steps, num_active, channels).masked_fill_(is_past_BM[:, :, None], 0.0)
        b_BMS = b[rows].float().view(num_steps, num_active, state_size)
        decay_BMSC = torch.empty(shape, dtype=torch.float32, device=x.device)
        state_BMSC = torch.empty(shape, dtype=torch.float32, device=x.device)
        torch.mul(dt_BMC[:, :, None, :], rate_SC, out=decay_BMSC).exp2_()
        torch.mul((dt_BMC * x_BMC)[:, :, None, :], b_BMS[:, :, :, None], out=state_BMSC)
        past = state_MSC[:num_active]
        for decay, state in zip(decay_BMSC.unbind(), state_BMSC.unbind(), strict=True):
            past = state.addcmul_(decay, past)
        state_MSC[:num_active] = past

        y = torch.bmm(c[rows].float()[:, None, :], state_BMSC.view(-1, state_size, channels))[:, 0]
        if d is not None:
            y.addcmul_(x_BMC.view(-1, channels), d.float())
        if num_active == 1:
            y_TC[starts[0] + t : starts[0] + t + num_steps] = y
        else:
            is_valid = ~is_past_BM.flatten()
            y_TC[rows[is_valid]] = y[is_valid].to(y_TC.dtype)
