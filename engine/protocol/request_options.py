"""How the engine treats a request, apart from what that asks of pooling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How to treat a request, apart from what it asks of pooling.

    Attributes:
        timeout_s: Seconds until its answer is of no use.
        priority: Lower goes first among the requests of its client; a level is worth one second of waiting.
        client: Whose request it is. Clients that wait share the device evenly, however much each of them sends.
        prompt_name: Named prompt of the model to put before every text.
        prompt: Text to put before every text; wins over `prompt_name`.
        instruction: What `score` tells the model to look for; None takes the model's own.
        add_special_tokens: Put the tokenizer's special tokens around every text; False where the texts spell them.
            Pairs and late chunking always have them.
        max_pieces: `score` reads a document that does not fit in up to this many pieces, of which the best counts; 1
            cuts it to fit, as `params` say.
        is_query: For models with a vector per token: the inputs are queries, or they are documents; None leaves that to
            the prompt, and without one they are documents.
    """

    timeout_s: float | None = None
    priority: int = 0
    client: str = ""
    prompt_name: str | None = None
    prompt: str | None = None
    instruction: str | None = None
    add_special_tokens: bool = True
    max_pieces: int = 1
    is_query: bool | None = None


DEFAULT_OPTIONS: Final = RequestOptions()
