"""Reference of the causal convolution: one sequence after the other, one token after the other, in float32."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Convolution(NamedTuple):
    """Arguments of `causal_conv1d`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    cu_seqlens: Tensor
    seq_lens: Sequence[int]
    activation: str | None
    initial_states: Tensor | None
    return_final_states: bool


def causal_conv1d_reference(given: Convolution) -> tuple[Tensor, Tensor | None]:
    """Same as `causal_conv1d`."""
    x, weight, bias, _, seq_lens, activation, initial_states, return_final_states = given
    channels, width = weight.shape
    y_TC = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final_NCW = torch.empty(len(seq_lens), channels, width - 1, dtype=x.dtype, device=x.device)
    start = 0
    for n, length in enumerate(seq_lens):
        past_CW = x.new_zeros(channels, width - 1) if initial_states is None else initial_states[n]
        inputs_CL = torch.cat([past_CW, x[start : start + length].t()], dim=1)
        for t in range(length):
            row_C = (inputs_CL[:, t : t + width].float() * weight.float()).sum(1)
            if bias is not None:
                row_C = row_C + bias.float()
            y_TC[start + t] = F.silu(row_C) if activation == "silu" else row_C
        final_NCW[n] = inputs_CL[:, length:]
        start += length
    return y_TC, final_NCW if return_final_states else None
