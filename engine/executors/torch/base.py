"""The interface of torch models: packed tokens in, hidden states and class logits out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ...protocol.errors import UnsupportedTaskError
from ...scheduling import CacheSpec

if TYPE_CHECKING:
    from .packed_batch import PackedBatch

Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelOutput:
    """The results of one forward. T packed tokens of N sequences, width D, H attention heads.

    Attributes:
        hidden_states: [T, D], model dtype: the last layer's rows.
        attention_weights: [T, H] float32: attention of the first token of each sequence (the last one in a causal
            model) to each of its tokens in the last layer; None if it was not requested. In a batch of chunks
            [C + T, H]: the weights of each chunk's last token over the C_i tokens before the chunk and its own tokens.
        logits: [N, num_labels] float32. Set only by transformers models with a head that pools: then it is the result
            for CLASSIFY and SCORE, and `classify` must not be called.
    """

    hidden_states: Tensor
    attention_weights: Tensor | None = None
    logits: Tensor | None = None


class PackedModel(ABC):
    """A model over packed tokens. Weights never change after construction. Not thread-safe.

    Attributes:
        hidden_size: D.
        cache_spec: Layers with keys and values or states; None if sequences cannot run in chunks.
        sequence_head: Maps pooled rows [N, D] to logits [N, num_labels]; None if the checkpoint has no such head.
        token_head: Maps hidden states [T, D] to logits [T, num_labels]; None if the checkpoint has no such head.
        vocabulary_head: Maps hidden states [R, D] to vocabulary logits [R, V]; None unless ModelInfo.sparse needs it.
        is_recordable: Whether a forward on CUDA can be captured as a CUDA graph: its kernels do not depend on the
            lengths of the sequences, which it reads on the device only (engine/core/cuda_graphs.py).
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
            UnsupportedTaskError: Attention weights were requested, but this model cannot return them.
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
