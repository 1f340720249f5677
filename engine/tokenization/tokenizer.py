"""Tokenizes short texts in the event loop, others in threads.

TokenizerPool runs in the server process and needs only the `tokenizers` library. The engine process resolves the
tokenizer (tokenizer_loader.py) and sends it as a TokenizerSpec. TokenizerJobs runs the work: a few short texts in the
event loop, because waking a thread would take longer. It submits all jobs of one iteration of the event loop together.
A SharedResource limits the characters of waiting and running jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from ..daemon_threads import DaemonThreadPool
from ..protocol.errors import (
    EngineError,
    EngineOverloadedError,
    EngineUnavailableError,
    InvalidRequestError,
    RejectionReason,
    drop_tracebacks,
    shutting_down,
)
from ..protocol.messages import TokenizedInput
from ..protocol.model_info import TokenizerSpec
from ..protocol.params import CLIENT, Text
from ..protocol.results import TokenizedText
from ..protocol.shared_resource import SharedResource
from ..protocol.stage_times import STAGE_TIMES, Stage
from ..protocol.templates import ChatOptions, Conversation
from .model_tokenizer import IsCancelled, ModelTokenizer, SpecialTokens, Truncation, check_cancelled, portions
from .pairs import PairEncoder

if TYPE_CHECKING:
    from .chat_renderer import ChatRenderer

T = TypeVar("T")

_PROBE_CHARS: Final = 250_000
"""Characters in a part of a long text; the tokens of the parts are counted before the text is tokenized."""
_SPARE_TOKENS: Final = 64
"""Tokens that a part may have in addition because it begins or ends within a word."""
OnCount = Callable[[int], None]
"""Receives the number of tokens so far; an error that it raises stops the job."""
LONG_JOB: Final = 20_000
"""Characters. Longer jobs have threads of their own, so that short jobs do not wait for them."""
_INLINE_CHARS: Final = 2_000
"""Characters to tokenize per iteration of the event loop without a thread, in at most 0.5 ms."""
_TEXT_COST_CHARS: Final = 50
"""Cost of a text in addition to its characters."""
_MIN_JOBS_PER_THREAD: Final = 8
"""Jobs. Fewer than this are not split between threads."""
_Result = tuple[asyncio.Future[Any], Any, BaseException | None]
_MIN_CHATS_CHARS: Final = LONG_JOB + 1
"""Rendering chats counts as at least this many characters, so that it gets its own thread: a template may be slow."""
MAX_RENDERED_CHARS: Final = 64_000_000
"""Characters of all rendered chats of a request, or of the text that it puts before all its texts. A template may add
every argument of the request to each chat."""
_OLD_RATE_WEIGHT: Final = 0.8
"""Share of the old value in the running mean of the drain rate."""
_MIN_MEASURED_CHARS: Final = 100_000
"""Minimum of waiting and running characters for a measurement of the drain rate."""


class TokenizerPool:
    """Tokenizes for the tasks of one event loop: short texts in the loop, others in threads.

    Every method raises EngineOverloadedError if too much text waits, and EngineUnavailableError after `close`.

    Attributes:
        special_tokens: Tokens that the tokenizer adds around a text; None if it also changes texts in other ways.
        multi_vector_tokens: Special tokens of a multi-vector model.
        query_tokenizer: The tokenizer of ModelInfo.query_model; None if queries have no other model than documents.
        end_id, padding, input_prompts, config: As in `spec`.

    Args:
        spec: The tokenizer of the model.
        vocab_size: Size of the vocabulary, for the check of token ids from callers.
        do_lower_case: Whether to lower-case texts (an option of sentence-transformers).
        max_chars: Limit of the characters of waiting and running jobs.
        on_rejection: Called for every rejected request.
    """

    def __init__(
        self,
        spec: TokenizerSpec,
        *,
        vocab_size: int,
        do_lower_case: bool,
        num_threads: int,
        max_chars: int = sys.maxsize,
        on_rejection: Callable[[], None] = lambda: None,
        query_tokenizer: TokenizerPool | None = None,
    ) -> None:
        self.query_tokenizer = query_tokenizer
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
        self.input_prompts = spec.input_prompts
        self.config = spec.config
        self._pairs = PairEncoder(self._tokenizer, spec.score_template, uses_token_types=spec.uses_token_types)
        self._chat_template = spec.chat_template
        self._chat_renderer: ChatRenderer | None = None
        self._jobs = TokenizerJobs(num_threads, max_chars, on_rejection)

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
            InvalidRequestError: A list of ids is empty, an id is outside the vocabulary, the maximum is too small for
                the special tokens and the prompt, or the prompt is too long for so many texts.
        """
        texts = [item for item in inputs if isinstance(item, str)]
        if prompt:
            _check_repeated(min(len(prompt), truncation.max_chars) * len(texts), len(texts), truncation)
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
        num_chars = len(prompt) + sum(len(item) for item in inputs if isinstance(item, str))
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
            InvalidRequestError: The maximum is too small for the prompt, its instruction and the special tokens, the
                prompt of the model does not support an instruction, or instruction and query are too long for so many
                pairs.
        """
        self._pairs.check_instruction(instruction)
        num_repeats = len(pairs) - len({query for query, _ in pairs})
        num_query_chars = min(max((len(query) for query, _ in pairs), default=0), truncation.max_chars)
        num_instruction_chars = min(len(instruction or ""), truncation.max_chars)
        num_repeated = num_repeats * num_query_chars + len(pairs) * num_instruction_chars
        _check_repeated(num_repeated, len(pairs), truncation)
        num_chars = sum(len(first) + len(second) for first, second in pairs) + len(instruction or "") * len(pairs)
        return await self._jobs.run(
            lambda is_cancelled: self._pairs.encode(pairs, truncation, instruction, is_cancelled), num_chars
        )

    async def render_chats(self, conversations: Sequence[Conversation], options: ChatOptions) -> list[str]:
        """Renders each chat with the chat template of the model; see AsyncEngine.render_chats."""
        renderer = self._renderer()

        def work(is_cancelled: IsCancelled) -> list[str]:
            texts: list[str] = []
            num_rendered = 0
            for conversation in conversations:
                check_cancelled(is_cancelled)
                texts.append(renderer.render(conversation, options))
                num_rendered += len(texts[-1])
                if num_rendered > MAX_RENDERED_CHARS:
                    raise InvalidRequestError(
                        f"The first {len(texts)} of {len(conversations)} chats have {num_rendered} characters with the "
                        f"model's chat template; the limit is {MAX_RENDERED_CHARS}. Send fewer chats at once.",
                        param="messages",
                    )
            return texts

        num_chars = _count_chars(conversations) + _count_chars([options.arguments]) * len(conversations)
        return await self._jobs.run(work, max(num_chars, _MIN_CHATS_CHARS))

    async def token_ids(
        self, texts: Sequence[str], *, add_special_tokens: bool, on_count: OnCount | None = None
    ) -> list[list[int]]:
        """Returns the ids of each text, not truncated; see `token_details`."""
        return await self._jobs.run(
            lambda is_cancelled: [
                encoding.ids for encoding in self._encode_untruncated(texts, add_special_tokens, is_cancelled, on_count)
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
            on_count: Called in a thread with the number of tokens so far, before the result is built.
        """

        def work(is_cancelled: IsCancelled) -> list[TokenizedText]:
            return [
                TokenizedText(e.ids, e.tokens, e.offsets, [mask == 1 for mask in e.special_tokens_mask])
                for e in self._encode_untruncated(texts, add_special_tokens, is_cancelled, on_count)
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
        """Ends the threads; waiting jobs raise EngineUnavailableError."""
        self._jobs.close()
        if self.query_tokenizer is not None:
            self.query_tokenizer.close()

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

    def _encode_untruncated(
        self, texts: Sequence[str], specials: bool, is_cancelled: IsCancelled, on_count: OnCount | None
    ) -> Iterator[Encoding]:
        """Encodes texts without truncation, in a thread."""
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


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    work: Callable[[IsCancelled], Any]
    future: asyncio.Future[Any]
    num_chars: int


class TokenizerJobs:
    """Runs jobs in threads. Safe to use from many tasks of one event loop.

    Args:
        max_chars: Limit of the characters of waiting and running jobs.
        on_rejection: Called for every rejected request.

    Attributes:
        chars: Characters of waiting and running jobs.
    """

    def __init__(
        self, num_threads: int, max_chars: int = sys.maxsize, on_rejection: Callable[[], None] = lambda: None
    ) -> None:
        reason = RejectionReason.QUEUED_CHARACTERS
        flag = "--max-queued-chars"
        self.chars = SharedResource(max_chars, "the tokenizer's queue", "characters", flag, full=reason, share=reason)
        self._on_rejection = on_rejection
        self._chars_per_s = 0.0  # 0: not measured yet
        self._num_threads = num_threads
        self._threads = DaemonThreadPool(num_threads, "tokenizer")
        self._long_threads = DaemonThreadPool(num_threads, "tokenizer-long")
        self._num_chars = [0, 0]  # of waiting and running short jobs, and of long ones
        self._is_closed = False
        self._inline_budget = _INLINE_CHARS  # of this iteration of the event loop
        self._waiting: list[_Job] = []
        self._awaited: set[asyncio.Future[Any]] = set()

    async def run(self, work: Callable[[IsCancelled], T], num_chars: int, *, num_texts: int | None = None) -> T:
        """Runs `work` in the event loop if it is short, otherwise in a thread.

        Jobs of one iteration of the event loop are submitted together, so that their requests can run as one batch.
        Raises the errors of `work`, EngineOverloadedError if its characters do not fit into the queue, and
        EngineUnavailableError after `close`.

        Args:
            work: The job. Its argument returns whether the caller has disconnected.
            num_chars: Characters to tokenize.
            num_texts: Number of texts if the job only tokenizes texts. Only such a job may run in the event loop.
        """
        if self._is_closed:
            raise shutting_down()
        client = CLIENT.get()
        if (rejection := self.chars.rejection(client, num_chars)) is not None:
            self._on_rejection()
            raise EngineOverloadedError(
                f"{rejection.message} Please try again later.",
                retry_after_s=rejection.excess / self._chars_per_s if self._chars_per_s else 1.0,
                reason=rejection.reason,
            )
        began_s = time.perf_counter()
        try:
            if num_texts is not None and self._take_inline_budget(num_chars + _TEXT_COST_CHARS * num_texts):
                try:
                    return work(_never_cancelled)
                except (Exception, KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # noqa: BLE001 - a panic in the tokenizers library
                    raise _failure(error) from None
            is_long = num_chars > LONG_JOB
            self.chars.add(client, num_chars)
            self._num_chars[is_long] += num_chars
            num_waiting = self._num_chars[is_long]
            try:
                result = await self._run_in_thread(work, num_chars)
                self._measure(num_waiting, time.perf_counter() - began_s)
            finally:
                self.chars.add(client, -num_chars)
                self._num_chars[is_long] -= num_chars
            return result
        finally:
            if (times := STAGE_TIMES.get()) is not None:
                times.last_s = time.perf_counter()
                times.add(Stage.TOKENIZATION, began_s, times.last_s - began_s)

    def close(self) -> None:
        """Ends the threads. Pending jobs fail with EngineUnavailableError."""
        self._is_closed = True
        self._threads.close()
        self._long_threads.close()
        for future in self._awaited:
            if not future.done():
                future.set_exception(shutting_down())

    def _measure(self, num_chars: int, seconds: float) -> None:
        """Updates the drain rate with the characters before the end of a job, its own included, and its total time."""
        if num_chars >= _MIN_MEASURED_CHARS:
            rate = num_chars / max(seconds, 1e-6)
            old_rate = self._chars_per_s or rate
            self._chars_per_s = _OLD_RATE_WEIGHT * old_rate + (1 - _OLD_RATE_WEIGHT) * rate

    def _take_inline_budget(self, cost: int) -> bool:
        """Spends `cost` of the budget of this iteration of the event loop. Returns False if too little is left."""
        if cost > self._inline_budget:
            return False
        if self._inline_budget == _INLINE_CHARS:
            asyncio.get_running_loop().call_soon(self._reset_inline_budget)
        self._inline_budget -= cost
        return True

    def _reset_inline_budget(self) -> None:
        self._inline_budget = _INLINE_CHARS

    async def _run_in_thread(self, work: Callable[[IsCancelled], T], num_chars: int) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._begin, loop)
        self._waiting.append(_Job(work, future, num_chars))
        self._awaited.add(future)
        try:
            return await future
        finally:
            self._awaited.discard(future)
            del future  # the traceback of its error refers to this frame

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        waiting = self._waiting
        self._waiting = []
        if self._is_closed:
            return
        short = [job for job in waiting if job.num_chars <= LONG_JOB]
        share = max(-(-len(short) // self._num_threads), _MIN_JOBS_PER_THREAD)
        for start in range(0, len(short), share):
            self._submit(short[start : start + share], loop)
        for job in waiting:
            if job.num_chars > LONG_JOB:
                self._submit([job], loop)

    def _submit(self, jobs: list[_Job], loop: asyncio.AbstractEventLoop) -> None:
        threads = self._long_threads if jobs[0].num_chars > LONG_JOB else self._threads
        try:
            threads.submit(partial(self._work, jobs, loop))
        except EngineUnavailableError as error:  # no thread can be started
            _settle([(job.future, None, error) for job in jobs])

    @staticmethod
    def _work(jobs: list[_Job], loop: asyncio.AbstractEventLoop) -> None:
        """Runs jobs in a thread and passes all their results to the event loop together."""
        done = _results(jobs)
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(_settle, done)


def _results(jobs: Sequence[_Job]) -> list[_Result]:
    done: list[_Result] = []
    for job in jobs:
        if job.future.done():
            continue
        try:
            done.append((job.future, job.work(job.future.done), None))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - raised again by `run`; or a panic in the tokenizers library
            if not isinstance(error, Exception):
                error = _failure(error)
            elif not isinstance(error, EngineError):
                error.add_note("In a tokenizer thread:\n" + "".join(traceback.format_tb(error.__traceback__)))
            drop_tracebacks(error)  # the frames of this thread refer to the text and to the error's future
            done.append((job.future, None, error))
    return done


def _count_chars(values: Sequence[object]) -> int:
    """Counts the characters of texts in lists and objects of JSON."""
    num_chars = 0
    left = list(values)
    while left:
        value = left.pop()
        if isinstance(value, str):
            num_chars += len(value)
        elif isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
    return num_chars


def _check_repeated(num_chars: int, num_texts: int, truncation: Truncation) -> None:
    """Raises InvalidRequestError if the text that a request adds to its texts would take minutes to tokenize."""
    if num_chars > MAX_RENDERED_CHARS:
        raise InvalidRequestError(
            f"The prompt, instruction or query is put before each of {num_texts} texts, which adds {num_chars} "
            f"characters; the limit is {MAX_RENDERED_CHARS}. Send fewer inputs at once.",
            param=truncation.param,
        )


def _failure(error: BaseException) -> RuntimeError:
    """Returns the error for a panic in the tokenizers library without its message, which may contain the input."""
    return RuntimeError(f"the tokenizer failed: {type(error).__name__}")


def _never_cancelled() -> bool:
    return False


def _settle(done: Sequence[_Result]) -> None:
    """Sets the results of futures, on their event loop. Cancelled futures are skipped."""
    for future, result, error in done:
        if future.done():
            continue
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
