"""BERT and the families that differ from it by a line: RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, DistilBERT.

What they differ in is in cpu/encoder_configs.py, with its sources. Held to transformers 5.23 in float32 within 1e-5.

Shape letters: R rows, D model width, E embedding width.
"""

from __future__ import annotations

from torch import Tensor

from ...cpu.encoder_configs import DistilBertConfig, ElectraConfig, RobertaConfig
from ..layers.linear import Linear
from ..layers.rows import Rows
from ..layers.weights import Weights
from .encoder import PostNormEncoder


class BertModel(PostNormEncoder):
    """BERT."""


class RobertaModel(PostNormEncoder):
    """RoBERTa, XLM-RoBERTa and CamemBERT."""

    config_class = RobertaConfig


class ElectraModel(PostNormEncoder):
    """ELECTRA: embeddings of another width are projected to the model's."""

    config_class = ElectraConfig

    def load_embedding(self, base: Weights) -> None:
        """Reads the embeddings and, where the widths differ, their projection."""
        super().load_embedding(base)
        own_size, size = self.config.embedding_width, self.config.hidden_size
        self.projection = Linear.load(base, "embeddings_project", own_size, size) if own_size != size else None

    def embed(self, rows: Rows) -> Tensor:
        """See PostNormEncoder."""
        embedded_RE = super().embed(rows)
        return embedded_RE if self.projection is None else self.projection(embedded_RE)


class DistilBertModel(PostNormEncoder):
    """DistilBERT."""

    config_class = DistilBertConfig
