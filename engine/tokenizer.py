"""Text to token ids, off the event loop.

TokenizerPool runs in the client of the engine on the `tokenizers` library alone; which tokenizer to use was resolved in
the engine process (load_tokenizer.py) and arrives as a TokenizerSpec.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from .char_admission import CharAdmission
from .chat_template import ChatOptions, Conversation
from .errors import EngineUnavailableError, InvalidRequestError, RequestCancelledError, RequestTooLongError
from .length_limit import worded_limit
from .messages import TokenizerSpec
from .pair_encoder import PairEncoder
from .request import TokenizedInput
from .results import TokenizedText
from .special_tokens import SpecialTokens
from .stage_times import STAGE_TIMES, Stage

if TYPE_CHECKING:
    from .chat_renderer import ChatRenderer

Text = str | Sequence[int]
T = TypeVar("T")
IsGone = Callable[[], bool]

_MIN_SHARE: Final = 8
"""Jobs. Fewer than this are not worth a second worker."""
_LONG_JOB: Final = 20_000
"""Characters. A job of more goes to a worker alone, so that short ones do not wait for it."""
_MAX_CHARS_PER_CALL: Final = 250_000
"""Characters that are tokenized before anybody looks whether the caller is still there."""
_CHARS_PER_TOKEN: Final = 64
_MIN_CHARS: Final = 65_536


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """Work for a worker thread. `work` asks the function that it is given whether to go on."""

    work: Callable[[IsGone], Any]
    future: asyncio.Future[Any]
    num_chars: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """What to do with an input of too many tokens.

    Attributes:
        max_num_tokens: Tokens. The limit, special tokens included.
        cut: Cut to the limit; False refuses.
        side: "left" or "right", the side that is cut away; None means the tokenizer's own.
        param: Request field that an error names.
        name: What is behind the limit, where it is not the model's own; see length_limit.py.
    """

    max_num_tokens: int
    cut: bool = False
    side: str | None = None
    param: str | None = "input"
    name: str | None = None


class TokenizerPool:
    """Tokenizes in worker threads. Safe to use from many tasks of one event loop.

    Attributes:
        special_tokens: What the tokenizer puts around a text; None where it does more to it than that.
        marks: The tokens of a multi-vector model's recipe.

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
        self._tokenizer: Tokenizer = Tokenizer.from_str(spec.json)
        self.special_tokens = SpecialTokens.of(self._tokenizer)
        self.marks = spec.marks
        template = spec.score_template
        self._pair_encoder = PairEncoder(self._tokenizer, template) if template is not None else None
        self._chat_template = spec.chat_template
        self._chat_renderer: ChatRenderer | None = None
        self._uses_token_types = spec.uses_token_types
        self._side = spec.truncation_side
        self._vocab_size = vocab_size
        self._do_lower_case = do_lower_case
        self._is_closed = False
        self._waiting: list[_Job] = []
        self._awaited: set[asyncio.Future[Any]] = set()
        self._num_workers = num_workers
        self._admission = admission or CharAdmission(sys.maxsize)
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="tokenizer")

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
        num_chars = sum(len(item) + len(prompt) for item in inputs if isinstance(item, str))
        return await self._run(
            lambda gone: self._encode(inputs, truncation, prompt, skip_prompt, add_special_tokens, gone), num_chars
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
        return await self._run(lambda gone: self._encode_parts(inputs, truncation, prompt, gone), num_chars)

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
        num_chars = sum(len(first) + len(second) for first, second in pairs)
        encoder = self._pair_encoder
        if instruction and (encoder is None or not encoder.template.takes_instruction):
            raise InvalidRequestError("The served model reads pairs without an instruction.", param="instruction")
        if encoder is not None:
            return await self._run(
                lambda gone: self._encode_by_template(encoder, pairs, truncation, instruction, gone), num_chars
            )
        return await self._run(lambda gone: self._encode_pairs(pairs, truncation, gone), num_chars)

    async def render_chats(self, conversations: Sequence[Conversation], options: ChatOptions) -> list[str]:
        """Returns the text that the model's chat template makes of each chat.

        Raises:
            InvalidRequestError: The model has no chat template, or it does not take the messages.
        """
        if self._chat_template is None:
            raise InvalidRequestError(
                "The served model has no chat template, so it takes no messages; send the text as input, or add the "
                "template to the model's folder as chat_template.jinja.",
                param="messages",
            )
        if self._chat_renderer is None:
            from .chat_renderer import ChatRenderer  # jinja2 takes its time, and few models need it

            self._chat_renderer = ChatRenderer(self._chat_template)
        renderer = self._chat_renderer

        def work(gone: IsGone) -> list[str]:
            texts = []
            for conversation in conversations:
                if gone():
                    raise RequestCancelledError("The caller has gone.")
                texts.append(renderer.render(conversation, options))
            return texts

        return await self._run(work, _LONG_JOB + 1)

    async def token_ids(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Returns the ids of each text, uncut."""

        def work(gone: IsGone) -> list[list[int]]:
            ids = []
            for first, last in self._portions([len(text) for text in texts], gone):
                cased = self._cased(texts[first:last])
                ids += [e.ids for e in self._tokenizer.encode_batch(cased, add_special_tokens=add_special_tokens)]
            return ids

        return await self._run(work, sum(map(len, texts)))

    async def token_details(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[TokenizedText]:
        """Returns the tokens of each text with their places in it, uncut."""

        def work(gone: IsGone) -> list[TokenizedText]:
            details = []
            for first, last in self._portions([len(text) for text in texts], gone):
                cased = self._cased(texts[first:last])
                for e in self._tokenizer.encode_batch(cased, add_special_tokens=add_special_tokens):
                    is_special = [mask == 1 for mask in e.special_tokens_mask]
                    details.append(TokenizedText(e.ids, e.tokens, e.offsets, is_special))
            return details

        return await self._run(work, sum(map(len, texts)))

    async def decode(self, batches: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """Returns the text of each list of ids.

        Raises:
            InvalidRequestError: An id is outside the vocabulary.
        """
        return await self._run(
            lambda _: [self._tokenizer.decode(self._checked(b).tolist(), skip_special_tokens) for b in batches],
            sum(map(len, batches)),
        )

    def cuts_left(self, truncation: Truncation) -> bool:
        """Whether the left side of an over-long text is cut away."""
        return (truncation.side or self._side) == "left"

    def close(self) -> None:
        """Ends the worker threads. What is still awaited fails with EngineUnavailableError."""
        self._is_closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)
        for future in self._awaited:
            if not future.done():
                future.set_exception(EngineUnavailableError("The server is shutting down."))

    async def _run(self, work: Callable[[IsGone], T], num_chars: int) -> T:
        """Runs `work` in a worker thread, together with what else this turn of the event loop asks for.

        Going to a thread and back takes longer than to tokenize a short text, and requests that travel together can
        run as one batch.

        Raises:
            EngineOverloadedError: Too much text waits already.
        """
        if self._is_closed:
            raise EngineUnavailableError("The server is shutting down.")
        with self._admission.hold(num_chars):
            return await self._run_admitted(work, num_chars)

    async def _run_admitted(self, work: Callable[[IsGone], T], num_chars: int) -> T:
        began_s = time.perf_counter()
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
            if (times := STAGE_TIMES.get()) is not None:
                times.last_s = time.perf_counter()
                times.add(Stage.TOKENIZATION, began_s, times.last_s - began_s)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deals what waits out to the workers."""
        waiting, self._waiting = self._waiting, []
        if self._is_closed:
            return
        short = [job for job in waiting if job.num_chars <= _LONG_JOB]
        share = max(-(-len(short) // self._num_workers), _MIN_SHARE)
        for start in range(0, len(short), share):
            self._executor.submit(self._work, short[start : start + share], loop)
        for job in waiting:
            if job.num_chars > _LONG_JOB:
                self._executor.submit(self._work, [job], loop)

    @staticmethod
    def _work(jobs: list[_Job], loop: asyncio.AbstractEventLoop) -> None:
        """Runs jobs in a worker thread and hands all their results to the event loop at once."""
        done: list[tuple[asyncio.Future[Any], Any, BaseException | None]] = []
        for job in jobs:
            if job.future.done():
                continue
            try:
                done.append((job.future, job.work(job.future.done), None))
            except Exception as error:  # noqa: BLE001 - it is raised again where the job was asked for
                done.append((job.future, None, error))
            except BaseException as error:  # noqa: BLE001 - a panic in the tokenizers library; its text may hold the input
                done.append((job.future, None, RuntimeError(f"the tokenizer failed: {type(error).__name__}")))
        with contextlib.suppress(RuntimeError):  # the event loop has ended, and nobody waits
            loop.call_soon_threadsafe(_settle, done)

    @staticmethod
    def _portions(num_chars: Sequence[int], gone: IsGone) -> Iterator[tuple[int, int]]:
        """Cuts a list of texts into runs of bounded size.

        Raises:
            RequestCancelledError: The caller has gone.
        """
        first = total = 0
        for last, count in enumerate(num_chars):
            if total and total + count > _MAX_CHARS_PER_CALL:
                yield first, last
                first, total = last, 0
                if gone():
                    raise RequestCancelledError("The caller has gone.")
            total += count
        yield first, len(num_chars)

    def _cased(self, texts: Sequence[str]) -> list[str]:
        return [t.lower() for t in texts] if self._do_lower_case else list(texts)

    def _encode(
        self,
        inputs: Sequence[Text],
        truncation: Truncation,
        prompt: str,
        skip_prompt: bool,
        specials: bool,
        gone: IsGone,
    ) -> list[TokenizedInput]:
        skip = self._count_prefix(prompt, specials) if prompt and skip_prompt else 0
        tokenized: list[TokenizedInput] = []
        num_chars = [min(len(i), self._max_chars(truncation)) if isinstance(i, str) else 0 for i in inputs]
        for first, last in self._portions(num_chars, gone):
            part = inputs[first:last]
            texts = self._cased([prompt + item for item in part if isinstance(item, str)])
            bounded = [self._bounded(text, truncation) for text in texts]
            encoded = self._tokenizer.encode_batch_fast(bounded, add_special_tokens=specials)
            encodings = iter(zip(texts, bounded, encoded, strict=True))
            for index, item in enumerate(part, first):
                if isinstance(item, str):
                    tokenized.append(self._fit_text(*next(encodings), truncation, skip, specials, index))
                else:
                    tokenized.append(TokenizedInput(self._fit_ids(self._checked(item), truncation, index)))
        return tokenized

    def _encode_parts(
        self, inputs: Sequence[Text], truncation: Truncation, prompt: str, gone: IsGone
    ) -> tuple[list[NDArray[np.int32]], bool]:
        texts = self._cased([prompt * (i == 0) + item for i, item in enumerate(inputs) if isinstance(item, str)])
        bounded = [self._bounded(text, truncation) for text in texts]
        encodings: list[Encoding] = []
        is_whole = True
        for first, last in self._portions([len(text) for text in bounded], gone):
            encoded = self._tokenizer.encode_batch_fast(bounded[first:last], add_special_tokens=False)
            for i, encoding in enumerate(encoded, first):
                if bounded[i] is not texts[i]:
                    if len(encoding) <= truncation.max_num_tokens + _MIN_SHARE:
                        (encoding,) = self._tokenizer.encode_batch_fast([texts[i]], add_special_tokens=False)
                    else:
                        is_whole = False
                encodings.append(encoding)
        of_texts = iter(encodings)
        parts = [self._known(next(of_texts).ids) if isinstance(i, str) else self._checked(i) for i in inputs]
        return parts, is_whole

    def _max_chars(self, truncation: Truncation) -> int:
        """Characters of a text that can matter: a token longer than this on average is not met in real text."""
        return max(_CHARS_PER_TOKEN * truncation.max_num_tokens, _MIN_CHARS)

    def _bounded(self, text: str, truncation: Truncation) -> str:
        """Returns the end of an enormous text that the limit can keep, cut between words; other texts as they are."""
        limit = self._max_chars(truncation)
        if len(text) <= limit:
            return text
        if self.cuts_left(truncation):
            space = text.find(" ", len(text) - limit)
            return text[space:] if space >= 0 else text
        space = text.rfind(" ", 0, limit)
        return text[:space] if space >= 0 else text

    def _fit_text(
        self,
        text: str,
        bounded: str,
        encoding: Encoding,
        truncation: Truncation,
        skip: int,
        specials: bool,
        index: int,
    ) -> TokenizedInput:
        """Cuts an encoding to the limit and puts the special tokens, where there are to be any, around the rest."""
        limit = truncation.max_num_tokens
        if bounded is not text and len(encoding) <= limit + _MIN_SHARE:
            # Words of thousands of letters: the whole text must say what fits.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=specials)
            bounded = text
        if len(encoding) <= limit:
            return TokenizedInput(self._known(encoding.ids), num_prompt_tokens=max(min(skip, len(encoding) - 1), 0))
        self._refuse_unless_cut(len(encoding), truncation, index, is_whole=bounded is text)
        room = self._room(truncation, is_pair=False) if specials else truncation.max_num_tokens
        (bare,) = self._tokenizer.encode_batch([bounded], add_special_tokens=False)
        num_cut = len(bare) - room
        bare.truncate(room, direction=truncation.side or self._side)
        ids = self._tokenizer.post_process(bare).ids if specials else bare.ids
        if skip and self.cuts_left(truncation):
            skip = max(skip - num_cut, 0) if bounded is text else 0
        return TokenizedInput(self._known(ids), num_prompt_tokens=min(skip, len(ids) - 1))

    def _room(self, truncation: Truncation, *, is_pair: bool) -> int:
        """Tokens that are left for text.

        Raises:
            InvalidRequestError: Not even the special tokens fit.
        """
        num_special = self._tokenizer.num_special_tokens_to_add(is_pair=is_pair)
        if truncation.max_num_tokens < num_special:
            raise _no_room(truncation.max_num_tokens, f"the model's special tokens alone are {num_special}")
        return truncation.max_num_tokens - num_special

    def _known(self, ids: list[int]) -> np.ndarray:
        """Returns the ids of a text as an array.

        Raises:
            InvalidRequestError: The tokenizer knows a token that the model has no embedding for.
        """
        array = np.array(ids, np.int32)
        if array.size and array.max() >= self._vocab_size:
            token = self._tokenizer.id_to_token(int(array.max()))
            raise InvalidRequestError(
                f"The text holds {token!r}, which the model's tokenizer knows as id {array.max()}, "
                f"but the model has embeddings for the ids 0 to {self._vocab_size - 1} only.",
                param="input",
            )
        return array

    def _fit_ids(self, ids: np.ndarray, truncation: Truncation, index: int) -> np.ndarray:
        if len(ids) <= truncation.max_num_tokens:
            return ids
        self._refuse_unless_cut(len(ids), truncation, index)
        limit = truncation.max_num_tokens
        return ids[-limit:] if self.cuts_left(truncation) else ids[:limit]

    def _encode_by_template(
        self,
        encoder: PairEncoder,
        pairs: Sequence[tuple[str, str]],
        truncation: Truncation,
        instruction: str | None,
        gone: IsGone,
    ) -> list[TokenizedInput]:
        tokenized: list[TokenizedInput] = []
        cased = self._bounded_pairs(pairs, truncation)
        limit, left = truncation.max_num_tokens, self.cuts_left(truncation)
        for first, last in self._portions([len(a) + len(b) for a, b in cased], gone):
            encoded = encoder.encode(cased[first:last], instruction)
            for index, ids in enumerate(encoded, first):
                if len(ids) > limit:
                    self._refuse_unless_cut(len(ids), truncation, index)
                    cut = encoder.cut(cased[index], instruction, limit, left=left)
                    if cut is None:
                        raise _no_room_for_pair(encoder, instruction, limit)
                    ids = cut
                tokenized.append(TokenizedInput(self._known(ids)))
        return tokenized

    def _bounded_pairs(self, pairs: Sequence[tuple[str, str]], truncation: Truncation) -> list[tuple[str, str]]:
        """Returns pairs as they are tokenized; where cutting is allowed, without what the limit cannot keep."""
        firsts, seconds = self._cased([a for a, _ in pairs]), self._cased([b for _, b in pairs])
        if truncation.cut:
            # The limit keeps at most its own length of either text; where a pair fits whole, nothing is cut here.
            firsts = [self._bounded(text, truncation) for text in firsts]
            seconds = [self._bounded(text, truncation) for text in seconds]
        return list(zip(firsts, seconds, strict=True))

    def _encode_pairs(
        self, pairs: Sequence[tuple[str, str]], truncation: Truncation, gone: IsGone
    ) -> list[TokenizedInput]:
        tokenized: list[TokenizedInput] = []
        cased = self._bounded_pairs(pairs, truncation)
        for first, last in self._portions([len(a) + len(b) for a, b in cased], gone):
            encodings = self._tokenizer.encode_batch_fast(cased[first:last])
            tokenized += [
                self._joined(pair, encoding, truncation, index)
                for index, (pair, encoding) in enumerate(zip(cased[first:last], encodings, strict=True), first)
            ]
        return tokenized

    def _joined(self, pair: tuple[str, str], encoding: Encoding, truncation: Truncation, index: int) -> TokenizedInput:
        if len(encoding) > truncation.max_num_tokens:
            self._refuse_unless_cut(len(encoding), truncation, index)
            first, second = self._tokenizer.encode_batch(list(pair), add_special_tokens=False)
            keep_first, keep_second = _longest_first(len(first), len(second), self._room(truncation, is_pair=True))
            first.truncate(keep_first, direction=truncation.side or self._side)
            second.truncate(keep_second, direction=truncation.side or self._side)
            encoding = self._tokenizer.post_process(first, second)
        boundary = encoding.type_ids.index(1) if self._uses_token_types and 1 in encoding.type_ids else 0
        return TokenizedInput(self._known(encoding.ids), boundary)

    def _count_prefix(self, prompt: str, specials: bool) -> int:
        (with_specials,) = self._tokenizer.encode_batch(self._cased([prompt]), add_special_tokens=specials)
        trailing = 0
        for is_special in reversed(with_specials.special_tokens_mask):
            if not is_special:
                break
            trailing += 1
        return len(with_specials) - trailing

    def _checked(self, ids: Sequence[int]) -> np.ndarray:
        if not ids:
            raise InvalidRequestError("a list of token ids is empty; give at least one id.", param="input")
        for i in (min(ids), max(ids)):
            if not 0 <= i < self._vocab_size:
                raise InvalidRequestError(
                    f"token id {i} is out of vocabulary; the model has the ids 0 to {self._vocab_size - 1}. "
                    "Ids must come from the served model's own tokenizer; send text if yours come from another.",
                    param="input",
                )
        return np.array(ids, np.int32)

    @staticmethod
    def _refuse_unless_cut(num_tokens: int, truncation: Truncation, index: int, *, is_whole: bool = True) -> None:
        if truncation.cut:
            return
        limit, at_least = truncation.max_num_tokens, "" if is_whole else "at least "
        raise RequestTooLongError(
            f"{worded_limit(limit, truncation.name)}, but input {index} has {at_least}{num_tokens} tokens. "
            "Please reduce the length of the input prompt, or set truncate_prompt_tokens to -1 to cut it.",
            num_tokens=num_tokens,
            max_num_tokens=limit,
            param=truncation.param,
        )


def _no_room(limit: int, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"The limit is {limit} tokens, but {why}; allow more with truncate_prompt_tokens or --max-model-len.",
        param="truncate_prompt_tokens",
    )


def _no_room_for_pair(encoder: PairEncoder, instruction: str | None, limit: int) -> InvalidRequestError:
    """Returns the error for a prompt that leaves no room for a token of the query and one of the document."""
    if instruction and encoder.cut(("a", "a"), None, limit, left=False) is not None:
        return InvalidRequestError(
            f"The instruction leaves no room for a query and a document: all three and the prompt around them may have "
            f"{limit} tokens together. Please shorten it.",
            param="instruction",
        )
    return _no_room(limit, "the prompt around a query and a document leaves them no room")


def _settle(done: list[tuple[asyncio.Future[Any], Any, BaseException | None]]) -> None:
    """Fills futures on their event loop; those whose caller has gone are left alone."""
    for future, result, error in done:
        if future.done():
            continue
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


def _longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Splits `room` tokens over two texts by taking tokens away from the longer one first, as transformers does."""
    half = room // 2
    if first <= half:
        return first, min(second, room - first)
    if second <= half:
        return min(first, room - second), second
    return (room - half, half) if first > second else (half, room - half)
