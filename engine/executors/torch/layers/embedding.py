"""The input rows of BERT-like encoders: word + position + token type, normalised.

Shape letters: T packed tokens, V vocabulary, P positions, Y token types, E width of the embedding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.norm import Embeddings, embed_norm

from .norm import LayerNorm
from .weights import Weights


class BertEmbedding:
    """LayerNorm(word[id] + position[p] + type[y]).

    Position and type rows are summed once at load into one table [Y * P, E], so that a token costs two gathers. The
    table and the sum are float32; only the result is cast. Fused, all of it is one kernel.

    Args:
        weights: View of the embeddings of the checkpoint.
        vocab_size: V.
        num_positions: P.
        num_token_types: Y; 0 where the model has none.
        size: E.
        eps: Of the LayerNorm.
    """

    def __init__(
        self, weights: Weights, *, vocab_size: int, num_positions: int, num_token_types: int, size: int, eps: float
    ) -> None:
        self.word_VE = weights.table("word_embeddings.weight", vocab_size, size)
        table = weights.table("position_embeddings.weight", num_positions, size, dtype=torch.float32)
        if num_token_types:
            type_YE = weights.table("token_type_embeddings.weight", num_token_types, size, dtype=torch.float32)
            table = (type_YE[:, None] + table[None]).flatten(0, 1)
        self.position_type_QE = table
        self.num_positions = num_positions
        self.num_token_types = num_token_types
        self.norm = LayerNorm.load(weights, "LayerNorm", size, eps, dtype=torch.float32)
        self._tables = Embeddings(self.word_VE, table, num_positions)
        self._is_fused = self.norm.backend == "triton"

    def places(self, positions_T: Tensor, token_type_ids_T: Tensor | None) -> Tensor:
        """Returns the rows of `position_type_QE`, [T]. Token types are ignored by models that have only one."""
        if token_type_ids_T is None or self.num_token_types <= 1:
            return positions_T
        return positions_T + token_type_ids_T * self.num_positions

    def __call__(self, input_ids_T: Tensor, positions_T: Tensor, token_type_ids_T: Tensor | None) -> Tensor:
        """Returns [T, E] in the type of the model."""
        if self._is_fused:
            return embed_norm(
                input_ids_T,
                self._tables,
                self.norm.norm,
                positions=positions_T,
                token_type_ids=token_type_ids_T if self.num_token_types > 1 else None,
                out_dtype=self.word_VE.dtype,
                backend="triton",
            )
        rows_T = self.places(positions_T, token_type_ids_T)
        sum_TE = F.embedding(rows_T, self.position_type_QE).add_(F.embedding(input_ids_T, self.word_VE))
        normed_TE: Tensor = self.norm(sum_TE).to(self.word_VE.dtype)
        return normed_TE


def padding_aware_positions(input_ids_T: Tensor, positions_T: Tensor, pad_token_id: int) -> Tensor:
    """Returns the positions of RoBERTa and MPNet: they begin at pad_token_id + 1.

    A padding token that is part of a text stands at pad_token_id and is not counted, as in transformers.
    """
    is_text_T = input_ids_T.ne(pad_token_id)
    running_T = is_text_T.cumsum(0)
    starts_T = torch.arange(len(positions_T), device=positions_T.device) - positions_T
    before_T = (running_T - is_text_T.long())[starts_T]
    return (running_T - before_T) * is_text_T + pad_token_id
