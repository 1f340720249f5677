"""The head of a masked language model: from hidden states to a logit for every token of the vocabulary.

All families of encoders have the same one under different names: a layer of the embedding's width with an activation
and a LayerNorm, then the token embedding itself as the map to the vocabulary, and a bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch.nn.functional as F
from torch import Tensor

from ....protocol.errors import UnsupportedModelError
from ....protocol.model_info import ModelInfo
from ..layers.linear import Linear
from ..layers.norm import LayerNorm
from ..layers.weights import Weights

# Rows of one product: always as many, so that one kernel serves all batches (see layers/rows.py).
BLOCK_ROWS: Final = 128
# Columns of the product on CUDA. Rows of logits are then aligned to 16 bytes, as the fast kernels of cuBLAS and the
# widest loads of the pooling kernel want them; the 30,522 tokens of BERT are no multiple of 8.
_VOCAB_MULTIPLE: Final = 64


@dataclass(frozen=True, slots=True)
class _Names:
    """What a family calls the parts of its head."""

    dense: str
    norm: str
    decoder: str
    biases: tuple[str, ...]
    activation_key: str = "hidden_act"
    eps_key: str = "layer_norm_eps"


_FAMILIES: Final = (
    _Names(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder",
        ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    ),
    _Names("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", ("lm_head.bias", "lm_head.decoder.bias")),
    _Names("vocab_transform", "vocab_layer_norm", "vocab_projector", ("vocab_projector.bias",), "activation", ""),
    _Names("head.dense", "head.norm", "decoder", ("decoder.bias",), "classifier_activation", "norm_eps"),
)
_EMBEDDINGS: Final = tuple(
    [f"{prefix}.embeddings.word_embeddings.weight" for prefix in ("bert", "roberta", "distilbert", "mpnet")]
    + ["model.embeddings.tok_embeddings.weight"]
)
# transformers' defaults of the families that may leave the value out of config.json.
_DEFAULT_EPS: Final = {"modernbert": 1e-5}


class VocabularyHead:
    """logits = norm(activation(x U^T + c)) E^T + b.

    Args:
        weights: View of the whole checkpoint, in the type that the head computes in.
        info: The resolved model.

    Raises:
        UnsupportedModelError: The checkpoint has no such head.
        WeightError: A tensor has the wrong shape.
    """

    def __init__(self, weights: Weights, info: ModelInfo) -> None:
        names = next((names for names in _FAMILIES if weights.has(f"{names.dense}.weight")), None)
        tables = [f"{names.decoder}.weight" if names else "", *_EMBEDDINGS]
        table = next((name for name in tables if name and weights.has(name)), None)
        if names is None or table is None:
            raise UnsupportedModelError(
                f"{info.name} makes sparse vectors from a masked language model, but its checkpoint holds no head of "
                "one that penstock knows (BERT, RoBERTa, DistilBERT, MPNet, ModernBERT)."
            )
        size, config = info.hidden_size, info.config
        eps = float(config.get(names.eps_key) or _DEFAULT_EPS.get(info.model_type, 1e-12))
        activation = str(config.get(names.activation_key) or "gelu")
        has_bias = weights.has(f"{names.dense}.bias")
        on_host = weights.device.type == "cpu"
        self._dense = Linear.load(
            weights, names.dense, size, size, bias=has_bias, activation=activation, is_head=on_host
        )
        has_bias = weights.has(f"{names.norm}.bias")
        self._norm = LayerNorm.load(weights, names.norm, size, eps, bias=has_bias)
        bias = next((name for name in names.biases if weights.has(name)), None)
        table_VD = weights.tensor(table, info.vocab_size, size)
        bias_V = weights.tensor(bias, info.vocab_size) if bias is not None else None
        if not on_host and (padding := -info.vocab_size % _VOCAB_MULTIPLE):
            table_VD = F.pad(table_VD, (0, 0, 0, padding))
            bias_V = None if bias_V is None else F.pad(bias_V, (0, padding))
        self._out = Linear(table_VD, bias_V)

    def __call__(self, x_RD: Tensor) -> Tensor:
        """Returns [R, V] of hidden states [R, D] of any float type, in the type of the head.

        On a CPU R is at most BLOCK_ROWS. On CUDA zeros follow the V columns, up to a multiple of 64.
        """
        num_rows = x_RD.shape[0]
        inner_RD = self._norm(self._dense(x_RD.to(self._dense.dtype)))
        if inner_RD.device.type == "cpu":
            inner_RD = F.pad(inner_RD, (0, 0, 0, BLOCK_ROWS - num_rows))
        return self._out(inner_RD)[:num_rows]
