"""The tokenizer of a model: texts, or token ids, to sequences that fit. Synchronous: worker threads run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from ..protocol.errors import InvalidRequestError
from ..protocol.request import Text, TokenizedInput
from .jobs import IsGone, portions
from .truncation import Truncation, bounded

_SPARE_TOKENS: Final = 64
"""Where a bounded text has more tokens above the limit than this, what was left out of it cannot matter."""


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
        largest = max(ids, default=0)
        if largest >= self._vocab_size:
            token = self.backend.id_to_token(largest)
            raise InvalidRequestError(
                f"The text holds {token!r}, which the model's tokenizer knows as id {largest}, "
                f"but the model has embeddings for the ids 0 to {self._vocab_size - 1} only.",
                param="input",
            )
        return np.array(ids, np.int32)

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

    def encode(
        self,
        inputs: Sequence[Text],
        truncation: Truncation,
        prompt: str,
        skip_prompt: bool,
        specials: bool,
        gone: IsGone,
    ) -> list[TokenizedInput]:
        """Returns each input as a sequence; see TokenizerPool.encode."""
        skip = self._count_prefix(prompt, specials) if prompt and skip_prompt else 0
        first_chars = truncation.first_chars
        tokenized: list[TokenizedInput] = []
        num_chars = [min(len(item), first_chars) if isinstance(item, str) else 0 for item in inputs]
        for first, last in portions(num_chars, gone):
            part = inputs[first:last]
            texts = self.cased([prompt + item for item in part if isinstance(item, str)])
            bounded = self.bounded(texts, truncation, first_chars)
            encoded = self.backend.encode_batch_fast(bounded, add_special_tokens=specials)
            encodings = iter(zip(texts, bounded, encoded, strict=True))
            for index, item in enumerate(part, first):
                if isinstance(item, str):
                    tokenized.append(self._fit_text(*next(encodings), truncation, skip, specials, index))
                else:
                    ids = self._fit_ids(self.checked(item), truncation, index)
                    tokenized.append(TokenizedInput(ids))
        return tokenized

    def encode_parts(
        self, inputs: Sequence[Text], truncation: Truncation, prompt: str, gone: IsGone
    ) -> tuple[list[NDArray[np.int32]], bool]:
        """Returns the ids of each part of one text, and whether they are complete; see TokenizerPool.encode_parts."""
        texts = [prompt * (i == 0) + item for i, item in enumerate(inputs) if isinstance(item, str)]
        texts = self.cased(texts)
        bounded = self.bounded(texts, truncation, truncation.first_chars)
        encodings: list[Encoding] = []
        is_whole = True
        for first, last in portions([len(text) for text in bounded], gone):
            encoded = self.backend.encode_batch_fast(bounded[first:last], add_special_tokens=False)
            for i, encoding in enumerate(encoded, first):
                read, encoding = self._read_on(texts[i], bounded[i], encoding, truncation, specials=False)
                if read is not texts[i]:
                    is_whole = False
                    if len(encoding) <= truncation.max_num_tokens:
                        truncation.refuse_unread_unless_cut(len(texts[i]), len(encoding), i)
                encodings.append(encoding)
        of_texts = iter(encodings)
        return [self.known(next(of_texts).ids) if isinstance(i, str) else self.checked(i) for i in inputs], is_whole

    def _fit_text(
        self,
        text: str,
        bounded: str,
        encoding: Encoding,
        truncation: Truncation,
        skip: int,
        specials: bool,
        index: int,
    ) -> TokenizedInput:
        """Cuts an encoding to the limit and puts the special tokens, where there are to be any, around the rest."""
        limit = truncation.max_num_tokens
        bounded, encoding = self._read_on(text, bounded, encoding, truncation, specials=specials)
        if len(encoding) <= limit:
            if bounded is not text:
                truncation.refuse_unread_unless_cut(len(text), len(encoding), index)
            ids = self.known(encoding.ids)
            return TokenizedInput(ids, num_prompt_tokens=max(min(skip, len(encoding) - 1), 0))
        truncation.refuse_unless_cut(len(encoding), index, is_whole=bounded is text)
        room = self.room(truncation) if specials else limit
        (bare,) = self.backend.encode_batch([bounded], add_special_tokens=False)
        num_cut = len(bare) - room
        bare.truncate(room, direction=self.side(truncation))
        cut_ids = self.backend.post_process(bare).ids if specials else bare.ids
        if skip and self.cuts_left(truncation):
            skip = max(skip - num_cut, 0) if bounded is text else 0
        return TokenizedInput(self.known(cut_ids), num_prompt_tokens=min(skip, len(cut_ids) - 1))

    def _read_on(
        self, text: str, bounded: str, encoding: Encoding, truncation: Truncation, *, specials: bool
    ) -> tuple[str, Encoding]:
        """Reads more of a text whose beginning has too few tokens to tell what fits: blanks, words of many letters.

        Returns:
            What was read, and its tokens.
        """
        if bounded is text:
            return text, encoding
        num_chars = truncation.first_chars
        while (
            bounded is not text
            and len(encoding) <= truncation.max_num_tokens + _SPARE_TOKENS
            and num_chars < truncation.max_chars
        ):
            num_chars = min(2 * num_chars, truncation.max_chars)
            (bounded,) = self.bounded([text], truncation, num_chars)
            (encoding,) = self.backend.encode_batch_fast([bounded], add_special_tokens=specials)
        return bounded, encoding

    def _fit_ids(self, ids: NDArray[np.int32], truncation: Truncation, index: int) -> NDArray[np.int32]:
        limit = truncation.max_num_tokens
        if len(ids) <= limit:
            return ids
        truncation.refuse_unless_cut(len(ids), index)
        return ids[-limit:] if self.cuts_left(truncation) else ids[:limit]

    def _count_prefix(self, prompt: str, specials: bool) -> int:
        """Returns how many tokens a prompt has, the special ones before it included."""
        (encoding,) = self.backend.encode_batch(self.cased([prompt]), add_special_tokens=specials)
        trailing = 0
        for is_special in reversed(encoding.special_tokens_mask):
            if not is_special:
                break
            trailing += 1
        return len(encoding) - trailing
