"""The tokenizer of one model: encodes texts and token ids and truncates them to the limit. Runs in threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from ..protocol.errors import InvalidRequestError, RequestCancelledError, RequestTooLongError
from ..protocol.messages import TokenizedInput
from ..protocol.params import Text

_USUAL_CHARS_PER_TOKEN: Final = 8
_MAX_CHARS_PER_TOKEN: Final = 64
_MIN_FIRST_CHARS: Final = 65_536
_MIN_MAX_CHARS: Final = 524_288
"""Lower bound of `max_chars`: models with short limits must read texts that begin with many blanks."""
_CHARS_LIMIT: Final = 2_000_000
"""Upper bound of `max_chars`, so that tokenizing one text takes at most about 1 GB."""
_LONGEST_WORD: Final = 1_000
"""Characters. Text is cut between words, unless that would remove more than this."""
_SPARE_TOKENS: Final = 64
"""If the tokenized part of a text exceeds the limit by more tokens than this, the rest cannot change the result."""
_PROBE: Final = "One short text to begin with."
IsCancelled = Callable[[], bool]
_MAX_CHARS_PER_CALL: Final = 250_000
"""Characters to tokenize between two checks for cancellation."""


def portions(num_chars: Sequence[int], is_cancelled: IsCancelled) -> Iterator[tuple[int, int]]:
    """Yields the bounds of consecutive groups of texts with limited characters. Checks for cancellation in between.

    A text above the limit is alone in its group.

    Args:
        num_chars: Characters of each text.
        is_cancelled: Whether the caller has gone; RequestCancelledError is raised then.
    """
    first = total = 0
    for last, count in enumerate(num_chars):
        if last > first and total + count > _MAX_CHARS_PER_CALL:
            yield first, last
            first, total = last, 0
            check_cancelled(is_cancelled)
        total += count
    yield first, len(num_chars)


def check_cancelled(is_cancelled: IsCancelled) -> None:
    """Raises RequestCancelledError if the caller has disconnected."""
    if is_cancelled():
        raise RequestCancelledError("The caller has disconnected.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """The token limit of a request, and the handling of longer inputs.

    Attributes:
        max_num_tokens: The limit in tokens, special tokens included.
        may_truncate: Truncate to the limit; False rejects the request.
        side: "left" or "right", the side to remove; None means the tokenizer's own.
        param: Request field to name in errors.
        name: The cause of the limit if it is not the model; see ModelInfo.limit_name.
        num_reserved: Tokens that are added to an input later, such as those of images, for messages.
        positions: Index of each input in its request, for messages; None: 0, 1, 2, ...
    """

    max_num_tokens: int
    may_truncate: bool = False
    side: str | None = None
    param: str | None = "input"
    name: str | None = None
    num_reserved: int = 0
    positions: Sequence[int] | None = None

    @property
    def first_chars(self) -> int:
        """Characters to tokenize first. In nearly every text they have more tokens than the limit."""
        return min(max(_USUAL_CHARS_PER_TOKEN * self.max_num_tokens, _MIN_FIRST_CHARS), self.max_chars)

    @property
    def max_chars(self) -> int:
        """Most characters to tokenize of a text. Real texts have fewer characters per token.

        Bounds the memory of one text: tokenizing takes 500 bytes per token and 30 per character.
        """
        return min(max(_MAX_CHARS_PER_TOKEN * self.max_num_tokens, _MIN_MAX_CHARS), _CHARS_LIMIT)

    @property
    def max_truncated_chars(self) -> int:
        """Most characters to tokenize of each text of a pair that may be truncated."""
        return min(max(_MAX_CHARS_PER_TOKEN * self.max_num_tokens, _MIN_FIRST_CHARS), _CHARS_LIMIT)

    def reject_length_unless_truncated(self, num_tokens: int, index: int, *, is_complete: bool = True) -> None:
        """Raises RequestTooLongError for an input above the limit, unless it may be truncated.

        Args:
            num_tokens: Tokens of the input.
            index: Index of the input in this call of the tokenizer.
            is_complete: Whether the whole input was tokenized. Otherwise it has more tokens.
        """
        at_least = "" if is_complete else "at least "
        num_tokens += self.num_reserved
        self.reject_unless_truncated(f"input {self.position(index)} has {at_least}{num_tokens} tokens", num_tokens)

    def reject_unread_unless_truncated(self, num_chars: int, num_tokens: int, index: int) -> None:
        """Raises RequestTooLongError for an input that was only partly tokenized, unless it may be truncated."""
        self.reject_unless_truncated(
            f"input {self.position(index)} has {num_chars} characters, of which {self.max_chars} would be read",
            num_tokens,
        )

    def of(self, indices: Sequence[int]) -> Truncation:
        """Returns the truncation for the inputs at `indices`."""
        return replace(self, positions=[self.position(index) for index in indices])

    def without(self, num_tokens: int) -> Truncation:
        """Returns the truncation of an input if the caller adds `num_tokens` tokens later."""
        limit = self.max_num_tokens - num_tokens
        reserved = self.num_reserved + num_tokens
        return replace(self, max_num_tokens=limit, num_reserved=reserved)

    def position(self, index: int) -> int:
        """Returns the index of an input in its request. `index`: its index in this call."""
        return index if self.positions is None else self.positions[index]

    def reject_unless_truncated(
        self,
        found: str,
        num_tokens: int,
        remedy: str = "Please reduce the length of the input prompt, or set {cut_to_fit} to cut it.",
    ) -> None:
        """Raises RequestTooLongError unless inputs may be truncated; see RequestTooLongError.over_limit."""
        if not self.may_truncate:
            raise RequestTooLongError.over_limit(
                found,
                remedy,
                num_tokens=num_tokens,
                max_num_tokens=self.max_num_tokens + self.num_reserved,
                limit_name=self.name,
                param=self.param,
            )

    def no_space_error(self, reason: str) -> InvalidRequestError:
        """Returns the error for a limit that leaves no tokens for text. `reason` ends with the cause."""
        return InvalidRequestError(
            "The limit is {limit} tokens, but {reason}; allow more with {truncate_prompt_tokens} or --max-model-len.",
            param="truncate_prompt_tokens",
            limit=self.max_num_tokens + self.num_reserved,
            reason=reason,
        )


@dataclass(frozen=True, slots=True, eq=False)
class SpecialTokens:
    """The special tokens around a text.

    Attributes:
        leading: [A] int32, such as [CLS].
        trailing: [B] int32, such as [SEP].
    """

    leading: NDArray[np.int32]
    trailing: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.leading) + len(self.trailing)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> SpecialTokens | None:
        """Returns the special tokens of a tokenizer; None if it changes texts in other ways too."""
        bare = tokenizer.encode(_PROBE, add_special_tokens=False).ids
        whole = tokenizer.encode(_PROBE).ids
        for start in range(len(whole) - len(bare) + 1):
            end = start + len(bare)
            if bare and whole[start:end] == bare:
                return cls(np.array(whole[:start], np.int32), np.array(whole[end:], np.int32))
        return None


class ModelTokenizer:
    """The tokenizer of one model. Safe to use from several threads.

    Args:
        backend: Tokenizer without truncation and padding.
        vocab_size: Token ids must be below it.
        do_lower_case: Lower-case text first (a sentence-transformers option).
        truncation_side: "left" or "right": the side to remove if a request names none.

    Attributes:
        backend: The tokenizer itself. Pass texts through `cased` first.
    """

    def __init__(
        self,
        backend: Tokenizer,
        *,
        vocab_size: int,
        do_lower_case: bool,
        truncation_side: str,
        dropped_id: int | None = None,
        chars_per_token: int | None = None,
    ) -> None:
        self.backend = backend
        self._vocab_size = vocab_size
        self._do_lower_case = do_lower_case
        self._truncation_side = truncation_side
        self._dropped_id = dropped_id
        self._chars_per_token = chars_per_token

    def cased(self, texts: Sequence[str]) -> list[str]:
        """Returns texts, lower-cased if `do_lower_case` is set."""
        return [text.lower() for text in texts] if self._do_lower_case else list(texts)

    def side(self, truncation: Truncation) -> str:
        """Returns the side to remove, "left" or "right"."""
        return truncation.side or self._truncation_side

    def truncates_left(self, truncation: Truncation) -> bool:
        """Whether truncation removes the beginning of a text."""
        return self.side(truncation) == "left"

    def truncate_chars(self, texts: Sequence[str], truncation: Truncation, num_chars: int) -> list[str]:
        """Cuts texts to `num_chars` characters, on the side of the truncation."""
        keeps_end = self.truncates_left(truncation)
        return [truncate_chars(text, num_chars, keeps_end=keeps_end) for text in texts]

    def max_text_tokens(self, truncation: Truncation, *, is_pair: bool = False) -> int:
        """Returns the number of text tokens that fit beside the special tokens.

        Raises:
            InvalidRequestError: The special tokens alone do not fit.
        """
        num_special = self.backend.num_special_tokens_to_add(is_pair=is_pair)
        if truncation.max_num_tokens < num_special:
            raise truncation.no_space_error(f"the model adds {num_special} special tokens")
        return truncation.max_num_tokens - num_special

    def text_ids(self, ids: list[int]) -> NDArray[np.int32]:
        """Returns the ids of a text as an array, without those that the model ignores.

        Raises:
            InvalidRequestError: The model has no embedding for a token of the tokenizer.
        """
        largest = max(ids, default=0)
        if largest >= self._vocab_size:
            token = self.backend.id_to_token(largest)
            raise InvalidRequestError(
                f"The text contains {token!r}, which has the token id {largest}, "
                f"but the model has embeddings for the ids 0 to {self._vocab_size - 1} only.",
                param="input",
            )
        array = np.array(ids, np.int32)
        return array if self._dropped_id is None else array[array != self._dropped_id]

    def checked_ids(self, ids: Sequence[int]) -> NDArray[np.int32]:
        """Returns the token ids of a request as an array.

        Raises:
            InvalidRequestError: The list is empty, or an id is outside the vocabulary.
        """
        if not ids:
            raise InvalidRequestError("a list of token ids is empty; give at least one id.", param="input")
        for i in (min(ids), max(ids)):
            if not 0 <= i < self._vocab_size:
                raise InvalidRequestError(
                    f"token id {i} is out of vocabulary; the model has the ids 0 to {self._vocab_size - 1}. "
                    "Use ids of the served model's tokenizer, or send text.",
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
        is_cancelled: IsCancelled,
    ) -> list[TokenizedInput]:
        """Returns each input as a sequence; see TokenizerPool.encode."""
        skip = self._count_prefix(prompt[: truncation.max_chars], specials) if prompt and skip_prompt else 0
        first_chars = truncation.first_chars
        tokenized: list[TokenizedInput] = []
        num_text_chars = [len(prompt) + len(item) if isinstance(item, str) else 0 for item in inputs]
        num_chars = [min(count, first_chars) for count in num_text_chars]
        for first, last in portions(num_chars, is_cancelled):
            part = inputs[first:last]
            strings = [item for item in part if isinstance(item, str)]
            if max(num_text_chars[first:last], default=0) <= first_chars:
                prompted = [prompt + item for item in strings]
            else:
                prompted = [self._prompted(prompt, item, truncation) for item in strings]
            texts = wholes = self.cased(prompted)
            if self._chars_per_token is not None and truncation.may_truncate:
                texts = self._first_chars(texts, truncation, self._chars_per_token)
            bounded = self.truncate_chars(texts, truncation, first_chars)
            encoded = self.backend.encode_batch_fast(bounded, add_special_tokens=specials)
            encodings = iter(zip(wholes, texts, bounded, encoded, strict=True))
            for index, item in enumerate(part, first):
                if isinstance(item, str):
                    whole, text, start, encoding = next(encodings)
                    tokens = self._truncate_text(
                        text, start, encoding, truncation, skip, specials, index, num_text_chars[index]
                    )
                    tokens.is_truncated |= len(text) < len(whole)
                    tokenized.append(tokens)
                else:
                    ids = self._truncate_ids(self.checked_ids(item), truncation, index)
                    tokenized.append(TokenizedInput(ids, is_truncated=len(ids) < len(item)))
        return tokenized

    def _prompted(self, prompt: str, text: str, truncation: Truncation) -> str:
        """Returns prompt and text as one text, without most of the characters beyond `max_chars`.

        The number of texts times the length of the prompt may exceed the memory.
        """
        num_chars = truncation.max_chars + _LONGEST_WORD
        if len(prompt) + len(text) <= num_chars:
            return prompt + text
        if self.truncates_left(truncation):
            text = text[-num_chars:]
            return prompt[len(prompt) - (num_chars - len(text)) :] + text
        return prompt[:num_chars] + text[: max(num_chars - len(prompt), 0)]

    def _first_chars(self, texts: Sequence[str], truncation: Truncation, chars_per_token: int) -> list[str]:
        """Cuts texts within words, as model2vec does before it tokenizes them."""
        num_chars = truncation.max_num_tokens * chars_per_token
        return [text[-num_chars:] if self.truncates_left(truncation) else text[:num_chars] for text in texts]

    def encode_parts(
        self, inputs: Sequence[Text], truncation: Truncation, prompt: str, is_cancelled: IsCancelled
    ) -> tuple[list[NDArray[np.int32]], bool]:
        """Returns the ids of each part of one text, and whether they are complete; see TokenizerPool.encode_parts."""
        texts = [prompt * (i == 0) + item for i, item in enumerate(inputs) if isinstance(item, str)]
        texts = self.cased(texts)
        bounded = self.truncate_chars(texts, truncation, truncation.first_chars)
        encodings: list[Encoding] = []
        is_complete = True
        for first, last in portions([len(text) for text in bounded], is_cancelled):
            encoded = self.backend.encode_batch_fast(bounded[first:last], add_special_tokens=False)
            for i, encoding in enumerate(encoded, first):
                read, encoding = self._encode_more(texts[i], bounded[i], encoding, truncation, specials=False)
                if read is not texts[i]:
                    is_complete = False
                    if len(encoding) <= truncation.max_num_tokens:
                        truncation.reject_unread_unless_truncated(len(texts[i]), len(encoding), i)
                encodings.append(encoding)
        of_texts = iter(encodings)
        return [
            self.text_ids(next(of_texts).ids) if isinstance(i, str) else self.checked_ids(i) for i in inputs
        ], is_complete

    def _truncate_text(
        self,
        text: str,
        bounded: str,
        encoding: Encoding,
        truncation: Truncation,
        skip: int,
        specials: bool,
        index: int,
        num_chars: int,
    ) -> TokenizedInput:
        """Truncates an encoding to the limit, keeping its special tokens. `num_chars`: for errors, with the prompt."""
        limit = truncation.max_num_tokens
        bounded, encoding = self._encode_more(text, bounded, encoding, truncation, specials=specials)
        if len(encoding) <= limit:
            if bounded is not text:
                truncation.reject_unread_unless_truncated(num_chars, len(encoding), index)
            ids = self.text_ids(encoding.ids)
            num_skipped = max(min(skip, len(encoding) - 1), 0)
            return TokenizedInput(ids, num_skipped_tokens=num_skipped, is_truncated=bounded is not text)
        truncation.reject_length_unless_truncated(len(encoding), index, is_complete=bounded is text)
        max_text = self.max_text_tokens(truncation) if specials else limit
        (bare,) = self.backend.encode_batch([bounded], add_special_tokens=False)
        num_removed = len(bare) - max_text
        bare.truncate(max_text, direction=self.side(truncation))
        truncated_ids = self.backend.post_process(bare).ids if specials else bare.ids
        if skip and self.truncates_left(truncation):
            skip = max(skip - num_removed, 0) if bounded is text else 0
        num_skipped = min(skip, len(truncated_ids) - 1)
        return TokenizedInput(self.text_ids(truncated_ids), num_skipped_tokens=num_skipped, is_truncated=True)

    def _encode_more(
        self, text: str, bounded: str, encoding: Encoding, truncation: Truncation, *, specials: bool
    ) -> tuple[str, Encoding]:
        """Tokenizes more of a text if its first characters, such as blanks, have too few tokens.

        Returns:
            The tokenized part, and its encoding.
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
            (bounded,) = self.truncate_chars([text], truncation, num_chars)
            (encoding,) = self.backend.encode_batch_fast([bounded], add_special_tokens=specials)
        return bounded, encoding

    def _truncate_ids(self, ids: NDArray[np.int32], truncation: Truncation, index: int) -> NDArray[np.int32]:
        limit = truncation.max_num_tokens
        if len(ids) <= limit:
            return ids
        truncation.reject_length_unless_truncated(len(ids), index)
        return ids[-limit:] if self.truncates_left(truncation) else ids[:limit]

    def _count_prefix(self, prompt: str, specials: bool) -> int:
        """Returns the number of tokens of a prompt, including leading special tokens."""
        (encoding,) = self.backend.encode_batch(self.cased([prompt]), add_special_tokens=specials)
        trailing = 0
        for is_special in reversed(encoding.special_tokens_mask):
            if not is_special:
                break
            trailing += 1
        return len(encoding) - trailing


def truncate_chars(text: str, num_chars: int, *, keeps_end: bool) -> str:
    """Returns at most `num_chars` characters from the end or beginning of a text, cut between words if possible."""
    if len(text) <= num_chars:
        return text
    if keeps_end:
        start = len(text) - num_chars
        spaces = [text.find(space, start, start + _LONGEST_WORD) for space in " \n"]
        return text[min((index for index in spaces if index >= 0), default=start) :]
    space = max(text.rfind(space, max(num_chars - _LONGEST_WORD, 0), num_chars) for space in " \n")
    return text[: space if space >= 0 else num_chars]


def count_prompt(ids: NDArray[np.int32], prompt_ids: Sequence[int]) -> int:
    """Counts the prompt tokens at the beginning of a text that was tokenized together with its prompt.

    The number is less than `len(prompt_ids)` if a token contains the end of the prompt and the start of the text.

    Args:
        ids: [L]. Token ids of prompt and text together, without special tokens.
        prompt_ids: Token ids of the prompt alone, without special tokens.
    """
    length = min(len(ids), len(prompt_ids))
    differs = np.flatnonzero(ids[:length] != np.asarray(prompt_ids[:length], np.int32))
    return int(differs[0]) if len(differs) else length
