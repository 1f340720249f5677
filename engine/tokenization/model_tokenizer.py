"""The tokenizer of a model with what the model knows of it: its case, its side of truncation, its vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ..protocol.errors import InvalidRequestError
from .truncation import Truncation, bounded


class ModelTokenizer:
    """A tokenizer as one model uses it. Safe to use from several threads.

    Args:
        backend: Without truncation and padding.
        vocab_size: Token ids must be below it.
        do_lower_case: Lower-case text first (a sentence-transformers option).
        truncation_side: "left" or "right": what is cut away where a request does not say.

    Attributes:
        backend: The tokenizer itself, for texts that `cased` has seen.
    """

    def __init__(self, backend: Tokenizer, *, vocab_size: int, do_lower_case: bool, truncation_side: str) -> None:
        self.backend = backend
        self._vocab_size = vocab_size
        self._do_lower_case = do_lower_case
        self._truncation_side = truncation_side

    def cased(self, texts: Sequence[str]) -> list[str]:
        """Returns texts in the case that the model reads."""
        return [text.lower() for text in texts] if self._do_lower_case else list(texts)

    def side(self, truncation: Truncation) -> str:
        """Returns the side that is cut away, "left" or "right"."""
        return truncation.side or self._truncation_side

    def cuts_left(self, truncation: Truncation) -> bool:
        """Whether the left side of an over-long text is cut away."""
        return self.side(truncation) == "left"

    def bounded(self, texts: Sequence[str], truncation: Truncation, num_chars: int) -> list[str]:
        """Returns `num_chars` characters of enormous texts, from the side that is kept; others as they are."""
        keeps_end = self.cuts_left(truncation)
        return [bounded(text, num_chars, keeps_end=keeps_end) for text in texts]

    def room(self, truncation: Truncation, *, is_pair: bool = False) -> int:
        """Returns the tokens that the limit leaves for text beside the special tokens.

        Raises:
            InvalidRequestError: Not even the special tokens fit.
        """
        num_special = self.backend.num_special_tokens_to_add(is_pair=is_pair)
        if truncation.max_num_tokens < num_special:
            raise truncation.no_room(f"the model's special tokens alone are {num_special}")
        return truncation.max_num_tokens - num_special

    def known(self, ids: list[int]) -> NDArray[np.int32]:
        """Returns the ids of a text as an array.

        Raises:
            InvalidRequestError: The tokenizer knows a token that the model has no embedding for.
        """
        array = np.array(ids, np.int32)
        if array.size and array.max() >= self._vocab_size:
            token = self.backend.id_to_token(int(array.max()))
            raise InvalidRequestError(
                f"The text holds {token!r}, which the model's tokenizer knows as id {array.max()}, "
                f"but the model has embeddings for the ids 0 to {self._vocab_size - 1} only.",
                param="input",
            )
        return array

    def checked(self, ids: Sequence[int]) -> NDArray[np.int32]:
        """Returns ids that a caller gave as an array.

        Raises:
            InvalidRequestError: There are none, or one is outside the vocabulary.
        """
        if not ids:
            raise InvalidRequestError("a list of token ids is empty; give at least one id.", param="input")
        for i in (min(ids), max(ids)):
            if not 0 <= i < self._vocab_size:
                raise InvalidRequestError(
                    f"token id {i} is out of vocabulary; the model has the ids 0 to {self._vocab_size - 1}. "
                    "Ids must come from the served model's own tokenizer; send text if yours come from another.",
                    param="input",
                )
        return np.array(ids, np.int32)
