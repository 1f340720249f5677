"""The interface of every model for runner and pooler: packed tokens in, hidden states and class logits out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ...protocol.errors import UnsupportedTaskError
from ...protocol.model_info import ModelKind
from ...scheduling import CacheSpec

if TYPE_CHECKING:
    from .packed_batch import PackedBatch

Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelOutput:
    """The results of one forward. T packed tokens of N sequences, width D, H attention heads.

    Attributes:
        hidden_states: [T, D], model dtype: the last layer's rows.
        attention_weights: [T, H] float32: how much the first token of each sequence (the last one in a causal model)
            attends to each of its tokens in the last layer. Only where the caller asked for it. In a batch of chunks
            [C + T, H]: the weights of the chunk's last token over all C tokens before the chunk and those in it,
            sequence after sequence.
        logits: [N, num_labels] float32. Set only by models whose classification head pools by itself (the transformers
            fallback): then it is the answer for CLASSIFY and SCORE, and `classify` must not be called.
    """

    hidden_states: Tensor
    attention_weights: Tensor | None = None
    logits: Tensor | None = None


class PackedModel(ABC):
    """A model over packed tokens. Weights are prepared at construction and never change; calls come from one thread.

    Attributes:
        hidden_size: D.
        cache_spec: Layers whose states a sequence keeps from chunk to chunk; None if sequences cannot run in chunks.
        sequence_head: Pooled rows [N, D] to logits [N, num_labels]; None where the checkpoint has no such head.
        token_head: Hidden states [T, D] to logits [T, num_labels]; None where the checkpoint has no such head.
        vocabulary_head: Hidden states [R, D] to logits over the vocabulary [R, V]; None unless ModelInfo.sparse asks.
        is_recordable: Whether a forward on CUDA reads the lengths of the sequences there alone, and launches the same
            kernels whatever they are, so that it can be recorded (engine/core/cuda_graphs.py).
    """

    hidden_size: int
    cache_spec: CacheSpec | None = None
    sequence_head: Head | None = None
    token_head: Head | None = None
    vocabulary_head: Head | None = None
    is_recordable: bool = False

    @abstractmethod
    def forward(self, batch: PackedBatch, *, need_attention: bool = False) -> ModelOutput:
        """Runs the model.

        Args:
            batch: At least one token.
            need_attention: Also return the attention weights.

        Raises:
            UnsupportedTaskError: Attention weights are asked for and this model cannot give them.
        """

    def classify(self, pooled_ND: Tensor) -> Tensor:
        """Returns class logits [N, num_labels], float32, of pooled rows [N, D] of any float type."""
        if self.sequence_head is None:
            raise UnsupportedTaskError("This model has no sequence classification head.", param="task")
        return self.sequence_head(pooled_ND.float())

    def classify_tokens(self, hidden_TD: Tensor) -> Tensor:
        """Returns class logits [T, num_labels], float32, of hidden states [T, D] of any float type."""
        if self.token_head is None:
            raise UnsupportedTaskError("This model has no token classification head.", param="task")
        return self.token_head(hidden_TD.float())

    def set_head(self, kind: ModelKind, head: Head | None, *, scores_rows: bool = False) -> None:
        """Takes the head of a model of some kind; None for one without classes.

        With `scores_rows`, that of a sequence is one map of its last row, and so fits the row of any token.
        """
        if kind is not ModelKind.TOKEN_CLASSIFIER:
            self.sequence_head = head
        if kind is ModelKind.TOKEN_CLASSIFIER or scores_rows:
            self.token_head = head
