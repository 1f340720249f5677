"""Rotary position embedding (RoPE), halves rotated together as in GPT-NeoX and transformers.

Source: Su et al., RoFormer (arXiv 2104.09864), equation 34.
Shape letters: T packed tokens, P positions, H heads, K head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles of one batch; the same for every layer of one theta.

    Attributes:
        cos: [T, 1, 1, K/2] float32.
        sin: [T, 1, 1, K/2] float32.
    """

    cos: Tensor
    sin: Tensor

    def apply_(self, x_TCHK: Tensor) -> None:
        """Rotates [T, C, H, K] in place (C: q and k side by side); the arithmetic is float32."""
        first, second = x_TCHK.chunk(2, dim=-1)
        a, b = first.float(), second.float()
        rotated_first = a * self.cos - b * self.sin
        second.copy_(torch.addcmul(b * self.cos, a, self.sin))
        first.copy_(rotated_first)


class RotaryEmbedding:
    """Tables of cos(p * w_i) and sin(p * w_i) with w_i = theta^(-2i / K).

    Args:
        head_size: K.
        num_positions: P.
        theta: Base of the wavelengths.
        device: Where the tables live.
    """

    def __init__(self, head_size: int, num_positions: int, theta: float, device: torch.device) -> None:
        frequencies = 1.0 / (theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size))
        angles_PK = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
        self._cos_PK = angles_PK.cos().to(device)
        self._sin_PK = angles_PK.sin().to(device)

    def __call__(self, positions_T: Tensor) -> Rotation:
        """Returns the angles of tokens at these positions."""
        return Rotation(self._cos_PK[positions_T][:, None, None], self._sin_PK[positions_T][:, None, None])
