"""Late chunking: the inputs of a request run as one text, and each gets the mean of its own token rows.

Every vector then depends on the whole text (Günther et al., Late Chunking, arXiv:2409.04701). The request format is
Jina's. Decisions:

* The inputs are tokenized one by one and their tokens are joined without separators. The prompt is added once at the
  beginning, and the model's special tokens once around the whole text. Nothing is added before a first input, or after
  a last input, that consists of token ids.
* As in Jina's code, the rows of the leading special tokens and the prompt belong to the first input, unless the model
  excludes its prompt from the pooling. The trailing special tokens belong to the last input. A single input therefore
  has the same vector as without late chunking.
* Only models with MEAN pooling support it. Their Dense modules must be linear, so that they can run before the mean.

Plain numpy.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..protocol.errors import InvalidRequestError
from ..protocol.messages import TokenizedInput
from ..protocol.model_info import ModelInfo
from ..protocol.tasks import PoolingType
from .model_tokenizer import SpecialTokens, Truncation, count_prompt

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class JoinedText:
    """N inputs as one sequence.

    Attributes:
        tokens: The sequence.
        spans: [N]. First row and end of each input in it.
        num_tokens: [N]. Tokens of each input. Special tokens and prompt count for the first and last input.
    """

    tokens: TokenizedInput
    spans: list[Span]
    num_tokens: list[int]

    def pool(self, rows_TD: NDArray[np.float32], *, normalize: bool) -> NDArray[np.float32]:  # noqa: N803
        """Returns the mean of each input's rows [N, D] float32, L2-normalised if `normalize` is set.

        Args:
            rows_TD: The embedding of each token, not normalised.
            normalize: Whether to normalise.
        """
        means = [rows_TD[first:last].mean(axis=0, dtype=np.float64) for first, last in self.spans]
        pooled = np.stack(means).astype(np.float32)
        if normalize:
            pooled /= np.maximum(np.linalg.norm(pooled, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        return pooled


@dataclass(frozen=True, slots=True, kw_only=True)
class LateChunking:
    """Joins the inputs of one model.

    Attributes:
        special: Special tokens around a text.
        include_prompt: False excludes the rows of the prompt and of the special tokens before it.
        truncation: Token limit, and the handling of longer sequences.
        truncates_left: Truncate the beginning, not the end.
    """

    special: SpecialTokens
    include_prompt: bool
    truncation: Truncation
    truncates_left: bool

    def join(
        self,
        parts: Sequence[NDArray[np.int32]],
        is_text: Sequence[bool],
        prompt_ids: Sequence[int],
        *,
        is_complete: bool,
    ) -> JoinedText:
        """Joins inputs.

        Args:
            parts: N >= 1. Token ids of each input without special tokens; the first one begins with the prompt.
            is_text: Whether each input is a text, not token ids.
            prompt_ids: Token ids of the prompt alone, without special tokens; empty without a prompt.
            is_complete: Whether the parts are complete. If not, they are known to be too long.

        Raises:
            RequestTooLongError: The inputs are too long together and must not be truncated.
            InvalidRequestError: An input has no tokens, before or after truncation.
        """
        leading = self.special.leading if is_text[0] else self.special.leading[:0]
        trailing = self.special.trailing if is_text[-1] else self.special.trailing[:0]
        bounds = np.cumsum([0, *map(len, parts)])
        num_tokens = int(bounds[-1]) + len(leading) + len(trailing)
        first, end = 0, int(bounds[-1])
        is_truncated = not is_complete or num_tokens > self.truncation.max_num_tokens
        if num_tokens > self.truncation.max_num_tokens:
            at_least = "" if is_complete else "at least "
            self.truncation.reject_unless_truncated(
                f"the inputs have {at_least}{num_tokens} tokens together, and late_chunking runs them as one text",
                num_tokens,
                "Please send fewer or shorter inputs, or set {cut_to_fit} to cut the text.",
            )
            num_left = max(self.truncation.max_num_tokens - len(leading) - len(trailing), 0)
            first, end = (end - num_left, end) if self.truncates_left else (0, num_left)

        num_prompt = count_prompt(parts[0], prompt_ids)
        first_text = max(num_prompt, first)
        inner = np.clip(bounds, first, end)
        lengths = np.diff(np.concatenate([[np.clip(first_text, first, end)], inner[1:]]))
        if not lengths.all():
            index = int(np.flatnonzero(lengths == 0)[0])
            left = " left after truncation" if len(parts[index]) > num_prompt * (index == 0) else ""
            raise InvalidRequestError(
                f"input {index} has no tokens{left}; late chunking needs at least one token of each input.",
                param="input",
            )

        ids = np.concatenate([leading, np.concatenate(parts)[first:end], trailing])
        rows = inner - first + len(leading)
        rows[0], rows[-1] = 0, len(ids)
        spans = [(int(start), int(stop)) for start, stop in itertools.pairwise(rows)]
        if not self.include_prompt and len(prompt_ids) > first:
            last = spans[0][1]
            spans[0] = (min(len(leading) + len(prompt_ids) - first, last - 1), last)
        return JoinedText(TokenizedInput(ids, is_truncated=is_truncated), spans, np.diff(rows).tolist())


def verify_late_chunking(info: ModelInfo) -> None:
    """Raises InvalidRequestError if the embedding of the model is not the mean of its token rows."""
    if info.query_model is not None:
        raise InvalidRequestError(
            f"late_chunking does not fit {info.name}, whose queries have their own model; leave late_chunking out.",
            param="late_chunking",
        )
    if info.sequence_pooling != (PoolingType.MEAN,):
        pooling = " + ".join(info.sequence_pooling)
        raise InvalidRequestError(
            f"late_chunking averages the token rows of each input, but {info.name} pools by {pooling} "
            f"({info.sources.get('sequence_pooling', 'unknown')}); leave late_chunking out.",
            param="late_chunking",
        )
    nonlinear = [dense.activation for dense in info.dense if dense.activation != "Identity"]
    if nonlinear:
        raise InvalidRequestError(
            f"late_chunking averages the token rows of each input, but {info.name} has a nonlinear Dense module "
            f"({nonlinear[0]}); leave late_chunking out.",
            param="late_chunking",
        )
