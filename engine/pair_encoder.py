"""Joins a query and a document by a ScoreTemplate into token ids. The `tokenizers` library alone; no event loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tokenizers import Tokenizer

from .score_template import ScoreTemplate, fields_of, split_at

Pair = tuple[str, str]

# Where the query stands by itself it may take this share of what the prompt leaves, as publishers have it.
_QUERY_SHARE: Final = (3, 4)


@dataclass(frozen=True, slots=True)
class _Part:
    """One part of a template and the fields in it."""

    text: str
    fields: tuple[str, ...]

    @property
    def is_fixed(self) -> bool:
        """Whether it is the same for all pairs of a request."""
        return "query" not in self.fields and "document" not in self.fields


class PairEncoder:
    """Encodes pairs into the sequences that a reranker was trained on. Safe to use from several threads.

    Args:
        tokenizer: Without truncation and padding.
        template: The prompt.
    """

    def __init__(self, tokenizer: Tokenizer, template: ScoreTemplate) -> None:
        self.template = template
        self._tokenizer = tokenizer
        self._parts = [_Part(part, fields_of(part)) for part in template.parts]
        # What no request changes is tokenized once.
        self._constant = {part.text: self._ids([part.text.format()])[0] for part in self._parts if not part.fields}

    def encode(self, pairs: Sequence[Pair], instruction: str | None) -> list[list[int]]:
        """Returns the ids of each pair, uncut; None for `instruction` takes the template's own."""
        filled, parts = self.template.filled, [part.text for part in self._parts if part.fields]
        texts = [[filled(part, *pair, instruction) for part in parts] for pair in pairs]
        different = list(dict.fromkeys(text for row in texts for text in row))
        known = dict(zip(different, self._ids(different), strict=True))
        encoded = []
        for row in texts:
            own = iter(row)
            ids: list[int] = []
            for part in self._parts:
                ids += known[next(own)] if part.fields else self._constant[part.text]
            encoded.append(ids)
        return encoded

    def cut(self, pair: Pair, instruction: str | None, max_num_tokens: int, *, left: bool) -> list[int] | None:
        """Returns the ids of a pair, cut to `max_num_tokens`: first the document on the side asked for, then the query.

        None where the prompt alone takes more.
        """
        encoded = [self._part_ids(part, pair, instruction) for part in self._parts]
        room = max_num_tokens - sum(len(ids) for part, ids in zip(self._parts, encoded, strict=True) if part.is_fixed)
        if room < 0:
            return None
        for i, part in enumerate(self._parts):
            if "query" in part.fields and "document" not in part.fields:
                encoded[i] = encoded[i][: room * _QUERY_SHARE[0] // _QUERY_SHARE[1]]
                room -= len(encoded[i])
        for i, part in enumerate(self._parts):
            if "document" in part.fields:
                cut = self._cut_document(part, pair, instruction, room, left=left)
                if cut is None:
                    return None
                encoded[i] = cut
        return [token_id for ids in encoded for token_id in ids]

    def _cut_document(
        self, part: _Part, pair: Pair, instruction: str | None, room: int, *, left: bool
    ) -> list[int] | None:
        """Cuts the part with the document; what stands before and after the document goes last, and never the end."""
        before, after = split_at(part.text, "document")
        head = self.template.filled(before, *pair, instruction)
        tail = self.template.filled(after, *pair, instruction)
        document = self.template.cleaned("document", pair[1])
        (encoding,) = self._tokenizer.encode_batch([head + document + tail], add_special_tokens=False)
        ids, offsets = encoding.ids, encoding.offsets
        end_of_document = len(head) + len(document)
        first = next((i for i, (_, end) in enumerate(offsets) if end > len(head)), len(ids))
        last = next((i for i, (start, _) in enumerate(offsets) if start >= end_of_document), len(ids))
        last = max(first, last)
        head_ids, document_ids, tail_ids = ids[:first], ids[first:last], ids[last:]
        if room < len(tail_ids):
            return None
        kept = max(min(room - len(head_ids) - len(tail_ids), len(document_ids)), 0)
        document_ids = document_ids[len(document_ids) - kept :] if left else document_ids[:kept]
        return [*head_ids[: room - len(tail_ids)], *document_ids, *tail_ids]

    def _part_ids(self, part: _Part, pair: Pair, instruction: str | None) -> list[int]:
        if not part.fields:
            return self._constant[part.text]
        return self._ids([self.template.filled(part.text, *pair, instruction)])[0]

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
