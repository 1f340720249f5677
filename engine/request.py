"""The unit of scheduling and the answer to a request. Plain Python and numpy."""

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
    """

    token_ids: NDArray[np.int32]
    type_boundary: int = 0
    num_prompt_tokens: int = 0

    def __len__(self) -> int:
        """Returns the number of tokens."""
        return len(self.token_ids)

    def slice(self, start: int, end: int) -> TokenizedInput:
        """Returns the tokens from `start` up to `end`, as a view; boundaries stay those of the whole input."""
        return TokenizedInput(self.token_ids[start:end], self.type_boundary, self.num_prompt_tokens)


@dataclass(slots=True, eq=False)
class Sequence:
    """One input of a request, as the scheduler sees it.

    Attributes:
        request_id: The request that it belongs to.
        index: Its place among the inputs of the request.
        num_tokens: Tokens. Its whole length.
        arrival_s: Seconds. Monotonic time at which it was queued.
        priority: Lower goes first.
        deadline_s: Seconds. Monotonic time after which its result is of no use.
    """

    request_id: int
    index: int
    num_tokens: int
    arrival_s: float
    priority: int = 0
    deadline_s: float | None = None
