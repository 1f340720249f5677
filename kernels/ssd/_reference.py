"""Reference of state space duality: the recurrence, one sequence and one token after the other, in float32."""

import torch
from torch import Tensor

from .._packed import Recurrence


def ssd_reference(scan: Recurrence) -> tuple[Tensor, Tensor | None]:
    """Same as `ssd`."""
    x, dt, a, b, c, _, seq_lens, d, initial_states, return_final_states = scan
    _, num_heads, head_size = x.shape
    _, num_groups, state_size = b.shape
    heads_per_group = num_heads // num_groups
    y_THP = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final_NHPS = torch.empty(len(seq_lens), num_heads, head_size, state_size, device=x.device)
    start = 0
    for n, length in enumerate(seq_lens):
        state_HPS = torch.zeros_like(final_NHPS[n]) if initial_states is None else initial_states[n]
        for t in range(start, start + length):
            x_HP = x[t].float()
            b_HS = b[t].float().repeat_interleave(heads_per_group, dim=0)
            c_HS = c[t].float().repeat_interleave(heads_per_group, dim=0)
            decay_H = torch.exp(dt[t] * a)
            state_HPS = decay_H[:, None, None] * state_HPS + (dt[t][:, None] * x_HP)[:, :, None] * b_HS[:, None, :]
            row_HP = (state_HPS * c_HS[:, None, :]).sum(2)
            if d is not None:
                row_HP = row_HP + d.float()[:, None] * x_HP
            y_THP[t] = row_HP
        final_NHPS[n] = state_HPS
        start += length
    return y_THP, final_NHPS if return_final_states else None
