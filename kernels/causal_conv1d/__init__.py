"""Causal depthwise convolution of packed sequences, used before the recurrence in the Mamba models.

The caller stores the states.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import Backend, check_rows, check_tensor, choose, describe

ConvActivation = Literal["silu"]

__all__ = ["Backend", "ConvActivation", "causal_conv1d"]

# Elements of a block of rows (1 MiB in float32).
BLOCK_ELEMENTS = 1 << 18


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


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    seq_lens: Sequence[int],
    *,
    activation: ConvActivation | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Convolves every sequence of a packed batch along time, each channel with its own `weight`.

    For the rows x_0 .. x_{L-1} of a sequence, preceded by the W-1 inputs of its initial state (zeros without one):

        y_t = activation(bias + sum over w = 0 .. W-1 of weight[:, w] * x_{t - (W - 1) + w})

    Chunks of a sequence give the same rows as the whole sequence if the final state of each chunk is the initial state
    of the next. A NaN in one sequence does not affect another.

    Sums are float32 for every input dtype. Tests allow a difference to the reference of 2e-6 of the largest absolute
    value for float32, else one unit in the last place of the dtype.

    Args:
        x: [T, C], float32/bfloat16/float16, last axis contiguous. Not modified.
        weight: [C, W], W >= 1, float32/bfloat16/float16. The last column is the weight of the token itself.
        bias: [C], as `weight`; None: no bias.
        cu_seqlens: [N+1], int32, same device: prefix sums of seq_lens.
        seq_lens: N lengths on the host; a length may be 0.
        activation: "silu" or None.
        initial_states: [N, C, W-1], dtype of x: the inputs before each sequence, oldest first. Not modified.
        return_final_states: Whether to return the final states.
        backend: None selects "triton" for CUDA tensors if it is installed, else "torch".

    Returns:
        y, [T, C], dtype and device of x, contiguous; and the final states, [N, C, W-1], dtype of x, or None: the last
        W-1 inputs of each sequence. A sequence with fewer rows keeps inputs of its initial state.

    Raises:
        ValueError: Shapes, dtypes, devices or lengths do not match; the message gives expected and actual values.
    """
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[0] != x.shape[1] or weight.shape[1] < 1:
        raise ValueError(f"x must be [T, C] and weight [C, W], got {describe(x)} and {describe(weight)}")
    check_rows(x, cu_seqlens, seq_lens)
    channels, width = weight.shape
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"bias must be [{channels}], got {describe(bias)}")
    if activation not in (None, *get_args(ConvActivation)):
        raise ValueError(f"activation must be None or one of {get_args(ConvActivation)}, got {activation!r}")
    check_tensor("initial_states", initial_states, (len(seq_lens), channels, width - 1), x.dtype, x.device)

    backend = choose(backend, x)
    args = Convolution(x, weight, bias, cu_seqlens, seq_lens, activation, initial_states, return_final_states)
    if backend == "triton":
        from ._triton import causal_conv1d_triton

        return causal_conv1d_triton(args)
    return causal_conv1d_torch(args)


