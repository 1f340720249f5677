"""Text above max_model_len: it is cut into windows, each is embedded, and their vectors become one.

Two modes, `chunked_processing_mode` of the pooler configuration:

windows (default): The text's tokens are cut into runs. Each becomes a sequence like any other: the model's special
    tokens are put around it, and the prompt, where there is one, before it. The embedding is the mean of the windows'
    vectors, weighted by the number of the text's tokens in each, and L2-normalised again where embeddings are. Special
    tokens and prompts have no weight; every token of the text counts once: one that several windows share (the overlap)
    is split evenly among them.
vllm: The text's token ids, special tokens and prompt once, are cut into runs of max_model_len. The embedding is the
    mean of their vectors, weighted by length, and not normalised again.

Inputs that come as token ids are taken as they are: their windows have no added special tokens and no prompt. An input
that fits into one window is left alone. Plain numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..protocol.errors import InvalidRequestError, ModelLoadError
from ..protocol.model_info import ModelInfo
from ..protocol.request import TokenizedInput
from ..protocol.tasks import ChunkedProcessingMode
from .special_tokens import SpecialTokens, count_prompt

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """N inputs as the W >= N sequences that the model runs.

    Attributes:
        sequences: The windows of all inputs, in order.
        num_tokens: Tokens of each input before it was cut, special tokens once.
        num_windows: [N]. How many of them belong to each input; None: each has one.
        weights: [W] float32. Share of each window in the embedding of its input; None as above.
        renormalizes: Whether the mean of normalised vectors is normalised again.
    """

    sequences: list[TokenizedInput]
    num_tokens: list[int]
    num_windows: NDArray[np.intp] | None = None
    weights: NDArray[np.float32] | None = None
    renormalizes: bool = True

    @classmethod
    def whole(cls, inputs: list[TokenizedInput]) -> Windows:
        """Returns inputs that all fit into a window."""
        return cls(inputs, [len(i) for i in inputs])

    def join(self, vectors_WD: NDArray[np.float32], *, normalized: bool) -> NDArray[np.float32]:  # noqa: N803
        """Returns the embedding of each input [N, D] float32.

        Args:
            vectors_WD: The embedding of each window, float32.
            normalized: Whether they are L2-normalised.
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
    """How one model's over-long inputs are cut.

    Attributes:
        size: Tokens of a window, special tokens and prompt included.
        overlap: Tokens that a window shares with the one before it.
        mode: See the module.
        special: What the tokenizer puts around a text.
    """

    size: int
    overlap: int
    mode: ChunkedProcessingMode
    special: SpecialTokens

    @classmethod
    def of(cls, info: ModelInfo, special: SpecialTokens | None) -> LongText | None:
        """Returns what the operator asked for; None where long-text mode is off.

        Args:
            info: The resolved model.
            special: What its tokenizer puts around a text; None where it does more to it than that.

        Raises:
            ModelLoadError: That does not fit the tokenizer.
        """
        if not info.enable_chunked_processing:
            return None
        if special is None:
            raise ModelLoadError(
                "--pooler-config: enable_chunked_processing needs a tokenizer that puts special tokens around a text; "
                f"that of {info.name} does more to it."
            )
        room = info.max_model_len - len(special)
        if room <= info.chunk_overlap:
            raise ModelLoadError(
                f"--pooler-config: a window of {info.name} has {info.max_model_len} tokens, {len(special)} of them "
                f"special ones; the {max(room, 0)} that are left for text must be more than the chunk_overlap of "
                f"{info.chunk_overlap}."
            )
        return cls(info.max_model_len, info.chunk_overlap, info.chunked_processing_mode, special)

    def cut(self, inputs: Sequence[TokenizedInput], is_text: Sequence[bool], prompt_ids: Sequence[int] = ()) -> Windows:
        """Cuts inputs into windows.

        Args:
            inputs: As tokenized in one piece.
            is_text: Whether each came as text; ids are taken as they are.
            prompt_ids: The prompt that was put before the texts, without special tokens.

        Raises:
            InvalidRequestError: The prompt leaves no room in a window.
        """
        sequences: list[TokenizedInput] = []
        counts, weights = [], []
        for tokens, came_as_text in zip(inputs, is_text, strict=True):
            if len(tokens) <= self.size:
                parts, shares = [tokens], np.ones(1, np.float32)
            elif came_as_text and self.mode is ChunkedProcessingMode.WINDOWS:
                parts, shares = self._framed(tokens, prompt_ids)
            else:
                parts, shares = self._unframed(tokens)
            sequences += parts
            counts.append(len(parts))
            weights.append(shares)
        renormalizes = self.mode is ChunkedProcessingMode.WINDOWS
        num_tokens = [len(tokens) for tokens in inputs]
        return Windows(sequences, num_tokens, np.array(counts, np.intp), np.concatenate(weights), renormalizes)

    def _framed(
        self, tokens: TokenizedInput, prompt_ids: Sequence[int]
    ) -> tuple[list[TokenizedInput], NDArray[np.float32]]:
        """Cuts a text into windows that all have the special tokens and the prompt, and weighs them."""
        num_leading, end = len(self.special.leading), len(tokens) - len(self.special.trailing)
        body = tokens.token_ids[num_leading:end]
        # A text that was cut on the left has lost its prompt; the prompt's last token may have grown into the text.
        num_prompt = count_prompt(body, prompt_ids)
        head, text = tokens.token_ids[: num_leading + num_prompt], body[num_prompt:]
        room = self.size - len(self.special) - num_prompt
        if room <= self.overlap:
            raise InvalidRequestError(
                f"The prompt takes {num_prompt} of the {self.size} tokens of a window and leaves {max(room, 0)} for "
                f"the text, which must be more than the overlap of {self.overlap}; take a shorter prompt.",
                param="prompt_name",
            )
        spans = _spans(len(text), room, self.overlap)
        skip = tokens.num_prompt_tokens
        windows = []
        for first, last in spans:
            ids = np.concatenate([head, text[first:last], self.special.trailing])
            windows.append(TokenizedInput(ids, num_prompt_tokens=min(skip, len(ids) - 1)))
            skip = len(head) if num_prompt and skip else 0
        return windows, _shares(spans, self.overlap)

    def _unframed(self, tokens: TokenizedInput) -> tuple[list[TokenizedInput], NDArray[np.float32]]:
        """Cuts ids as they are into windows, and weighs them."""
        spans = _spans(len(tokens), self.size, self.overlap)
        windows = [
            TokenizedInput(
                tokens.token_ids[first:last],
                num_prompt_tokens=min(max(tokens.num_prompt_tokens - first, 0), last - first - 1),
            )
            for first, last in spans
        ]
        return windows, _shares(spans, self.overlap)


def _spans(num_tokens: int, room: int, overlap: int) -> list[Span]:
    """Returns the first token and the end of each window over `num_tokens`; only the last one may be shorter."""
    starts = range(0, max(num_tokens - overlap, 1), room - overlap)
    return [(start, min(start + room, num_tokens)) for start in starts]


def _shares(spans: Sequence[Span], overlap: int) -> NDArray[np.float32]:
    """Returns the share of each window, which sum to 1: a token counts once, split among the windows that hold it."""
    bounds = np.array(spans)
    num_tokens = int(bounds[-1, 1])
    counts: NDArray[np.float64] = np.diff(bounds, axis=1)[:, 0] / num_tokens
    if overlap:
        num_holders = np.zeros(num_tokens + 1)
        num_holders[bounds[:, 0]] += 1  # no two windows begin or end at one token
        num_holders[bounds[:, 1]] -= 1
        before = np.concatenate([[0.0], np.cumsum(1 / np.cumsum(num_holders[:-1]))])
        counts = np.diff(before[bounds], axis=1)[:, 0] / num_tokens
    return counts.astype(np.float32)
