"""The selective scan in torch: states of a block of tokens at once, for sequences side by side.

What does not depend on the state (decays, inputs, outputs) is computed for a block of tokens; the recurrence itself is
one multiply-add a token over the states of all sequences of a group. States lie as [S, C], so that the long axis is the
inner one. README.md says why it is not a parallel scan.

Letters beside those of the layer: C channels, M sequences of a group, B tokens of a block.
"""

import math
from itertools import accumulate

import torch
from torch import Tensor

from .._packed import Recurrence

# Elements of the states of one block: 4 MiB, twice.
BLOCK_ELEMENTS = 1 << 20
# Elements of the states of a group of sequences at one time: small enough for the cache of a core, large enough that
# the calls of a step cost little beside its arithmetic.
GROUP_ELEMENTS = 1 << 17
MAX_BLOCK_TOKENS = 64


@torch.no_grad()
def selective_scan_torch(scan: Recurrence) -> tuple[Tensor, Tensor | None]:
    """Same as `selective_scan`."""
    a, seq_lens, initial_states, x = scan.a, scan.seq_lens, scan.initial_states, scan.x
    channels, state_size = a.shape
    # 2 ** (dt * this) is the decay: torch computes powers of two several times as fast as those of e.
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
    """Writes the rows of sequences of descending `lengths` to `y_TC`, and their final states over `state_MSC`."""
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
        # Past its end a sequence reads its own last row, with a step size of 0, which leaves its state as it is.
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
            is_true = ~is_past_BM.flatten()
            y_TC[rows[is_true]] = y[is_true].to(y_TC.dtype)
