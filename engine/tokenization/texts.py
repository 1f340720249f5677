"""Texts, or token ids, to sequences that fit the model. Synchronous: TokenizerPool runs it in worker threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from ..protocol.tokenized_input import TokenizedInput
from .jobs import IsGone, portions
from .model_tokenizer import ModelTokenizer
from .truncation import Truncation

Text = str | Sequence[int]
"""A text, or its token ids."""

_SPARE_TOKENS: Final = 64
"""Where a bounded text has more tokens above the limit than this, what was left out of it cannot matter."""


class TextEncoder:
    """Tokenizes texts and cuts them to a limit. Safe to use from several threads.

    Args:
        tokenizer: The model's.
    """

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend

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
            texts = self._tokenizer.cased([prompt + item for item in part if isinstance(item, str)])
            bounded = self._tokenizer.bounded(texts, truncation, first_chars)
            encoded = self._backend.encode_batch_fast(bounded, add_special_tokens=specials)
            encodings = iter(zip(texts, bounded, encoded, strict=True))
            for index, item in enumerate(part, first):
                if isinstance(item, str):
                    tokenized.append(self._fit_text(*next(encodings), truncation, skip, specials, index))
                else:
                    ids = self._fit_ids(self._tokenizer.checked(item), truncation, index)
                    tokenized.append(TokenizedInput(ids))
        return tokenized

    def encode_parts(
        self, inputs: Sequence[Text], truncation: Truncation, prompt: str, gone: IsGone
    ) -> tuple[list[NDArray[np.int32]], bool]:
        """Returns the ids of each part of one text, and whether they are complete; see TokenizerPool.encode_parts."""
        texts = [prompt * (i == 0) + item for i, item in enumerate(inputs) if isinstance(item, str)]
        texts = self._tokenizer.cased(texts)
        bounded = self._tokenizer.bounded(texts, truncation, truncation.first_chars)
        encodings: list[Encoding] = []
        is_whole = True
        for first, last in portions([len(text) for text in bounded], gone):
            encoded = self._backend.encode_batch_fast(bounded[first:last], add_special_tokens=False)
            for i, encoding in enumerate(encoded, first):
                read, encoding = self._read_on(texts[i], bounded[i], encoding, truncation, specials=False)
                if read is not texts[i]:
                    is_whole = False
                    if len(encoding) <= truncation.max_num_tokens:
                        truncation.refuse_unread_unless_cut(len(texts[i]), len(encoding), i)
                encodings.append(encoding)
        of_texts = iter(encodings)
        known, checked = self._tokenizer.known, self._tokenizer.checked
        return [known(next(of_texts).ids) if isinstance(i, str) else checked(i) for i in inputs], is_whole

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
            ids = self._tokenizer.known(encoding.ids)
            return TokenizedInput(ids, num_prompt_tokens=max(min(skip, len(encoding) - 1), 0))
        truncation.refuse_unless_cut(len(encoding), index, is_whole=bounded is text)
        room = self._tokenizer.room(truncation) if specials else limit
        (bare,) = self._backend.encode_batch([bounded], add_special_tokens=False)
        num_cut = len(bare) - room
        bare.truncate(room, direction=self._tokenizer.side(truncation))
        cut_ids = self._backend.post_process(bare).ids if specials else bare.ids
        if skip and self._tokenizer.cuts_left(truncation):
            skip = max(skip - num_cut, 0) if bounded is text else 0
        return TokenizedInput(self._tokenizer.known(cut_ids), num_prompt_tokens=min(skip, len(cut_ids) - 1))

    def _read_on(
        self, text: str, bounded: str, encoding: Encoding, truncation: Truncation, *, specials: bool
    ) -> tuple[str, Encoding]:
        """Reads more of a text whose beginning has too few tokens to tell what fits: blanks, words of many letters.

        Returns:
            What was read, and its tokens.
        """
        num_chars = truncation.first_chars
        while (
            bounded is not text
            and len(encoding) <= truncation.max_num_tokens + _SPARE_TOKENS
            and num_chars < truncation.max_chars
        ):
            num_chars = min(2 * num_chars, truncation.max_chars)
            (bounded,) = self._tokenizer.bounded([text], truncation, num_chars)
            (encoding,) = self._backend.encode_batch_fast([bounded], add_special_tokens=specials)
        return bounded, encoding

    def _fit_ids(self, ids: NDArray[np.int32], truncation: Truncation, index: int) -> NDArray[np.int32]:
        limit = truncation.max_num_tokens
        if len(ids) <= limit:
            return ids
        truncation.refuse_unless_cut(len(ids), index)
        return ids[-limit:] if self._tokenizer.cuts_left(truncation) else ids[:limit]

    def _count_prefix(self, prompt: str, specials: bool) -> int:
        """Returns how many tokens a prompt has, the special ones before it included."""
        (encoding,) = self._backend.encode_batch(self._tokenizer.cased([prompt]), add_special_tokens=specials)
        trailing = 0
        for is_special in reversed(encoding.special_tokens_mask):
            if not is_special:
                break
            trailing += 1
        return len(encoding) - trailing
