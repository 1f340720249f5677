"""Tokenizes pairs of texts with the model's prompt, or joins them with special tokens. Runs in threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tokenizers import Encoding, Tokenizer

from ..protocol.errors import InvalidRequestError
from ..protocol.messages import TokenizedInput
from ..protocol.templates import ScoreTemplate, fields_of, split_at
from .model_tokenizer import IsCancelled, ModelTokenizer, Truncation, portions

Pair = tuple[str, str]
_QUERY_SHARE: Final = (3, 4)
"""Largest share of a query in the tokens for query and document, as in publishers' code. Without a limit, a long query
would displace the document, and all scores would be equal."""


class PairEncoder:
    """Tokenizes pairs and truncates them to a limit. Safe to use from several threads.

    Args:
        template: The model's prompt for pairs; None: the tokenizer joins the texts with its special tokens.
        uses_token_types: The model reads token type ids.
    """

    def __init__(self, tokenizer: ModelTokenizer, template: ScoreTemplate | None, *, uses_token_types: bool) -> None:
        self._tokenizer = tokenizer
        self._by_template = None if template is None else ScoreTemplateEncoder(tokenizer.backend, template)
        self._uses_token_types = uses_token_types

    def check_instruction(self, instruction: str | None) -> None:
        """Raises InvalidRequestError for an instruction if the model's prompt has none."""
        encoder = self._by_template
        if instruction and (encoder is None or not encoder.template.takes_instruction):
            raise InvalidRequestError(
                "The served model does not accept an instruction for pairs; leave it out.", param="instruction"
            )

    def encode(
        self, pairs: Sequence[Pair], truncation: Truncation, instruction: str | None, is_cancelled: IsCancelled
    ) -> list[TokenizedInput]:
        """Returns each pair as a sequence; see TokenizerPool.encode_pairs."""
        tokenized: list[TokenizedInput] = []
        num_added = len(instruction or "")
        if num_added > truncation.max_chars:
            raise _long_instruction_error(truncation)
        cased = self._bounded(pairs, truncation)
        for first, last in portions([len(a) + len(b) + num_added for a, b in cased], is_cancelled):
            part = cased[first:last]
            if self._by_template is not None:
                tokenized += self._encode_with_template(self._by_template, part, truncation, instruction, first)
            else:
                encodings = self._tokenizer.backend.encode_batch_fast(part)
                joined = enumerate(zip(part, encodings, strict=True), first)
                tokenized += [self._truncate_pair(pair, encoding, truncation, i) for i, (pair, encoding) in joined]
        for tokens, pair, read in zip(tokenized, pairs, cased, strict=True):
            tokens.is_truncated |= len(read[0]) < len(pair[0]) or len(read[1]) < len(pair[1])
        return tokenized

    def _bounded(self, pairs: Sequence[Pair], truncation: Truncation) -> list[Pair]:
        """Truncates very long texts before tokenization. Raises RequestTooLongError if they must not be truncated.

        Equal texts, such as the query of all pairs, are truncated once and share their memory.
        """
        num_chars = truncation.max_truncated_chars if truncation.may_truncate else truncation.max_chars
        for i, pair in enumerate(pairs):
            longest = max(map(len, pair))
            if longest > num_chars:
                truncation.reject_unread_unless_truncated(longest, 0, i)
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        cased = self._tokenizer.cased(self._tokenizer.truncate_chars(texts, truncation, num_chars))
        read = dict(zip(texts, cased, strict=True))
        return [(read[first], read[second]) for first, second in pairs]

    def _encode_with_template(
        self,
        encoder: ScoreTemplateEncoder,
        pairs: Sequence[Pair],
        truncation: Truncation,
        instruction: str | None,
        first: int,
    ) -> list[TokenizedInput]:
        """Encodes pairs with the model's prompt. `first`: index of the first pair in the request."""
        limit = truncation.max_num_tokens
        left = self._tokenizer.truncates_left(truncation)
        tokenized = []
        for i, ids in enumerate(encoder.encode(pairs, instruction)):
            is_truncated = len(ids) > limit
            if is_truncated:
                truncation.reject_length_unless_truncated(len(ids), first + i)
                truncated = encoder.truncate(pairs[i], instruction, limit, left=left)
                if truncated is None:
                    raise _no_space_error(encoder, instruction, truncation)
                ids = truncated
            tokenized.append(TokenizedInput(self._tokenizer.text_ids(ids), is_truncated=is_truncated))
        return tokenized

    def _truncate_pair(self, pair: Pair, encoding: Encoding, truncation: Truncation, index: int) -> TokenizedInput:
        """Truncates a joined pair to the limit and finds the beginning of its second text."""
        is_truncated = len(encoding) > truncation.max_num_tokens
        if is_truncated:
            truncation.reject_length_unless_truncated(len(encoding), index)
            backend = self._tokenizer.backend
            side = self._tokenizer.side(truncation)
            first, second = backend.encode_batch(list(pair), add_special_tokens=False)
            max_text = self._tokenizer.max_text_tokens(truncation, is_pair=True)
            keep_first, keep_second = _longest_first(len(first), len(second), max_text)
            first.truncate(keep_first, direction=side)
            second.truncate(keep_second, direction=side)
            encoding = backend.post_process(first, second)
        boundary = encoding.type_ids.index(1) if self._uses_token_types and 1 in encoding.type_ids else 0
        return TokenizedInput(self._tokenizer.text_ids(encoding.ids), boundary, is_truncated=is_truncated)


