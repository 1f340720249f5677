"""Text to token ids, off the event loop.

TokenizerPool runs in the client of the engine on the `tokenizers` library alone; which tokenizer to use was resolved in
the engine process (load_tokenizer.py) and arrives as a TokenizerSpec.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from tokenizers import Encoding, Tokenizer

from .errors import EngineUnavailableError, InvalidRequestError, RequestTooLongError
from .messages import TokenizerSpec
from .request import TokenizedInput

Text = str | Sequence[int]
T = TypeVar("T")
_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]

_MIN_SHARE = 8
"""Jobs. Fewer than this are not worth a second worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """What to do with an input of too many tokens.

    Attributes:
        max_num_tokens: Tokens. The limit, special tokens included.
        cut: Cut to the limit; False refuses.
        side: "left" or "right", the side that is cut away; None means the tokenizer's own.
        param: Request field that an error names.
    """

    max_num_tokens: int
    cut: bool = False
    side: str | None = None
    param: str | None = "input"


class TokenizerPool:
    """Tokenizes in worker threads. Safe to use from many tasks of one event loop.

    Args:
        spec: The tokenizer.
        vocab_size: Token ids given by callers must be below it.
        do_lower_case: Lower-case text first (a sentence-transformers option).
        num_workers: Threads.
    """

    def __init__(self, spec: TokenizerSpec, *, vocab_size: int, do_lower_case: bool, num_workers: int) -> None:
        self._tokenizer: Tokenizer = Tokenizer.from_str(spec.json)
        self._uses_token_types = spec.uses_token_types
        self._side = spec.truncation_side
        self._vocab_size = vocab_size
        self._do_lower_case = do_lower_case
        self._is_closed = False
        self._waiting: list[_Job] = []
        self._awaited: set[asyncio.Future[Any]] = set()
        self._num_workers = num_workers
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="tokenizer")

    async def encode(self, inputs: Sequence[Text], truncation: Truncation, *, prompt: str = "") -> list[TokenizedInput]:
        """Tokenizes texts with special tokens; token ids are checked and taken as they are.

        Args:
            inputs: Texts or lists of token ids.
            truncation: Limit and what to do above it.
            prompt: Put before every text.

        Raises:
            RequestTooLongError: An input is above the limit and must not be cut.
            InvalidRequestError: A list of ids is empty or holds an id outside the vocabulary.
        """
        return await self._run(lambda: self._encode(inputs, truncation, prompt))

    async def encode_pairs(self, pairs: Sequence[tuple[str, str]], truncation: Truncation) -> list[TokenizedInput]:
        """Tokenizes pairs into joint sequences; too long a pair loses tokens of its longer side first.

        Raises:
            RequestTooLongError: A pair is above the limit and must not be cut.
        """
        return await self._run(lambda: self._encode_pairs(pairs, truncation))

    async def count_prefix(self, prompt: str) -> int:
        """Returns how many leading tokens of a tokenized input belong to `prompt`, leading special tokens included."""
        return await self._run(lambda: self._count_prefix(prompt))

    async def token_ids(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Returns the ids of each text, uncut."""
        return await self._run(
            lambda: [
                e.ids for e in self._tokenizer.encode_batch(self._cased(texts), add_special_tokens=add_special_tokens)
            ]
        )

    async def decode(self, batches: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """Returns the text of each list of ids.

        Raises:
            InvalidRequestError: An id is outside the vocabulary.
        """
        return await self._run(
            lambda: [self._tokenizer.decode(self._checked(b).tolist(), skip_special_tokens) for b in batches]
        )

    def close(self) -> None:
        """Ends the worker threads. What is still awaited fails with EngineUnavailableError."""
        self._is_closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)
        for future in self._awaited:
            if not future.done():
                future.set_exception(EngineUnavailableError("The server is shutting down."))

    async def _run(self, work: Callable[[], T]) -> T:
        """Runs `work` in a worker thread, together with what else this turn of the event loop asks for.

        Going to a thread and back takes longer than to tokenize a short text, and requests that travel together can
        run as one batch.
        """
        if self._is_closed:
            raise EngineUnavailableError("The server is shutting down.")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._begin, loop)
        self._waiting.append((work, future))
        self._awaited.add(future)
        try:
            return await future
        finally:
            self._awaited.discard(future)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deals what waits out to the workers."""
        waiting, self._waiting = self._waiting, []
        if self._is_closed:
            return
        share = max(-(-len(waiting) // self._num_workers), _MIN_SHARE)
        for start in range(0, len(waiting), share):
            self._executor.submit(self._work, waiting[start : start + share], loop)

    @staticmethod
    def _work(jobs: list[_Job], loop: asyncio.AbstractEventLoop) -> None:
        """Runs jobs in a worker thread and hands all their results to the event loop at once."""
        done: list[tuple[asyncio.Future[Any], Any, BaseException | None]] = []
        for work, future in jobs:
            try:
                done.append((future, work(), None))
            except Exception as error:  # noqa: BLE001 - it is raised again where the job was asked for
                done.append((future, None, error))
        with contextlib.suppress(RuntimeError):  # the event loop has ended, and nobody waits
            loop.call_soon_threadsafe(_settle, done)

    def _cased(self, texts: Sequence[str]) -> list[str]:
        return [t.lower() for t in texts] if self._do_lower_case else list(texts)

    def _encode(self, inputs: Sequence[Text], truncation: Truncation, prompt: str) -> list[TokenizedInput]:
        texts = [(i, prompt + text) for i, text in enumerate(inputs) if isinstance(text, str)]
        encodings = iter(self._tokenizer.encode_batch_fast(self._cased([text for _, text in texts])))
        tokenized: list[TokenizedInput] = []
        for i, item in enumerate(inputs):
            if isinstance(item, str):
                encoding = next(encodings)
                if len(encoding) > truncation.max_num_tokens:
                    encoding = self._cut(prompt + item, encoding, truncation, i)
                tokenized.append(TokenizedInput(np.array(encoding.ids, np.int32)))
            else:
                tokenized.append(TokenizedInput(self._fit_ids(self._checked(item), truncation, i)))
        return tokenized

    def _cut(self, text: str, encoding: Encoding, truncation: Truncation, index: int) -> Encoding:
        """Cuts the text of an over-long encoding and puts the special tokens around what is left."""
        self._refuse_unless_cut(len(encoding), truncation, index)
        room = truncation.max_num_tokens - self._tokenizer.num_special_tokens_to_add(is_pair=False)
        bare = self._tokenizer.encode(self._cased([text])[0], add_special_tokens=False)
        bare.truncate(max(room, 0), direction=truncation.side or self._side)
        return self._tokenizer.post_process(bare)

    def _fit_ids(self, ids: np.ndarray, truncation: Truncation, index: int) -> np.ndarray:
        if len(ids) <= truncation.max_num_tokens:
            return ids
        self._refuse_unless_cut(len(ids), truncation, index)
        limit = truncation.max_num_tokens
        return ids[-limit:] if (truncation.side or self._side) == "left" else ids[:limit]

    def _encode_pairs(self, pairs: Sequence[tuple[str, str]], truncation: Truncation) -> list[TokenizedInput]:
        cased = list(zip(self._cased([a for a, _ in pairs]), self._cased([b for _, b in pairs]), strict=True))
        encodings = self._tokenizer.encode_batch_fast(cased)
        return [
            self._joined(pair, encoding, truncation, i)
            for i, (pair, encoding) in enumerate(zip(cased, encodings, strict=True))
        ]

    def _joined(self, pair: tuple[str, str], encoding: Encoding, truncation: Truncation, index: int) -> TokenizedInput:
        if len(encoding) > truncation.max_num_tokens:
            self._refuse_unless_cut(len(encoding), truncation, index)
            first, second = (self._tokenizer.encode(text, add_special_tokens=False) for text in pair)
            room = truncation.max_num_tokens - self._tokenizer.num_special_tokens_to_add(is_pair=True)
            keep_first, keep_second = _longest_first(len(first), len(second), max(room, 0))
            first.truncate(keep_first, direction=truncation.side or self._side)
            second.truncate(keep_second, direction=truncation.side or self._side)
            encoding = self._tokenizer.post_process(first, second)
        boundary = encoding.type_ids.index(1) if self._uses_token_types and 1 in encoding.type_ids else 0
        return TokenizedInput(np.array(encoding.ids, np.int32), boundary)

    def _count_prefix(self, prompt: str) -> int:
        with_specials = self._tokenizer.encode(self._cased([prompt])[0])
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
    def _refuse_unless_cut(num_tokens: int, truncation: Truncation, index: int) -> None:
        if truncation.cut:
            return
        limit = truncation.max_num_tokens
        raise RequestTooLongError(
            f"This model's maximum context length is {limit} tokens, but input {index} has {num_tokens} tokens. "
            "Please reduce the length of the input prompt, or set truncate_prompt_tokens to -1 to cut it.",
            num_tokens=num_tokens,
            max_num_tokens=limit,
            param=truncation.param,
        )


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
