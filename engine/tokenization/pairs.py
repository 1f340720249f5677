"""Pairs of texts to joint sequences that fit the model: by its prompt for pairs, else as its tokenizer joins them.

Synchronous: TokenizerPool runs it in worker threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Encoding

from ..protocol.errors import InvalidRequestError
from ..protocol.score_template import ScoreTemplate
from ..protocol.tokenized_input import TokenizedInput
from .jobs import IsGone, portions
from .model_tokenizer import ModelTokenizer
from .score_template_encoder import Pair, ScoreTemplateEncoder
from .truncation import Truncation


class PairEncoder:
    """Tokenizes pairs and cuts them to a limit. Safe to use from several threads.

    Args:
        tokenizer: The model's.
        template: The model's prompt for pairs; None joins them as the tokenizer does.
        uses_token_types: The model reads the second text as tokens of type 1, where the tokenizer says so.
    """

    def __init__(self, tokenizer: ModelTokenizer, template: ScoreTemplate | None, *, uses_token_types: bool) -> None:
        self._tokenizer = tokenizer
        self._by_template = None if template is None else ScoreTemplateEncoder(tokenizer.backend, template)
        self._uses_token_types = uses_token_types

    def check_instruction(self, instruction: str | None) -> None:
        """Raises InvalidRequestError for an instruction that the model's prompt, if it has one, has no place for."""
        encoder = self._by_template
        if instruction and (encoder is None or not encoder.template.takes_instruction):
            raise InvalidRequestError("The served model reads pairs without an instruction.", param="instruction")

    def encode(
        self, pairs: Sequence[Pair], truncation: Truncation, instruction: str | None, gone: IsGone
    ) -> list[TokenizedInput]:
        """Returns each pair as a sequence; see TokenizerPool.encode_pairs."""
        tokenized: list[TokenizedInput] = []
        cased = self._bounded(pairs, truncation)
        for first, last in portions([len(a) + len(b) for a, b in cased], gone):
            part = cased[first:last]
            if self._by_template is not None:
                tokenized += self._filled(self._by_template, part, truncation, instruction, first)
            else:
                encodings = self._tokenizer.backend.encode_batch_fast(part)
                joined = enumerate(zip(part, encodings, strict=True), first)
                tokenized += [self._joined(pair, encoding, truncation, i) for i, (pair, encoding) in joined]
        return tokenized

    def _bounded(self, pairs: Sequence[Pair], truncation: Truncation) -> list[Pair]:
        """Returns pairs as they are tokenized: without what the limit cannot keep.

        Raises:
            RequestTooLongError: A text has more characters than are read, and must not be cut.
        """
        num_chars = truncation.kept_chars if truncation.cut else truncation.max_chars
        for i, pair in enumerate(pairs):
            longest = max(map(len, pair))
            if longest > num_chars:
                truncation.refuse_unread_unless_cut(longest, 0, i)
        # The limit keeps at most its own length of either text; where a pair fits whole, nothing is cut here.
        sides = (self._tokenizer.bounded(side, truncation, num_chars) for side in zip(*pairs, strict=True))
        return list(zip(*map(self._tokenizer.cased, sides), strict=True))

    def _filled(
        self,
        encoder: ScoreTemplateEncoder,
        pairs: Sequence[Pair],
        truncation: Truncation,
        instruction: str | None,
        first: int,
    ) -> list[TokenizedInput]:
        """Puts pairs, of which `first` is the place of the first one in the request, into the model's prompt."""
        limit, left = truncation.max_num_tokens, self._tokenizer.cuts_left(truncation)
        tokenized = []
        for i, ids in enumerate(encoder.encode(pairs, instruction)):
            if len(ids) > limit:
                truncation.refuse_unless_cut(len(ids), first + i)
                cut = encoder.cut(pairs[i], instruction, limit, left=left)
                if cut is None:
                    raise _no_room(encoder, instruction, truncation)
                ids = cut
            tokenized.append(TokenizedInput(self._tokenizer.known(ids)))
        return tokenized

    def _joined(self, pair: Pair, encoding: Encoding, truncation: Truncation, index: int) -> TokenizedInput:
        """Cuts a pair that the tokenizer has joined to the limit, and finds where its second text begins."""
        if len(encoding) > truncation.max_num_tokens:
            truncation.refuse_unless_cut(len(encoding), index)
            backend, side = self._tokenizer.backend, self._tokenizer.side(truncation)
            first, second = backend.encode_batch(list(pair), add_special_tokens=False)
            room = self._tokenizer.room(truncation, is_pair=True)
            keep_first, keep_second = _longest_first(len(first), len(second), room)
            first.truncate(keep_first, direction=side)
            second.truncate(keep_second, direction=side)
            encoding = backend.post_process(first, second)
        boundary = encoding.type_ids.index(1) if self._uses_token_types and 1 in encoding.type_ids else 0
        return TokenizedInput(self._tokenizer.known(encoding.ids), boundary)


def _no_room(encoder: ScoreTemplateEncoder, instruction: str | None, truncation: Truncation) -> InvalidRequestError:
    """Returns the error for a prompt that leaves no room for a token of the query and one of the document."""
    limit = truncation.max_num_tokens
    if instruction and encoder.cut(("a", "a"), None, limit, left=False) is not None:
        return InvalidRequestError(
            f"The instruction leaves no room for a query and a document: all three and the prompt around them may have "
            f"{limit} tokens together. Please shorten it.",
            param="instruction",
        )
    return truncation.no_room("the prompt around a query and a document leaves them no room")


def _longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Splits `room` tokens over two texts by taking tokens away from the longer one first, as transformers does."""
    half = room // 2
    if first <= half:
        return first, min(second, room - first)
    if second <= half:
        return min(first, room - second), second
    return (room - half, half) if first > second else (half, room - half)
