"""Classification heads. All run in float32: they are small, and scores are what the caller sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ...protocol.model_info import ClassifierMethod, ModelInfo, ModelKind
from .base import Head
from .layers.linear import Linear
from .layers.weights import Weights

_LM_HEAD: Final = "lm_head"
_SCORE: Final = "score"


class DenseHead:
    """logits = activation(x U^T + c) W^T + b: a hidden layer of the model's width, then the classes.

    Args:
        weights: View that holds both maps.
        dense: Name of the hidden layer.
        out: Name of the map to the classes.
        size: Width of the input and of the hidden layer.
        num_labels: Width of the output.
        activation: Of the hidden layer.
    """

    def __init__(self, weights: Weights, dense: str, out: str, size: int, num_labels: int, activation: str) -> None:
        self.dense = Linear.load(weights, dense, size, size, activation=activation, is_head=True)
        self.out = Linear.load(weights, out, size, num_labels, is_head=True)

    def __call__(self, x_ND: Tensor) -> Tensor:
        """Returns [N, num_labels]."""
        return self.out(self.dense(x_ND))


class TokenHead:
    """Scores read off a language model's next-token logits: of all the vocabulary, only the rows that matter are kept.

    FROM_2_WAY_SOFTMAX takes two tokens, false and true, and gives one logit, true minus false: its sigmoid is the
    softmax over the two. NO_POST_PROCESSING gives the logit of every token.

    Args:
        rows_CD: [C, D]. Rows of the output embedding, one for each token.
        bias_C: [C] or None. The same entries of its bias.
        method: See above.
        config: config.json: families scale or cap their logits.
    """

    def __init__(
        self, rows_CD: Tensor, bias_C: Tensor | None, method: ClassifierMethod, config: Mapping[str, Any]
    ) -> None:
        self._out = Linear(rows_CD.float(), bias_C.float() if bias_C is not None else None, reorder=False)
        self._is_difference = method is ClassifierMethod.FROM_2_WAY_SOFTMAX
        # Cohere multiplies its logits, Granite divides them, Gemma 2 caps them.
        text_config = config.get("text_config") or config
        self._scale = float(text_config.get("logit_scale") or 1.0) / float(text_config.get("logits_scaling") or 1.0)
        self._cap = text_config.get("final_logit_softcapping")

    def __call__(self, x_ND: Tensor) -> Tensor:
        """Returns [N, 1], or [N, C] for NO_POST_PROCESSING."""
        logits_NC = self.logits(x_ND)
        return logits_NC[:, 1:] - logits_NC[:, :1] if self._is_difference else logits_NC

    def logits(self, x_ND: Tensor) -> Tensor:
        """Returns the next-token logits of the C tokens [N, C]."""
        logits_NC = self._out(x_ND.float()) * self._scale
        return torch.tanh(logits_NC / self._cap) * self._cap if self._cap else logits_NC


def decoder_head(weights: Weights, info: ModelInfo, size: int, embedding_name: str) -> Head | None:
    """Returns the head of a decoder, or None where it is an embedding model.

    It is `score`, one map of the last token's row (of every row, for a token classifier); for a reranker that answers
    with a word it is the rows of `lm_head`, or of the embedding where the two are tied, for `info.classifier_tokens`.

    Args:
        weights: View of the whole checkpoint.
        info: The resolved model.
        size: Width of its hidden states.
        embedding_name: Full name of the token embedding, such as "model.embed_tokens.weight".

    Raises:
        WeightError: A tensor is missing or has the wrong shape.
    """
    if info.kind is ModelKind.EMBEDDING:
        return None
    if not info.classifier_tokens:
        has_bias = weights.has(f"{_SCORE}.bias")
        return Linear.load(weights, _SCORE, size, info.num_labels, bias=has_bias, is_head=True)
    is_tied = info.config.get("tie_word_embeddings")
    if is_tied is None:
        is_tied = not weights.has(f"{_LM_HEAD}.weight")
    name = embedding_name if is_tied else f"{_LM_HEAD}.weight"
    rows_CD = weights.rows(name, info.classifier_tokens, info.vocab_size, size, dtype=torch.float32)
    bias_C = None
    if weights.has(f"{_LM_HEAD}.bias"):
        bias_C = weights.rows(f"{_LM_HEAD}.bias", info.classifier_tokens, info.vocab_size, dtype=torch.float32)
    return TokenHead(rows_CD, bias_C, info.classifier_method, info.config)
