"""Tokenizes short texts in the event loop, others in worker threads.

TokenizerPool runs in the client of the engine and needs only the `tokenizers` library. The engine process resolves the
tokenizer (tokenizer_loader.py) and sends it as a TokenizerSpec.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from ..protocol.errors import InvalidRequestError
from ..protocol.model_info import TokenizerSpec
from ..protocol.request import Text, TokenizedInput
from ..protocol.results import TokenizedText
from ..protocol.templates import ChatOptions, Conversation
from .jobs import LONG_JOB, TokenizerJobs
from .model_tokenizer import IsCancelled, ModelTokenizer, SpecialTokens, Truncation, check_cancelled, portions
from .pairs import PairEncoder

if TYPE_CHECKING:
    from .chat_renderer import ChatRenderer

_PROBE_CHARS: Final = 250_000
"""Characters in a part of a long text; the tokens of the parts are counted before the text is tokenized."""
_SPARE_TOKENS: Final = 64
"""Tokens that a part may have in addition because it begins or ends within a word."""
OnCount = Callable[[int], None]
"""Receives the number of tokens so far; an error that it raises stops the job."""


class TokenizerPool:
    """Tokenizes for the tasks of one event loop: short texts in the loop, others in worker threads.

    Every method raises EngineOverloadedError if too much text waits, and EngineUnavailableError after `close`.

    Attributes:
        special_tokens: Tokens that the tokenizer adds around a text; None if it also changes texts in other ways.
        multi_vector_tokens: Special tokens of a multi-vector model.
        end_id: See TokenizerSpec.
        padding: See TokenizerSpec.
        config: See TokenizerSpec.
        query: The tokenizer of ModelInfo.query; None if queries have no other model than documents.

    Args:
        vocab_size: Size of the vocabulary, for the check of token ids from callers.
        do_lower_case: Whether to lower-case texts (an option of sentence-transformers).
        max_chars: See TokenizerJobs.
        on_rejection: See TokenizerJobs.
        query: See the attribute.
    """

    def __init__(
        self,
        spec: TokenizerSpec,
        *,
        vocab_size: int,
        do_lower_case: bool,
        num_workers: int,
        max_chars: int = sys.maxsize,
        on_rejection: Callable[[], None] = lambda: None,
        query: TokenizerPool | None = None,
    ) -> None:
        self.query = query
        self._tokenizer = ModelTokenizer(
            Tokenizer.from_str(spec.json),
            vocab_size=vocab_size,
            do_lower_case=do_lower_case,
            truncation_side=spec.truncation_side,
            dropped_id=spec.dropped_id,
            chars_per_token=spec.chars_per_token,
        )
        self.special_tokens = SpecialTokens.of(self._tokenizer.backend)
        self.multi_vector_tokens = spec.multi_vector_tokens
        self.end_id = spec.end_id
        self.padding = spec.padding
        self.config = spec.config
        self._pairs = PairEncoder(self._tokenizer, spec.score_template, uses_token_types=spec.uses_token_types)
        self._chat_template = spec.chat_template
        self._chat_renderer: ChatRenderer | None = None
        self._jobs = TokenizerJobs(num_workers, max_chars, on_rejection)

    def encode(
        self,
        inputs: Sequence[Text],
        truncation: Truncation,
        *,
        prompt: str = "",
        skip_prompt: bool = False,
        add_special_tokens: bool = True,
    ) -> Awaitable[list[TokenizedInput]]:
        """Tokenizes texts; checks token ids and leaves them unchanged.

        Args:
            inputs: Texts or lists of token ids.
            truncation: Maximum length, and whether longer inputs are truncated.
            prompt: Prompt that is added before every text.
            skip_prompt: Whether pooling ignores the tokens of the prompt and the special tokens before it.
            add_special_tokens: Whether to add the special tokens of the tokenizer.

        Raises:
            RequestTooLongError: An input is too long and must not be truncated.
            InvalidRequestError: A list of ids is empty, an id is outside the vocabulary, or the maximum is too small
                for the special tokens and the prompt.
        """
        texts = [item for item in inputs if isinstance(item, str)]
        return self._jobs.run(
            lambda is_cancelled: self._tokenizer.encode(
                inputs, truncation, prompt, skip_prompt, add_special_tokens, is_cancelled
            ),
            sum(map(len, texts)) + len(prompt) * len(texts),
            num_texts=len(texts) if len(texts) == len(inputs) else None,
        )

    async def encode_parts(
        self, inputs: Sequence[Text], truncation: Truncation, *, prompt: str = ""
    ) -> tuple[list[NDArray[np.int32]], bool]:
        """Tokenizes each part of a text, without special tokens; checks token ids and leaves them unchanged.

        Args:
            inputs: Texts or lists of token ids.
            truncation: Maximum length of all parts together; text far beyond it may be omitted.
            prompt: Prompt that is added before the first part if that is a text.

        Returns:
            The ids of each part, and whether the text is complete.

        Raises:
            InvalidRequestError: A list of ids is empty, or an id is outside the vocabulary.
        """
        num_chars = sum(len(item) for item in inputs if isinstance(item, str))
        return await self._jobs.run(
            lambda is_cancelled: self._tokenizer.encode_parts(inputs, truncation, prompt, is_cancelled), num_chars
        )

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], truncation: Truncation, *, instruction: str | None = None
    ) -> list[TokenizedInput]:
        """Tokenizes each pair into one sequence.

        Truncation shortens the longer text first; in a model with a prompt for pairs, it shortens the document, and the
        query only to its share of the tokens.

        Args:
            pairs: Queries and documents.
            truncation: Maximum length, and whether longer pairs are truncated.
            instruction: Task instruction in the prompt; None for the instruction of the model.

        Raises:
            RequestTooLongError: A pair is too long and must not be truncated.
            InvalidRequestError: The maximum is too small for the prompt, its instruction and the special tokens, or the
                prompt of the model does not support an instruction.
        """
        self._pairs.check_instruction(instruction)
        num_chars = sum(len(first) + len(second) for first, second in pairs)
        return await self._jobs.run(
            lambda is_cancelled: self._pairs.encode(pairs, truncation, instruction, is_cancelled), num_chars
        )

    async def render_chats(self, conversations: Sequence[Conversation], options: ChatOptions) -> list[str]:
        """Renders each chat with the chat template of the model; see AsyncEngine.render_chats."""
        renderer = self._renderer()

        def work(is_cancelled: IsCancelled) -> list[str]:
            texts = []
            for conversation in conversations:
                check_cancelled(is_cancelled)
                texts.append(renderer.render(conversation, options))
            return texts

        return await self._jobs.run(work, LONG_JOB + 1)

    async def token_ids(
        self, texts: Sequence[str], *, add_special_tokens: bool, on_count: OnCount | None = None
    ) -> list[list[int]]:
        """Returns the ids of each text, not truncated; see `token_details`."""
        return await self._jobs.run(
            lambda is_cancelled: [
                encoding.ids for encoding in self._encode_whole(texts, add_special_tokens, is_cancelled, on_count)
            ],
            sum(map(len, texts)),
        )

    async def token_details(
        self, texts: Sequence[str], *, add_special_tokens: bool, on_count: OnCount | None = None
    ) -> list[TokenizedText]:
        """Returns the tokens of each text with their offsets, not truncated.

        Args:
            texts: Texts.
            add_special_tokens: Whether to add the special tokens of the tokenizer.
            on_count: Called in a worker thread with the number of tokens so far, before the result is built.
        """

        def work(is_cancelled: IsCancelled) -> list[TokenizedText]:
            return [
                TokenizedText(e.ids, e.tokens, e.offsets, [mask == 1 for mask in e.special_tokens_mask])
                for e in self._encode_whole(texts, add_special_tokens, is_cancelled, on_count)
            ]

        return await self._jobs.run(work, sum(map(len, texts)))

    async def decode(self, batches: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """Returns the text of each list of ids; raises InvalidRequestError for an id outside the vocabulary."""

        def work(is_cancelled: IsCancelled) -> list[str]:
            texts: list[str] = []
            for first, last in portions([len(ids) for ids in batches], is_cancelled):
                checked = [self._tokenizer.checked_ids(ids).tolist() for ids in batches[first:last]]
                # `decode` keeps the GIL for seconds if a list is long; `decode_batch` releases it.
                texts += self._tokenizer.backend.decode_batch(checked, skip_special_tokens)
            return texts

        return await self._jobs.run(work, sum(map(len, batches)))

    def truncates_left(self, truncation: Truncation) -> bool:
        """Whether truncation removes the beginning of a text."""
        return self._tokenizer.truncates_left(truncation)

    def close(self) -> None:
        """Ends the worker threads; waiting jobs raise EngineUnavailableError."""
        self._jobs.close()
        if self.query is not None:
            self.query.close()

    def _renderer(self) -> ChatRenderer:
        """Returns the chat renderer, created on first use; raises InvalidRequestError if there is no template."""
        if self._chat_template is None:
            raise InvalidRequestError(
                "The model has no chat template, so it does not support messages; send the text as input, or add the "
                "template to the folder of the model as chat_template.jinja.",
                param="messages",
            )
        if self._chat_renderer is None:
            from .chat_renderer import ChatRenderer  # importing jinja2 is slow and few models need it

            self._chat_renderer = ChatRenderer(self._chat_template)
        return self._chat_renderer

    def _encode_whole(
        self, texts: Sequence[str], specials: bool, is_cancelled: IsCancelled, on_count: OnCount | None
    ) -> Iterator[Encoding]:
        """Encodes texts without truncation, in a worker thread."""
        num_tokens = 0
        for first, last in portions([len(text) for text in texts], is_cancelled):
            cased = self._tokenizer.cased(texts[first:last])
            if on_count is not None and len(cased[0]) > _PROBE_CHARS:
                self._count_long_text(cased[0], num_tokens, on_count, is_cancelled)
            encodings = self._tokenizer.backend.encode_batch(cased, add_special_tokens=specials)
            num_tokens += sum(map(len, encodings))
            if on_count is not None:
                on_count(num_tokens)
            yield from encodings

    def _count_long_text(self, text: str, num_tokens: int, on_count: OnCount, is_cancelled: IsCancelled) -> None:
        """Counts the tokens of a long text in parts, because millions of tokens at once would need a gigabyte."""
        for start in range(0, len(text), _PROBE_CHARS):
            check_cancelled(is_cancelled)
            part = text[start : start + _PROBE_CHARS]
            (encoding,) = self._tokenizer.backend.encode_batch_fast([part], add_special_tokens=False)
            num_tokens += max(len(encoding) - _SPARE_TOKENS, 0)
            on_count(num_tokens)
