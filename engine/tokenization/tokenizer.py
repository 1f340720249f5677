"""Text to token ids, off the event loop but for a few short texts.

TokenizerPool runs in the client of the engine on the `tokenizers` library alone; which tokenizer to use was resolved in
the engine process (tokenizer_loader.py) and arrives as a TokenizerSpec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from ..protocol.errors import InvalidRequestError, RequestCancelledError
from ..protocol.model_info import TokenizerSpec
from ..protocol.request import Text, TokenizedInput
from ..protocol.results import TokenizedText
from ..protocol.templates import ChatOptions, Conversation
from .jobs import LONG_JOB, CharAdmission, IsGone, TokenizerJobs, portions
from .model_tokenizer import ModelTokenizer
from .pairs import PairEncoder
from .special_tokens import SpecialTokens
from .truncation import Truncation

if TYPE_CHECKING:
    from .chat_renderer import ChatRenderer

_PROBE_CHARS: Final = 250_000
"""Characters of a part of a long text whose tokens are counted before all of it is tokenized."""
_SPARE_TOKENS: Final = 64
"""A part may have this many tokens more than it has within its text: it may begin and end within a word."""
OnCount = Callable[[int], None]
"""Told of a number of tokens; what it raises ends the work."""


class TokenizerPool:
    """Tokenizes in worker threads. Safe to use from many tasks of one event loop.

    Every method raises EngineOverloadedError where too much text waits already, EngineUnavailableError after `close`.

    Attributes:
        special_tokens: What the tokenizer puts around a text; None where it does more to it than that.
        recipe_tokens: The tokens of a multi-vector model's recipe.
        end_id: See TokenizerSpec.
        config: See TokenizerSpec.

    Args:
        spec: The tokenizer.
        vocab_size: Token ids given by callers must be below it.
        do_lower_case: Lower-case text first (a sentence-transformers option).
        num_workers: Threads.
        admission: Bounds the text that may wait; None takes all that comes.
    """

    def __init__(
        self,
        spec: TokenizerSpec,
        *,
        vocab_size: int,
        do_lower_case: bool,
        num_workers: int,
        admission: CharAdmission | None = None,
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
        self._jobs = TokenizerJobs(num_workers, admission)

    async def encode(
        self,
        inputs: Sequence[Text],
        truncation: Truncation,
        *,
        prompt: str = "",
        skip_prompt: bool = False,
        add_special_tokens: bool = True,
    ) -> list[TokenizedInput]:
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
        return await self._jobs.run(
            lambda gone: self._tokenizer.encode(inputs, truncation, prompt, skip_prompt, add_special_tokens, gone),
            sum(map(len, texts)) + len(prompt) * len(texts),
            num_texts=len(texts) if len(texts) == len(inputs) else None,
        )

    async def encode_parts(
        self, inputs: Sequence[Text], truncation: Truncation, *, prompt: str = ""
    ) -> tuple[list[NDArray[np.int32]], bool]:
        """Tokenizes the parts of one text by themselves, without special tokens; token ids are checked and taken as is.

        Args:
            inputs: Texts or lists of token ids.
            truncation: Limit of all parts together; what an enormous part holds beyond it may be left out.
            prompt: Put before the first part, where that is a text.

        Returns:
            The ids of each part, and whether nothing was left out.

        Raises:
            InvalidRequestError: A list of ids is empty, or an id is outside the vocabulary.
        """
        num_chars = sum(len(item) for item in inputs if isinstance(item, str))
        return await self._jobs.run(
            lambda gone: self._tokenizer.encode_parts(inputs, truncation, prompt, gone), num_chars
        )

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], truncation: Truncation, *, instruction: str | None = None
    ) -> list[TokenizedInput]:
        """Tokenizes pairs into joint sequences.

        Too long a pair loses tokens of its document where the model has a prompt for pairs, and of a query that takes
        most of the room; else of its longer side first.

        Args:
            pairs: Queries and documents.
            truncation: Limit and what to do above it.
            instruction: What the prompt tells the model to look for; None takes the model's own.

        Raises:
            RequestTooLongError: A pair is above the limit and must not be cut.
            InvalidRequestError: The limit leaves no room beside the prompt, its instruction or special tokens, or the
                model's prompt has no place for an instruction.
        """
        self._pairs.check_instruction(instruction)
        num_chars = sum(len(first) + len(second) for first, second in pairs)
        return await self._jobs.run(lambda gone: self._pairs.encode(pairs, truncation, instruction, gone), num_chars)

    async def render_chats(self, conversations: Sequence[Conversation], options: ChatOptions) -> list[str]:
        """Returns the text that the model's chat template makes of each chat; see AsyncEngine.render_chats."""
        renderer = self._renderer()

        def work(gone: IsGone) -> list[str]:
            texts = []
            for conversation in conversations:
                if gone():
                    raise RequestCancelledError("The caller has gone.")
                texts.append(renderer.render(conversation, options))
            return texts

        return await self._jobs.run(work, LONG_JOB + 1)

    async def token_ids(
        self, texts: Sequence[str], *, add_special_tokens: bool, on_count: OnCount | None = None
    ) -> list[list[int]]:
        """Returns the ids of each text, uncut; see `token_details`."""
        return await self._jobs.run(
            lambda gone: [encoding.ids for encoding in self._uncut(texts, add_special_tokens, gone, on_count)],
            sum(map(len, texts)),
        )

    async def token_details(
        self, texts: Sequence[str], *, add_special_tokens: bool, on_count: OnCount | None = None
    ) -> list[TokenizedText]:
        """Returns the tokens of each text with their places in it, uncut.

        Args:
            texts: Texts.
            add_special_tokens: Put the tokenizer's special tokens around every text.
            on_count: Told of the tokens so far, in a worker thread, before much is made of them.
        """

        def work(gone: IsGone) -> list[TokenizedText]:
            return [
                TokenizedText(e.ids, e.tokens, e.offsets, [mask == 1 for mask in e.special_tokens_mask])
                for e in self._uncut(texts, add_special_tokens, gone, on_count)
            ]

        return await self._jobs.run(work, sum(map(len, texts)))

    async def decode(self, batches: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """Returns the text of each list of ids. Raises InvalidRequestError for an id outside the vocabulary."""

        def work(gone: IsGone) -> list[str]:
            texts: list[str] = []
            for first, last in portions([len(ids) for ids in batches], gone):
                checked = [self._tokenizer.checked(ids).tolist() for ids in batches[first:last]]
                # `decode` would hold the interpreter, for seconds where a list is long.
                texts += self._tokenizer.backend.decode_batch(checked, skip_special_tokens)
            return texts

        return await self._jobs.run(work, sum(map(len, batches)))

    def cuts_left(self, truncation: Truncation) -> bool:
        """Whether the left side of an over-long text is cut away."""
        return self._tokenizer.cuts_left(truncation)

    def close(self) -> None:
        """Ends the worker threads. What is still awaited fails with EngineUnavailableError."""
        self._jobs.close()

    def _renderer(self) -> ChatRenderer:
        """Returns what renders chats, made for the first. Raises InvalidRequestError without a template."""
        if self._chat_template is None:
            raise InvalidRequestError(
                "The served model has no chat template, so it takes no messages; send the text as input, or add the "
                "template to the model's folder as chat_template.jinja.",
                param="messages",
            )
        if self._chat_renderer is None:
            from .chat_renderer import ChatRenderer  # jinja2 takes its time, and few models need it

            self._chat_renderer = ChatRenderer(self._chat_template)
        return self._chat_renderer

    def _uncut(
        self, texts: Sequence[str], specials: bool, gone: IsGone, on_count: OnCount | None
    ) -> Iterator[Encoding]:
        """Encodes texts with all that is known of their tokens; for a worker thread."""
        num_tokens = 0
        for first, last in portions([len(text) for text in texts], gone):
            cased = self._tokenizer.cased(texts[first:last])
            if on_count is not None and len(cased[0]) > _PROBE_CHARS:
                self._probe(cased[0], num_tokens, on_count, gone)
            encodings = self._tokenizer.backend.encode_batch(cased, add_special_tokens=specials)
            num_tokens += sum(map(len, encodings))
            if on_count is not None:
                on_count(num_tokens)
            yield from encodings

    def _probe(self, text: str, num_tokens: int, on_count: OnCount, gone: IsGone) -> None:
        """Counts the tokens of a long text part by part: all at once they take a gigabyte where there are millions."""
        for start in range(0, len(text), _PROBE_CHARS):
            if gone():
                raise RequestCancelledError("The caller has gone.")
            part = text[start : start + _PROBE_CHARS]
            (encoding,) = self._tokenizer.backend.encode_batch_fast([part], add_special_tokens=False)
            num_tokens += max(len(encoding) - _SPARE_TOKENS, 0)
            on_count(num_tokens)