@torch.no_grad()
def causal_conv1d_torch(args: Convolution) -> tuple[Tensor, Tensor | None]:
    """Same as `causal_conv1d`: one multiply-add over a block of rows for each column of the weight.

    Convolves the packed rows as if they were one sequence. Then it overwrites the first W - 1 rows of every sequence,
    which used rows of the previous sequence, with results from the sequence's own past.
    """
    x, weight, bias, _, seq_lens, activation, initial_states, return_final_states = args
    num_rows, channels = x.shape
    width = weight.shape[1]
    y_TC = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    weight_WC = weight.float().t().contiguous()
    bias_C = torch.zeros(channels, device=x.device) if bias is None else bias.float()
    block_rows = max(width, BLOCK_ELEMENTS // max(channels, 1))
    for start in range(0, num_rows, block_rows):
        end = min(start + block_rows, num_rows)
        first = max(0, start - (width - 1))
        inputs = x[first:end]
        if x.dtype != torch.float32:
            inputs = inputs.float()
        out = torch.empty((end - start, channels), dtype=torch.float32, device=x.device)
        y_TC[start:end] = _convolve(inputs, weight_WC, bias_C, activation, out)
    if width == 1 or num_rows == 0:
        return y_TC, _final_states(x, seq_lens, initial_states, width) if return_final_states else None

    # The first rows of every sequence, after the inputs of its initial state.
    lengths_N1 = torch.tensor(seq_lens, device=x.device)[:, None]
    starts_N1 = torch.tensor(list(accumulate(seq_lens, initial=0))[:-1], device=x.device)[:, None]
    heads_1W = torch.arange(width - 1, device=x.device)
    is_valid_NW = heads_1W < lengths_N1
    rows_NW = (starts_N1 + heads_1W).clamp(max=num_rows - 1)
    window_NWC = torch.zeros(len(seq_lens), 2 * (width - 1), channels, device=x.device)
    if initial_states is not None:
        window_NWC[:, : width - 1] = initial_states.transpose(1, 2)
    window_NWC[:, width - 1 :] = x[rows_NW]
    heads_NWC = _convolve(window_NWC, weight_WC, bias_C, activation, torch.empty_like(window_NWC[:, width - 1 :]))
    y_TC[rows_NW[is_valid_NW]] = heads_NWC[is_valid_NW].to(y_TC.dtype)
    return y_TC, _final_states(x, seq_lens, initial_states, width) if return_final_states else None


def _convolve(inputs: Tensor, weight_WC: Tensor, bias_C: Tensor, activation: str | None, out: Tensor) -> Tensor:
    """Convolves the last rows of `inputs` [..., rows, C] into `out` [..., rows of out, C]; both float32.

    Missing inputs before the first row are zeros.
    """
    width, num_rows, num_before = weight_WC.shape[0], out.shape[-2], inputs.shape[-2] - out.shape[-2]
    torch.addcmul(bias_C, inputs[..., num_before:, :], weight_WC[width - 1], out=out)
    for shift in range(1, width):
        # Number of output rows without an input `shift` rows earlier.
        skipped = max(0, shift - num_before)
        if skipped < num_rows:
            earlier = inputs[..., num_before + skipped - shift : inputs.shape[-2] - shift, :]
            out[..., skipped:, :].addcmul_(earlier, weight_WC[width - 1 - shift])
    return F.silu(out, inplace=True) if activation == "silu" else out


def _final_states(x: Tensor, seq_lens: Sequence[int], initial_states: Tensor | None, width: int) -> Tensor:
    """[N, C, W-1], dtype of x: the last W - 1 inputs of each sequence, including its initial state."""
    num_seqs, channels = len(seq_lens), x.shape[1]
    past_NCW = x.new_zeros(num_seqs, channels, width - 1) if initial_states is None else initial_states
    if width == 1 or num_seqs == 0 or x.shape[0] == 0:
        return past_NCW.clone()
    lengths_N1 = torch.tensor(seq_lens, device=x.device)[:, None]
    ends_N1 = torch.tensor(list(accumulate(seq_lens)), device=x.device)[:, None]
    tails_1W = torch.arange(width - 1, device=x.device)
    # Position of each state input; negative for inputs of the initial state.
    positions_NW = lengths_N1 - (width - 1) + tails_1W
    rows_NW = (ends_N1 - (width - 1) + tails_1W).clamp(min=0)
    new_NCW = x[rows_NW].transpose(1, 2)
    columns_NW = (lengths_N1 + tails_1W).clamp(max=width - 2)
    past_NCW = past_NCW.gather(2, columns_NW[:, None, :].expand(num_seqs, channels, width - 1))
    return torch.where((positions_NW >= 0)[:, None, :], new_NCW, past_NCW).contiguous()
