"""Heads: classes of pooled rows and of tokens, vocabulary logits, and the Dense modules of sentence-transformers.

Classification heads run in float32, because they are small and clients see their scores.

Shape letters: R rows, D model width, C answer tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Final, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...families.spec import AnswerHeadSpec, Bias, HeadSpec, LinearSpec, ModelSpec, NormSpec, linear, no_vocabulary_head
from ...protocol.errors import UnsupportedModelError
from ...protocol.model_info import DenseSpec, ModelInfo
from .layers.linear import Linear
from .layers.norm import load_norm
from .layers.weights import Weights
from .packed_batch import Head

_LM_HEAD: Final = "lm_head"
# Rows of a product. On a CPU it always has this number of rows, so that oneDNN compiles one kernel for all batches.
BLOCK_ROWS: Final = 128
# Columns of the product on CUDA are a multiple. Rows of logits are then aligned to 16 bytes, which the fast kernels of
# cuBLAS and the widest loads of the pooling kernel need; BERT's 30,522 tokens are not a multiple of 8.
_VOCAB_MULTIPLE: Final = 64

# Class names in torch.nn.modules.activation (and Identity) without arguments.
_DENSE_ACTIVATIONS: Final[dict[str, type[nn.Module]]] = {
    "ELU": nn.ELU,
    "GELU": nn.GELU,
    "Identity": nn.Identity,
    "LeakyReLU": nn.LeakyReLU,
    "Mish": nn.Mish,
    "ReLU": nn.ReLU,
    "ReLU6": nn.ReLU6,
    "SELU": nn.SELU,
    "SiLU": nn.SiLU,
    "Sigmoid": nn.Sigmoid,
    "Softplus": nn.Softplus,
    "Softsign": nn.Softsign,
    "Tanh": nn.Tanh,
}


def load_head(weights: Weights, base: Weights, spec: HeadSpec | None, word_embeddings: str) -> Head | None:
    """Reads a classification head; None in an embedding model.

    Args:
        weights: View of the whole checkpoint.
        base: View of the base model.
        spec: The head.
        word_embeddings: Name of the word embedding within `base`.

    Raises:
        WeightError: A tensor is missing or has the wrong shape.
    """
    if spec is None:
        return None
    if isinstance(spec, AnswerHeadSpec):
        return AnswerHead.load(weights, base, spec, word_embeddings)
    return SequentialHead(weights, base, spec)


class SequentialHead:
    """A sequence of projections and norms."""

    def __init__(self, weights: Weights, base: Weights, steps: tuple[LinearSpec | NormSpec, ...]) -> None:
        self._steps = [
            load_norm(weights, step, dtype=torch.float32)
            if isinstance(step, NormSpec)
            else Linear.load(base if step.is_below_base else weights, step, is_head=True)
            for step in steps
        ]

    def __call__(self, x_RD: Tensor) -> Tensor:
        """Returns [R, num_labels]."""
        for step in self._steps:
            x_RD = step(x_RD)
        return x_RD


class AnswerHead:
    """The head of a generative reranker: next-token logits of the answer tokens.

    Args:
        rows_CD: [C, D]. Rows of the output embedding for the answer tokens.
        bias_C: [C] or None. Bias of the output embedding for the answer tokens.
    """

    def __init__(self, rows_CD: Tensor, bias_C: Tensor | None, spec: AnswerHeadSpec) -> None:
        self._out = Linear(rows_CD.float(), bias_C.float() if bias_C is not None else None, is_head=True)
        self._spec = spec

    @classmethod
    def load(cls, weights: Weights, base: Weights, spec: AnswerHeadSpec, word_embeddings: str) -> Self:
        """Reads the rows of the answer tokens. For arguments see `load_head`."""
        is_tied = not weights.has(f"{_LM_HEAD}.weight") if spec.is_tied is None else spec.is_tied
        view, name = (base, word_embeddings) if is_tied else (weights, f"{_LM_HEAD}.weight")
        rows_CD = view.rows(name, spec.tokens, spec.vocab_size, spec.size, dtype=torch.float32)
        bias_C = None
        if weights.has(f"{_LM_HEAD}.bias"):
            bias_C = weights.rows(f"{_LM_HEAD}.bias", spec.tokens, spec.vocab_size, dtype=torch.float32)
        return cls(rows_CD, bias_C, spec)

    def __call__(self, x_RD: Tensor) -> Tensor:
        """Returns [R, 1] for the difference of two answers, [R, C] otherwise."""
        logits_RC = self.logits(x_RD)
        return logits_RC[:, 1:] - logits_RC[:, :1] if self._spec.is_difference else logits_RC

    def logits(self, x_RD: Tensor) -> Tensor:
        """Returns the next-token logits of the answer tokens, [R, C]."""
        logits_RC = self._out(x_RD.float()) * self._spec.scale
        cap = self._spec.softcap
        return logits_RC if cap is None else torch.tanh(logits_RC / cap) * cap


class VocabularyHead:
    """The head of a masked language model: logits = norm(activation(x U^T + c)) E^T + b.

    Args:
        weights: View of the whole checkpoint, in the dtype of the head.

    Raises:
        UnsupportedModelError: The checkpoint has no such head.
        WeightError: A tensor has the wrong shape.
    """

    def __init__(self, weights: Weights, model: ModelSpec, info: ModelInfo) -> None:
        spec = model.vocabulary
        word_embeddings = model.embedding.word_embeddings
        if spec is None or not weights.has(f"{spec.dense.names[0]}.weight"):
            raise no_vocabulary_head(info)
        on_host = weights.device.type == "cpu"
        self._dense = Linear.load(weights, spec.dense, is_head=on_host)
        self._norm = load_norm(weights, spec.norm)
        view, name = weights, f"{spec.decoder}.weight"
        if not weights.has(name):
            view, name = weights.scope_of(word_embeddings, model.prefixes), word_embeddings
        bias = next((bias for bias in spec.biases if weights.has(bias)), None)
        table_VD = view.tensor(name, info.vocab_size, spec.norm.size)
        bias_V = weights.tensor(bias, info.vocab_size) if bias is not None else None
        if not on_host and (padding := -info.vocab_size % _VOCAB_MULTIPLE):
            table_VD = F.pad(table_VD, (0, 0, 0, padding))
            bias_V = None if bias_V is None else F.pad(bias_V, (0, padding))
        self._out = Linear(table_VD, bias_V)

    def __call__(self, x_RD: Tensor) -> Tensor:
        """Maps hidden states [R, D] of any float type to [R, V] in the dtype of the head.

        On a CPU R is at most BLOCK_ROWS. On CUDA the V columns are padded with zeros to a multiple of 64.
        """
        num_rows = x_RD.shape[0]
        inner_RD = self._norm(self._dense(x_RD.to(self._dense.dtype)))
        if inner_RD.device.type == "cpu":
            inner_RD = F.pad(inner_RD, (0, 0, 0, BLOCK_ROWS - num_rows))
        return self._out(inner_RD)[:num_rows]


class Dense:
    """The Dense module of sentence-transformers: y = activation(x W^T + b) of a pooled vector, float32."""

    def __init__(self, weights: Weights, spec: DenseSpec) -> None:
        if spec.activation not in _DENSE_ACTIVATIONS:
            raise UnsupportedModelError(
                f"{spec.folder} has the activation {spec.activation!r}; "
                f"known are {', '.join(sorted(_DENSE_ACTIVATIONS))}."
            )
        self._activation = _DENSE_ACTIVATIONS[spec.activation]()
        self.linear = Linear.load(
            weights, linear(spec.name, spec.in_features, spec.out_features, bias=Bias.of(spec.bias)), is_head=True
        )

    def __call__(self, x_NI: Tensor) -> Tensor:
        """Returns [N, O] float32."""
        y_NO: Tensor = self._activation(self.linear(x_NI.float()))
        return y_NO
