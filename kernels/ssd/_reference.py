"""The truth of state space duality: the recurrence, one sequence and one token after the other, in float32."""

from collections.abc import Sequence

import torch
from torch import Tensor


def ssd_reference(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    seq_lens: Sequence[int],
    d: Tensor | None,
    initial_states: Tensor | None,
    return_final_states: bool,
) -> tuple[Tensor, Tensor | None]:
    """Same as `ssd`."""
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
