"""Tokenizes texts in worker threads.

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
"""Characters of a part of a long text whose tokens are counted before all of it is tokenized."""
_SPARE_TOKENS: Final = 64
"""A part may begin and end within a word, which adds up to this many tokens."""
OnCount = Callable[[int], None]
"""Called with the number of tokens so far. An error that it raises stops the job."""


class TokenizerPool:
    """Tokenizes in worker threads. Safe to use from many tasks of one event loop.

    Every method raises EngineOverloadedError if too much text waits, and EngineUnavailableError after `close`.

    Attributes:
        special_tokens: Tokens that the tokenizer puts around a text; None if it changes texts in other ways too.
        recipe_tokens: The tokens of a multi-vector model's recipe.
        end_id: See TokenizerSpec.
        config: See TokenizerSpec.

    Args:
        spec: The tokenizer.
        vocab_size: Token ids given by callers must be below it.
        do_lower_case: Lower-case text first (a sentence-transformers option).
        num_workers: Threads.
        max_chars: See TokenizerJobs.
        on_refusal: See TokenizerJobs.
    """

    def __init__(
        self,
        spec: TokenizerSpec,
        *,
        vocab_size: int,
        do_lower_case: bool,
        num_workers: int,
        max_chars: int = sys.maxsize,
        on_refusal: Callable[[], None] = lambda: None,
    ) -> None:
        self._tokenizer = ModelTokenizer(
            Tokenizer.from_str(spec.json),
            vocab_size=vocab_size,
            do_lower_case=do_lower_case,
            truncation_side=spec.truncation_side,
        )
        self.special_tokens = SpecialTokens.of(self._tokenizer.backend)
        self.recipe_tokens = spec.recipe_tokens
        self.end_id = spec.end_id
        self.config = spec.config
        self._pairs = PairEncoder(self._tokenizer, spec.score_template, uses_token_types=spec.uses_token_types)
        self._chat_template = spec.chat_template
        self._chat_renderer: ChatRenderer | None = None
        self._jobs = TokenizerJobs(num_workers, max_chars, on_refusal)

    def encode(
        self,
        inputs: Sequence[Text],
        truncation: Truncation,
        *,
        prompt: str = "",
        skip_prompt: bool = False,
        add_special_tokens: bool = True,
    ) -> Awaitable[list[TokenizedInput]]:
        """Tokenizes texts; token ids are checked and taken as they are.

        Args:
            inputs: Texts or lists of token ids.
            truncation: Limit and what to do above it.
            prompt: Put before every text.
            skip_prompt: Mark the prompt's tokens, leading special tokens included, to be left out of the pooling.
            add_special_tokens: Put the tokenizer's special tokens around every text.

        Raises:
            RequestTooLongError: An input is above the limit and must not be cut.
            InvalidRequestError: A list of ids is empty, an id is outside the vocabulary, or the limit leaves no room.
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
        """Tokenizes the parts of one text by themselves, without special tokens; token ids are checked and taken as is.

        Args:
            inputs: Texts or lists of token ids.
            truncation: Limit of all parts together. Text far beyond it may be left out.
            prompt: Put before the first part if it is a text.

        Returns:
            The ids of each part, and whether nothing was left out.

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
        """Tokenizes pairs into joint sequences.

        If the model has a prompt for pairs, an over-long pair loses tokens of its document, and of a query that takes
        more than its share. Otherwise the longer text is cut first.

        Args:
            pairs: Queries and documents.
            truncation: Limit and what to do above it.
            instruction: Task instruction in the prompt; None takes the model's own.

        Raises:
            RequestTooLongError: A pair is above the limit and must not be cut.
            InvalidRequestError: The limit leaves no room beside the prompt, its instruction or special tokens, or the
                model's prompt has no place for an instruction.
        """
        self._pairs.check_instruction(instruction)
        num_chars = sum(len(first) + len(second) for first, second in pairs)
        return await self._jobs.run(
            lambda is_cancelled: self._pairs.encode(pairs, truncation, instruction, is_cancelled), num_chars
        )

    async def render_chats(self, conversations: Sequence[Conversation], options: ChatOptions) -> list[str]:
        """Renders each chat with the model's chat template; see AsyncEngine.render_chats."""
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
        """Returns the ids of each text, uncut; see `token_details`."""
        return await self._jobs.run(
            lambda is_cancelled: [
                encoding.ids for encoding in self._uncut(texts, add_special_tokens, is_cancelled, on_count)
            ],
            sum(map(len, texts)),
        )

    async def token_details(
        self, texts: Sequence[str], *, add_special_tokens: bool, on_count: OnCount | None = None
    ) -> list[TokenizedText]:
        """Returns the tokens of each text with their places in it, uncut.

        Args:
            texts: Texts.
            add_special_tokens: Put the tokenizer's special tokens around every text.
            on_count: Called in a worker thread with the tokens so far, before the result is built.
        """

        def work(is_cancelled: IsCancelled) -> list[TokenizedText]:
            return [
                TokenizedText(e.ids, e.tokens, e.offsets, [mask == 1 for mask in e.special_tokens_mask])
                for e in self._uncut(texts, add_special_tokens, is_cancelled, on_count)
            ]

        return await self._jobs.run(work, sum(map(len, texts)))

    async def decode(self, batches: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """Returns the text of each list of ids. Raises InvalidRequestError for an id outside the vocabulary."""

        def work(is_cancelled: IsCancelled) -> list[str]:
            texts: list[str] = []
            for first, last in portions([len(ids) for ids in batches], is_cancelled):
                checked = [self._tokenizer.given_ids(ids).tolist() for ids in batches[first:last]]
                # `decode` holds the GIL, for seconds if a list is long.
                texts += self._tokenizer.backend.decode_batch(checked, skip_special_tokens)
            return texts

        return await self._jobs.run(work, sum(map(len, batches)))

    def cuts_left(self, truncation: Truncation) -> bool:
        """Whether the left side of an over-long text is cut away."""
        return self._tokenizer.cuts_left(truncation)

    def close(self) -> None:
        """Ends the worker threads. Pending jobs fail with EngineUnavailableError."""
        self._jobs.close()

    def _renderer(self) -> ChatRenderer:
        """Returns the chat renderer, created on first use. Raises InvalidRequestError without a template."""
        if self._chat_template is None:
            raise InvalidRequestError(
                "The served model has no chat template, so it takes no messages; send the text as input, or add the "
                "template to the model's folder as chat_template.jinja.",
                param="messages",
            )
        if self._chat_renderer is None:
            from .chat_renderer import ChatRenderer  # importing jinja2 is slow, and few models need it

            self._chat_renderer = ChatRenderer(self._chat_template)
        return self._chat_renderer

    def _uncut(
        self, texts: Sequence[str], specials: bool, is_cancelled: IsCancelled, on_count: OnCount | None
    ) -> Iterator[Encoding]:
        """Encodes texts without truncation. Runs in a worker thread."""
        num_tokens = 0
        for first, last in portions([len(text) for text in texts], is_cancelled):
            cased = self._tokenizer.cased(texts[first:last])
            if on_count is not None and len(cased[0]) > _PROBE_CHARS:
                self._probe(cased[0], num_tokens, on_count, is_cancelled)
            encodings = self._tokenizer.backend.encode_batch(cased, add_special_tokens=specials)
            num_tokens += sum(map(len, encodings))
            if on_count is not None:
                on_count(num_tokens)
            yield from encodings

    def _probe(self, text: str, num_tokens: int, on_count: OnCount, is_cancelled: IsCancelled) -> None:
        """Counts the tokens of a long text in parts: millions of tokens at once would take a gigabyte."""
        for start in range(0, len(text), _PROBE_CHARS):
            check_cancelled(is_cancelled)
            part = text[start : start + _PROBE_CHARS]
            (encoding,) = self._tokenizer.backend.encode_batch_fast([part], add_special_tokens=False)
            num_tokens += max(len(encoding) - _SPARE_TOKENS, 0)
            on_count(num_tokens)
