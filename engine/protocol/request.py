"""What a request is made of: texts or ids, the tokens that they become, and how the engine is to treat them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Text = str | Sequence[int]
"""A text, or its token ids."""


@dataclass(slots=True, eq=False)
class TokenizedInput:
    """One input after tokenization. Nobody changes it: it is not frozen because making it would take twice as long.

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

    def __getitem__(self, part: slice) -> TokenizedInput:
        """Returns some of the tokens, as a view; boundaries stay those of the whole input."""
        return TokenizedInput(
            self.token_ids[part], self.type_boundary, self.num_prompt_tokens, self.num_hidden, self.query
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How to treat a request, apart from what it asks of pooling.

    Attributes:
        timeout_s: Seconds until its answer is of no use.
        priority: Lower goes first among the requests of its client; a level is worth one second of waiting.
        client: The client that sent it. Clients that wait share the device evenly, however much each of them sends.
        namespace: Cached vectors and prefixes of this namespace alone may be used. A request takes no less time because
            another namespace has sent the same text.
        prompt_name: Named prompt of the model to put before every text.
        prompt: Text to put before every text; wins over `prompt_name`.
        instruction: What `score` tells the model to look for; None takes the model's own.
        add_special_tokens: Put the tokenizer's special tokens around every text; False where the texts spell them.
            Pairs and late chunking always have them.
        max_pieces: `score` reads a document that does not fit in up to this many pieces, of which the best counts; 1
            cuts it to fit, as `params` say.
        is_query: For models with a vector per token: the inputs are queries, or they are documents; None leaves that to
            the prompt, and without one they are documents.
        on_rows: Told how many rows for tokens the answer will have, and their width, before the model runs; what it
            raises refuses the request.
    """

    timeout_s: float | None = None
    priority: int = 0
    client: str = ""
    namespace: str = ""
    prompt_name: str | None = None
    prompt: str | None = None
    instruction: str | None = None
    add_special_tokens: bool = True
    max_pieces: int = 1
    is_query: bool | None = None
    on_rows: Callable[[int, int], None] | None = None

    def tell_rows(self, num_rows: int, width: int) -> None:
        """Tells `on_rows`, if there is one. Raises what it raises."""
        if self.on_rows is not None:
            self.on_rows(num_rows, width)


DEFAULT_OPTIONS: Final = RequestOptions()

CLIENT: Final[ContextVar[str]] = ContextVar("penstock_client", default="")
"""The client of the request that the current task serves, for limits on work before a call has RequestOptions."""
