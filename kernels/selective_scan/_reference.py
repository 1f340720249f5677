"""Reference of the selective scan: the recurrence, one sequence and one token after the other, in float32."""

import torch
from torch import Tensor

from .._packed import Recurrence


def selective_scan_reference(scan: Recurrence) -> tuple[Tensor, Tensor | None]:
    """Same as `selective_scan`."""
    x, dt, a, b, c, _, seq_lens, d, initial_states, return_final_states = scan
    y_TC = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final_NCS = torch.empty(len(seq_lens), *a.shape, device=x.device)
    start = 0
    for n, length in enumerate(seq_lens):
        state_CS = torch.zeros_like(a) if initial_states is None else initial_states[n]
        for t in range(start, start + length):
            x_C = x[t].float()
            decay_CS = torch.exp(dt[t][:, None] * a)
            state_CS = decay_CS * state_CS + (dt[t] * x_C)[:, None] * b[t].float()
            row_C = (state_CS * c[t].float()).sum(1)
            if d is not None:
                row_C = row_C + d.float() * x_C
            y_TC[t] = row_C
        final_NCS[n] = state_CS
        start += length
    return y_TC, final_NCS if return_final_states else None
