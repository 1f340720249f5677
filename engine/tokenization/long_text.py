"""Embeds text above max_model_len: splits it into windows, embeds each window and averages the vectors.

Two modes (`chunked_processing_mode` of the pooler configuration):

windows (default): Every window has the model's special tokens and the prompt. The embedding is the mean of the window
    vectors, weighted by the number of text tokens in each window, and L2-normalised again if embeddings are normalised.
    Special tokens and prompt have no weight. Every text token counts once: the weight of a token in several windows
    (the overlap) is split evenly among them.
vllm: The token ids of the text, including special tokens and prompt, are split into windows of max_model_len. The
    embedding is the mean of the window vectors, weighted by length, and not normalised again.

The windows of inputs of token ids get no special tokens and no prompt. Inputs that fit are not changed. Plain numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..protocol.errors import InvalidRequestError, ModelLoadError
from ..protocol.messages import TokenizedInput
from ..protocol.model_info import ModelInfo
from ..protocol.results import ScoreResult
from ..protocol.tasks import ChunkedProcessingMode
from .model_tokenizer import SpecialTokens, count_prompt

Span = tuple[int, int]
Offsets = Sequence[tuple[int, int]]
MIN_PASSAGE_TOKENS: Final = 16
"""If the query leaves fewer tokens than this, documents are not split."""


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """The W >= N sequences that the model runs for N inputs.

    Attributes:
        sequences: The windows of all inputs, in order.
        num_tokens: Tokens of each input before it was split, special tokens once.
        num_windows: [N]. Number of windows of each input; None: one each.
        weights: [W] float32. Share of each window in the embedding of its input; None: one window each.
        renormalizes: Whether the mean of normalised vectors is normalised again.
    """

    sequences: list[TokenizedInput]
    num_tokens: list[int]
    num_windows: NDArray[np.intp] | None = None
    weights: NDArray[np.float32] | None = None
    renormalizes: bool = True

    @classmethod
    def unsplit(cls, inputs: list[TokenizedInput]) -> Windows:
        """Returns inputs that fit into one window each."""
        return cls(inputs, [len(i) for i in inputs])

    def join(self, vectors_WD: NDArray[np.float32], *, normalized: bool) -> NDArray[np.float32]:  # noqa: N803
        """Returns the embedding of each input [N, D] float32.

        Args:
            vectors_WD: The embedding of each window, float32.
            normalized: Whether `vectors_WD` are L2-normalised.
        """
        if self.num_windows is None or self.weights is None:
            return vectors_WD
        starts = np.cumsum(self.num_windows) - self.num_windows
        joined: NDArray[np.float32] = np.add.reduceat(vectors_WD * self.weights[:, None], starts, axis=0)
        if normalized and self.renormalizes:
            is_long = self.num_windows > 1
            lengths = np.linalg.norm(joined[is_long], axis=1, keepdims=True)
            joined[is_long] /= np.maximum(lengths, np.finfo(np.float32).tiny)
        return joined


@dataclass(frozen=True, slots=True, eq=False)
class LongText:
    """Splits the over-long inputs of one model.

    Attributes:
        size: Tokens of a window, special tokens and prompt included.
        overlap: Tokens that a window shares with the one before it.
        mode: See the module.
        special: Special tokens around a text.
    """

    size: int
    overlap: int
    mode: ChunkedProcessingMode
    special: SpecialTokens

    @classmethod
    def of(cls, info: ModelInfo, special: SpecialTokens | None) -> LongText | None:
        """Returns the long-text mode of a model; None if it is off.

        Args:
            info: The resolved model.
            special: Special tokens around a text; None if the tokenizer changes texts in other ways too.

        Raises:
            ModelLoadError: The tokenizer or the window size does not support it.
        """
        if not info.enable_chunked_processing:
            return None
        if special is None:
            raise ModelLoadError(
                "--pooler-config: enable_chunked_processing needs a tokenizer that only adds special tokens around a "
                f"text; the tokenizer of {info.name} does more."
            )
        num_text = info.max_model_len - len(special)
        if num_text <= info.chunk_overlap:
            raise ModelLoadError(
                f"--pooler-config: a window of {info.name} has {max(num_text, 0)} text tokens ({info.max_model_len} "
                f"without {len(special)} special tokens); it must have more than chunk_overlap, {info.chunk_overlap}."
            )
        return cls(info.max_model_len, info.chunk_overlap, info.chunked_processing_mode, special)

    def split(
        self, inputs: Sequence[TokenizedInput], is_text: Sequence[bool], prompt_ids: Sequence[int] = ()
    ) -> Windows:
        """Splits inputs into windows.

        Args:
            inputs: The tokenized inputs.
            is_text: Whether each input is a text, not token ids.
            prompt_ids: Token ids of the prompt of the texts, without special tokens.

        Raises:
            InvalidRequestError: The prompt leaves too few tokens in a window.
        """
        sequences: list[TokenizedInput] = []
        counts, weights = [], []
        for tokens, is_string in zip(inputs, is_text, strict=True):
            if len(tokens) <= self.size:
                parts, shares = [tokens], np.ones(1, np.float32)
            elif is_string and self.mode is ChunkedProcessingMode.WINDOWS:
                parts, shares = self._split_text(tokens, prompt_ids)
            else:
                parts, shares = self._split_ids(tokens)
            sequences += parts
            counts.append(len(parts))
            weights.append(shares)
        renormalizes = self.mode is ChunkedProcessingMode.WINDOWS
        num_tokens = [len(tokens) for tokens in inputs]
        return Windows(sequences, num_tokens, np.array(counts, np.intp), np.concatenate(weights), renormalizes)

    def _split_text(
        self, tokens: TokenizedInput, prompt_ids: Sequence[int]
    ) -> tuple[list[TokenizedInput], NDArray[np.float32]]:
        """Splits a text into windows with special tokens and prompt. Returns windows and weights."""
        num_leading = len(self.special.leading)
        end = len(tokens) - len(self.special.trailing)
        body = tokens.token_ids[num_leading:end]
        # Truncation on the left removes the prompt. The last token of the prompt may have merged with the text.
        num_prompt = count_prompt(body, prompt_ids)
        head = tokens.token_ids[: num_leading + num_prompt]
        text = body[num_prompt:]
        num_text = self.size - len(self.special) - num_prompt
        if num_text <= self.overlap:
            raise InvalidRequestError(
                f"The prompt takes {num_prompt} of the {self.size} tokens of a window and leaves {max(num_text, 0)} "
                f"for the text, which must be more than the overlap of {self.overlap}; use a shorter prompt.",
                param="prompt_name",
            )
        spans = _spans(len(text), num_text, self.overlap)
        skip = tokens.num_skipped_tokens
        windows = []
        for first, last in spans:
            ids = np.concatenate([head, text[first:last], self.special.trailing])
            windows.append(TokenizedInput(ids, num_skipped_tokens=min(skip, len(ids) - 1)))
            skip = len(head) if num_prompt and skip else 0
        return windows, _shares(spans, self.overlap)

    def _split_ids(self, tokens: TokenizedInput) -> tuple[list[TokenizedInput], NDArray[np.float32]]:
        spans = _spans(len(tokens), self.size, self.overlap)
        windows = [
            TokenizedInput(
                tokens.token_ids[first:last],
                num_skipped_tokens=min(max(tokens.num_skipped_tokens - first, 0), last - first - 1),
            )
            for first, last in spans
        ]
        return windows, _shares(spans, self.overlap)


def _spans(num_tokens: int, size: int, overlap: int) -> list[Span]:
    """Returns the first token and the end of each window. Only the last window may be shorter than `size`."""
    starts = range(0, max(num_tokens - overlap, 1), size - overlap)
    return [(start, min(start + size, num_tokens)) for start in starts]


def _shares(spans: Sequence[Span], overlap: int) -> NDArray[np.float32]:
    """Returns the weight of each window; they sum to 1. The weight of a token is split among its windows."""
    bounds = np.array(spans)
    num_tokens = int(bounds[-1, 1])
    counts: NDArray[np.float64] = np.diff(bounds, axis=1)[:, 0] / num_tokens
    if overlap:
        changes = np.zeros(num_tokens + 1)  # of the number of windows at each token
        changes[bounds[:, 0]] += 1  # no two windows begin or end at the same token
        changes[bounds[:, 1]] -= 1
        before = np.concatenate([[0.0], np.cumsum(1 / np.cumsum(changes[:-1]))])
        counts = np.diff(before[bounds], axis=1)[:, 0] / num_tokens
    return counts.astype(np.float32)


@dataclass(frozen=True, slots=True)
class Passages:
    """The passages of several documents.

    Attributes:
        texts: All passages, in the order of the documents.
        owners: The document of each passage.
        truncated_documents: The documents that have more passages than the limit.
    """

    texts: list[str]
    owners: list[int]
    truncated_documents: list[int]

    @classmethod
    def of(
        cls, documents: Sequence[str], offsets: Sequence[Offsets], sizes: Sequence[int], limit: int, *, spare: int = 0
    ) -> Passages:
        """Splits documents.

        Args:
            documents: Texts.
            offsets: First character and end of each token, per document.
            sizes: Tokens that fit into a passage, per document; below MIN_PASSAGE_TOKENS the document is not split.
            limit: Largest number of passages per document.
            spare: Tokens to leave free in each passage: tokenizing it alone may add tokens.
        """
        texts: list[str] = []
        owners: list[int] = []
        truncated_documents: list[int] = []
        for i, (document, token_offsets, size) in enumerate(zip(documents, offsets, sizes, strict=True)):
            is_unsplit = size < MIN_PASSAGE_TOKENS or len(token_offsets) <= size
            passages = [document] if is_unsplit else split_text(document, token_offsets, size - spare, limit + 1)
            if len(passages) > limit:
                truncated_documents.append(i)
            texts += passages[:limit]
            owners += [i] * len(passages[:limit])
        return cls(texts, owners, truncated_documents)

    def join(self, result: ScoreResult) -> ScoreResult:
        """Returns the best score and the summed token count of each document."""
        scores = np.full(self.owners[-1] + 1, -np.inf, np.float32)
        np.maximum.at(scores, self.owners, result.scores)
        num_tokens = [0] * len(scores)
        for owner, count in zip(self.owners, result.num_tokens, strict=True):
            num_tokens[owner] += count
        return ScoreResult(scores, num_tokens)


def split_text(text: str, offsets: Offsets, size: int, limit: int) -> list[str]:
    """Returns up to `limit` passages of at most `size` tokens. `offsets`: first character and end of each token."""
    if len(offsets) <= size:
        return [text]
    passages: list[str] = []
    first = 0
    while first < len(offsets) and len(passages) < limit:
        last = min(first + size, len(offsets))
        if last < len(offsets):
            last = next((k for k in range(last, last - size // 4, -1) if _begins_word(text, offsets[k][0])), last)
        passages.append(text[offsets[first][0] : offsets[last - 1][1]])
        first = last
    return passages


def _begins_word(text: str, index: int) -> bool:
    return text[index : index + 1].isspace() or text[max(index - 1, 0) : index].isspace()
