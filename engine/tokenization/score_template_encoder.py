"""Joins a query and a document by a ScoreTemplate into token ids. The `tokenizers` library alone; no event loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tokenizers import Tokenizer

from ..protocol.score_template import ScoreTemplate, fields_of, split_at

Pair = tuple[str, str]

# Of what the prompt leaves, as publishers have it that tokenize the query by itself. Others let a long query take all
# of it, so that nothing of any document is read and all scores are the same.
_QUERY_SHARE: Final = (3, 4)


@dataclass(frozen=True, slots=True)
class _Part:
    """One part of a template and the fields in it."""

    text: str
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _LocatedPart:
    """The ids of one part, and the first and the end of the query's and the document's among them."""

    ids: list[int]
    spans: dict[str, tuple[int, int]]

    def count(self, field: str) -> int:
        """Returns how many tokens a field has here."""
        first, last = self.spans.get(field, (0, 0))
        return last - first

    def cut(self, kept: Mapping[str, int], *, left: bool) -> list[int]:
        """Returns the ids with no more than the kept tokens of each field; `left` cuts the document's beginning."""
        ids = list(self.ids)
        for field, (first, last) in sorted(self.spans.items(), key=lambda item: item[1], reverse=True):
            num_cut = max(last - first - kept[field], 0)
            if left and field == "document":
                del ids[first : first + num_cut]
            else:
                del ids[last - num_cut : last]
        return ids


class ScoreTemplateEncoder:
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
        """Returns the ids of a pair, cut to `max_num_tokens`: the document on the side asked for, the query at its end.

        The query may keep up to three quarters of what the prompt and its instruction, which are never cut, leave for
        the two. The document gets the rest.

        None where they leave less than a token for each.
        """
        parts = [self._located(part, pair, instruction) for part in self._parts]
        num_query, num_document = (sum(part.count(field) for part in parts) for field in ("query", "document"))
        room = max_num_tokens - sum(len(part.ids) for part in parts) + num_query + num_document
        if room < (num_query > 0) + (num_document > 0):
            return None
        kept = {"query": min(num_query, max(room * _QUERY_SHARE[0] // _QUERY_SHARE[1], 1))}
        kept["document"] = min(num_document, room - kept["query"])
        return [token_id for part in parts for token_id in part.cut(kept, left=left)]

    def _located(self, part: _Part, pair: Pair, instruction: str | None) -> _LocatedPart:
        """Encodes a part and finds the query and the document in it. A token that holds a bit of either is its own."""
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
            own = [i for i, (start, stop) in enumerate(encoding.offsets) if i >= last and stop > begin and start < end]
            if own:
                spans[field] = (own[0], own[-1] + 1)
                last = own[-1] + 1
        return _LocatedPart(encoding.ids, spans)

    def _part_ids(self, part: _Part, pair: Pair, instruction: str | None) -> list[int]:
        if not part.fields:
            return self._constant[part.text]
        return self._ids([self.template.filled(part.text, *pair, instruction)])[0]

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