def _no_space_error(
    encoder: ScoreTemplateEncoder, instruction: str | None, truncation: Truncation
) -> InvalidRequestError:
    if instruction and encoder.truncate(("a", "a"), None, truncation.max_num_tokens, left=False) is not None:
        return _long_instruction_error(truncation)
    return truncation.no_space_error("the prompt leaves no room for a query and a document")


def _long_instruction_error(truncation: Truncation) -> InvalidRequestError:
    return InvalidRequestError(
        "The instruction leaves no room for a query and a document: instruction, query, document and prompt may have "
        f"{truncation.max_num_tokens} tokens together. Please shorten the instruction.",
        param="instruction",
    )


def _longest_first(first: int, second: int, num_tokens: int) -> tuple[int, int]:
    """Splits `num_tokens` tokens between two texts. The longer text is truncated first, as in transformers."""
    half = num_tokens // 2
    if first <= half:
        return first, min(second, num_tokens - first)
    if second <= half:
        return min(first, num_tokens - second), second
    return (num_tokens - half, half) if first > second else (half, num_tokens - half)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a template and its fields."""

    text: str
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _LocatedPart:
    """The token ids of a part, and the spans of the query and the document in them."""

    ids: list[int]
    spans: dict[str, tuple[int, int]]

    def count(self, field: str) -> int:
        first, last = self.spans.get(field, (0, 0))
        return last - first

    def truncate(self, limits: Mapping[str, int], *, left: bool) -> list[int]:
        """Returns the ids with limited tokens per field. `left` removes the beginning of the document."""
        ids = list(self.ids)
        for field, (first, last) in sorted(self.spans.items(), key=lambda item: item[1], reverse=True):
            num_removed = max(last - first - limits[field], 0)
            if left and field == "document":
                del ids[first : first + num_removed]
            else:
                del ids[last - num_removed : last]
        return ids


class ScoreTemplateEncoder:
    """Encodes pairs with the prompt of a reranker. Safe to use from several threads.

    Args:
        tokenizer: Tokenizer without truncation and padding.
    """

    def __init__(self, tokenizer: Tokenizer, template: ScoreTemplate) -> None:
        self.template = template
        self._tokenizer = tokenizer
        self._parts = [_Part(part, fields_of(part)) for part in template.parts]
        # Parts without fields are tokenized once.
        self._constant = {part.text: self._ids([part.text.format()])[0] for part in self._parts if not part.fields}

    def encode(self, pairs: Sequence[Pair], instruction: str | None) -> list[list[int]]:
        """Returns the ids of each pair without truncation. `instruction`: None takes the template's own."""
        filled = self.template.filled
        parts = [part.text for part in self._parts if part.fields]
        texts = [[filled(part, *pair, instruction) for part in parts] for pair in pairs]
        different = list(dict.fromkeys(text for row in texts for text in row))
        known = dict(zip(different, self._ids(different), strict=True))
        encoded = []
        for row in texts:
            row_texts = iter(row)
            ids: list[int] = []
            for part in self._parts:
                ids += known[next(row_texts)] if part.fields else self._constant[part.text]
            encoded.append(ids)
        return encoded

    def truncate(self, pair: Pair, instruction: str | None, max_num_tokens: int, *, left: bool) -> list[int] | None:
        """Returns the ids of a pair, truncated to `max_num_tokens`; None if the prompt leaves no token for each text.

        The prompt and its instruction are not truncated. The query keeps up to three quarters of the other tokens and
        loses its end. The document gets the rest and loses its end, or its beginning with `left`.
        """
        parts = [self._located(part, pair, instruction) for part in self._parts]
        num_query, num_document = (sum(part.count(field) for part in parts) for field in ("query", "document"))
        num_left = max_num_tokens - sum(len(part.ids) for part in parts) + num_query + num_document
        if num_left < (num_query > 0) + (num_document > 0):
            return None
        limits = {"query": min(num_query, max(num_left * _QUERY_SHARE[0] // _QUERY_SHARE[1], 1))}
        limits["document"] = min(num_document, num_left - limits["query"])
        return [token_id for part in parts for token_id in part.truncate(limits, left=left)]

    def _located(self, part: _Part, pair: Pair, instruction: str | None) -> _LocatedPart:
        """Encodes a part and finds the tokens of the query and the document, including partly covered tokens."""
        fields = [field for field in part.fields if field != "instruction"]
        if not fields:
            return _LocatedPart(self._part_ids(part, pair, instruction), {})
        text = self.template.filled(part.text, *pair, instruction)
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        spans: dict[str, tuple[int, int]] = {}
        last = 0
        for field in fields:
            before, _ = split_at(part.text, field)
            begin = len(self.template.filled(before, *pair, instruction))
            end = begin + len(self.template.cleaned(field, pair[field == "document"]))
            inside = [
                i for i, (start, stop) in enumerate(encoding.offsets) if i >= last and stop > begin and start < end
            ]
            if inside:
                spans[field] = (inside[0], inside[-1] + 1)
                last = inside[-1] + 1
        return _LocatedPart(encoding.ids, spans)

    def _part_ids(self, part: _Part, pair: Pair, instruction: str | None) -> list[int]:
        if not part.fields:
            return self._constant[part.text]
        return self._ids([self.template.filled(part.text, *pair, instruction)])[0]

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
