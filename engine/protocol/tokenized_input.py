"""One input after tokenization. Plain Python and numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedInput:
    """One input after tokenization.

    Attributes:
        token_ids: [L] int32, special tokens included.
        type_boundary: Index of the first token of type 1; 0 means that all tokens are of type 0.
        num_prompt_tokens: Leading tokens that pooling leaves out (0 unless the model excludes its prompt).
        num_hidden: Trailing tokens that no token attends to, though they attend to the others (a ColBERT query).
        query: [Q, D] float32: the vectors that those of this input are compared with (a ColBERT document).
    """

    token_ids: NDArray[np.int32]
    type_boundary: int = 0
    num_prompt_tokens: int = 0
    num_hidden: int = 0
    query: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        """Returns the number of tokens."""
        return len(self.token_ids)

    def slice(self, start: int, end: int) -> TokenizedInput:
        """Returns the tokens from `start` up to `end`, as a view; boundaries stay those of the whole input."""
        return TokenizedInput(
            self.token_ids[start:end], self.type_boundary, self.num_prompt_tokens, self.num_hidden, self.query
        )
