"""One request of the client: its inputs, as texts and as tokens, and its options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .images import ImageInput, ImagePatches, MixedInput

Text = str | Sequence[int]
"""A text, or its token ids."""
Input = Text | ImageInput | MixedInput
"""What a model embeds."""
TextOrImage = str | ImageInput | MixedInput
"""One side of a pair to score."""


@dataclass(slots=True, eq=False)
class TokenizedInput:
    """One tokenized input. Treat it as immutable; it is not frozen because a frozen one takes twice as long to create.

    Attributes:
        token_ids: [L] int32, special tokens included.
        type_boundary: Index of the first token of type 1; 0 means that all tokens are of type 0.
        num_skipped_tokens: Leading tokens that pooling leaves out: the prompt, if the model excludes it; else 0.
        num_masked: Trailing tokens of a ColBERT query. They attend to the other tokens; no token attends to them.
        query_vectors: [Q, D] float32. Query vectors, if this input is a ColBERT document to score.
        images: The patches of its images. In an encoder of images there is one, and `token_ids` are zeros, one for each
            row of the model; otherwise `token_ids` contain placeholders for them. Empty: a text.
        is_truncated: Whether a part of the input was removed to fit a limit. Unknown in the engine's process.
    """

    token_ids: NDArray[np.int32]
    type_boundary: int = 0
    num_skipped_tokens: int = 0
    num_masked: int = 0
    query_vectors: NDArray[np.float32] | None = None
    images: tuple[ImagePatches, ...] = ()
    is_truncated: bool = False

    @classmethod
    def of_image(cls, image: ImagePatches, num_class_rows: int) -> TokenizedInput:
        """Returns the input of an image. `num_class_rows`: see ImageSpec."""
        return cls(np.zeros(len(image.pixels) + num_class_rows, np.int32), images=(image,))

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, part: slice) -> TokenizedInput:
        """Returns some of the tokens, as a view; boundaries stay those of the whole input."""
        return TokenizedInput(
            self.token_ids[part],
            self.type_boundary,
            self.num_skipped_tokens,
            self.num_masked,
            self.query_vectors,
            self.images,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of a request other than its pooling parameters.

    Attributes:
        timeout_s: Seconds until the deadline.
        priority: Lower runs first among the requests of a client; a level equals one second of waiting.
        client: The sending client. Waiting clients share the device evenly, regardless of how much each sends.
        namespace: Cached vectors and prefixes are shared within a namespace only, so that the latency of a request does
            not reveal the texts of other namespaces.
        adapter: Name of a LoRA adapter of the model; None takes the model's default.
        prompt_name: Named prompt of the model to put before every text.
        prompt: Text to put before every text; overrides `prompt_name`.
        instruction: Task instruction for `score`; None takes the model's own.
        is_rendered: Texts are whole prompts, such as rendered chats: no prompt of the model is put around them.
        add_special_tokens: Put the tokenizer's special tokens around every text; False if the texts contain them.
            Pairs and late chunking always have them.
        max_passages: `score` splits a document that does not fit into up to this many passages and takes the best
            score; 1 truncates the document as `params` say.
        is_query: For models that distinguish them: True for queries, False for documents. None: the prompt decides;
            without a prompt they are documents, or queries if ModelInfo.default_is_query is set.
        on_rows: Called before the model runs with the number and the width of the token rows in the result. An error
            that it raises rejects the request.
        on_truncated: Called before the model runs with the number of inputs that were truncated, if it is above 0. It
            may be called several times, for example for queries and for documents.
    """

    timeout_s: float | None = None
    priority: int = 0
    client: str = ""
    namespace: str = ""
    adapter: str | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    instruction: str | None = None
    is_rendered: bool = False
    add_special_tokens: bool = True
    max_passages: int = 1
    is_query: bool | None = None
    on_rows: Callable[[int, int], None] | None = None
    on_truncated: Callable[[int], None] | None = None

    def report_rows(self, num_rows: int, width: int) -> None:
        """Calls `on_rows`, if it is set."""
        if self.on_rows is not None:
            self.on_rows(num_rows, width)

    def report_truncated(self, num_inputs: int) -> None:
        """Calls `on_truncated`, if it is set and the number is above 0."""
        if self.on_truncated is not None and num_inputs:
            self.on_truncated(num_inputs)


DEFAULT_OPTIONS: Final = RequestOptions()

CLIENT: Final[ContextVar[str]] = ContextVar("penstock_client", default="")
"""The client of the request that the current task serves, for limits that apply before RequestOptions exist."""
