"""The encoder of the original Transformer, which BERT, DistilBERT and MPNet share to the letter.

Source: Vaswani et al., Attention Is All You Need (arXiv 1706.03762), figure 1, left.
Shape letters: T packed tokens in R rows, D model width, H heads, L longest sequence, I inner width of the MLP.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from penstock.kernels.attention import AttentionPlan

from ...layers.attention.encoder import SelfAttention
from ...layers.linear import Linear
from ...layers.norm import LayerNorm
from ...layers.rows import Rows
from ...layers.weights import Weights
from ..base import ModelOutput, NativeModel

if TYPE_CHECKING:
    from ...packed_batch import PackedBatch


class BlockNames(NamedTuple):
    """Names of the maps of one block, as a family's checkpoints have them."""

    q: str
    k: str
    v: str
    attention_out: str
    attention_norm: str
    mlp_in: str
    mlp_out: str
    mlp_norm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PostNormBlock:
    """Attention, then MLP, each followed by the sum with its input and a LayerNorm.

    Attributes:
        attention: Without its output projection.
        attention_out: The output projection, D to D.
        attention_norm: After the first sum.
        mlp_in: D to I, with its activation.
        mlp_out: I to D.
        mlp_norm: After the second sum.
    """

    attention: SelfAttention
    attention_out: Linear
    attention_norm: LayerNorm
    mlp_in: Linear
    mlp_out: Linear
    mlp_norm: LayerNorm

    @classmethod
    def load(
        cls, weights: Weights, names: BlockNames, size: int, inner_size: int, heads: int, activation: str, eps: float
    ) -> PostNormBlock:
        """Reads one block of width D = `size` and I = `inner_size`."""
        return cls(
            attention=SelfAttention.load(weights, names[:3], size, heads),
            attention_out=Linear.load(weights, names.attention_out, size, size),
            attention_norm=LayerNorm.load(weights, names.attention_norm, size, eps),
            mlp_in=Linear.load(weights, names.mlp_in, size, inner_size, activation=activation),
            mlp_out=Linear.load(weights, names.mlp_out, inner_size, size),
            mlp_norm=LayerNorm.load(weights, names.mlp_norm, size, eps),
        )

    def __call__(self, hidden_RD: Tensor, rows: Rows, plan: AttentionPlan, relative_bias: Tensor | None) -> Tensor:
        """Returns the next hidden states."""
        attended_RD = self.attention(hidden_RD, rows, plan, relative_bias=relative_bias)
        hidden_RD = self.attention_norm(self.attention_out(attended_RD, add=hidden_RD))
        inner_RI = self.mlp_in(hidden_RD)
        return self.mlp_norm(self.mlp_out(inner_RI, add=hidden_RD))


class PostNormEncoder(NativeModel):
    """Embedding, then blocks.

    Attributes:
        blocks: At least one.
        relative_bias: [H, L, L], added to the scores of every block; None where the family has none.
    """

    blocks: list[PostNormBlock]
    relative_bias: Tensor | None = None

    @abstractmethod
    def embed(self, rows: Rows) -> Tensor:
        """Returns the first hidden states [R, D]."""

    def forward(self, batch: PackedBatch, *, need_attention: bool = False) -> ModelOutput:
        """See PackedModel."""
        rows = Rows.of(batch)
        last = self.blocks[-1].attention
        plan = last.plan(rows)
        hidden_RD = block_input_RD = self.embed(rows)
        for block in self.blocks:
            block_input_RD, hidden_RD = hidden_RD, block(hidden_RD, rows, plan, self.relative_bias)
        attention_TH = None
        if need_attention:
            attention_TH = last.first_token_weights(block_input_RD, rows, relative_bias=self.relative_bias)
        return ModelOutput(hidden_states=rows.trim(hidden_RD), attention_weights=attention_TH)
