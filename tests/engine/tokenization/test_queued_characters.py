"""Text that waits for tokenization is bounded: whole requests are refused, and everything is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from penstock.engine.protocol.errors import EngineOverloadedError, InvalidRequestError, RefusalReason
from penstock.engine.protocol.model_info import TokenizerSpec
from penstock.engine.protocol.request import CLIENT
from penstock.engine.tokenization import jobs as jobs_module
from penstock.engine.tokenization.jobs import TokenizerJobs
from penstock.engine.tokenization.model_tokenizer import Truncation
from penstock.engine.tokenization.tokenizer import TokenizerPool

WORDS = '{"version":"1.0","model":{"type":"WordLevel","vocab":{"a":0,"?":1},"unk_token":"?"},"added_tokens":[],'
WORDS += '"pre_tokenizer":{"type":"Whitespace"},"normalizer":null,"post_processor":null,"decoder":null}'


class Held:
    """Jobs that wait in the queue of a tokenizer until they are released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_chars: int) -> None:
        self.num_refused = 0
        self.now_s = 0.0
        self.jobs = TokenizerJobs(1, max_chars, self.count_refusal)
        self._gates: list[tuple[asyncio.Event, asyncio.Task[None]]] = []
        monkeypatch.setattr(jobs_module, "time", SimpleNamespace(perf_counter=lambda: self.now_s))

    def count_refusal(self) -> None:
        self.num_refused += 1

    async def add(self, num_chars: int, client: str = "") -> None:
        """Lets a job of `num_chars` wait. Raises what refuses it."""
        gate = asyncio.Event()

        async def work() -> None:
            CLIENT.set(client)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self.jobs, "_run_in_thread", lambda *_: gate.wait())
                running = asyncio.ensure_future(self.jobs.run(lambda _: None, num_chars))
                await asyncio.sleep(0)
            await running

        task = asyncio.create_task(work())
        self._gates.append((gate, task))
        for _ in range(3):
            await asyncio.sleep(0)
        if task.done():
            self._gates.pop()
            await task

    async def end(self, number: int = -1) -> None:
        gate, task = self._gates.pop(number)
        gate.set()
        await task


async def test_what_does_not_fit_is_refused_whole_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch, 100)
    await held.add(60)
    await held.add(40)
    assert held.jobs.chars.used == 100
    await held.end()
    with pytest.raises(EngineOverloadedError, match=r"60 characters.* takes 41.*100 \(--max-queued-chars\)") as refused:
        await held.add(41)
    assert (refused.value.retry_after_s, refused.value.reason) == (1.0, RefusalReason.QUEUED_CHARACTERS)
    assert held.jobs.chars.used == 60
    await held.end()
    assert (held.jobs.chars.used, held.num_refused) == (0, 1)


async def test_a_new_client_is_admitted_beside_borrowed_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch, 100)
    await held.add(100, "a")  # one key alone may use all
    with pytest.raises(EngineOverloadedError, match="each may hold 50"):
        await held.add(51, "b")
    await held.add(50, "b")
    for client in "ab":
        with pytest.raises(EngineOverloadedError):
            await held.add(1, client)
    await held.end()
    await held.end()
    assert held.jobs.chars.used == 0


async def test_when_to_come_back_follows_how_fast_text_went(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch, 1_000_000)
    await held.add(500_000)
    held.now_s += 0.5  # a million characters a second
    await held.end()
    for num_chars, retry_after_s in ((250_000, 0.25), (9_000_000, 1.0)):  # the large one runs alone then
        await held.add(1_000_000)
        with pytest.raises(EngineOverloadedError) as refused:
            await held.add(num_chars)
        assert refused.value.retry_after_s == pytest.approx(retry_after_s)
        held.now_s += 1.0
        await held.end()


async def test_the_pool_gives_back_what_it_held(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TokenizerSpec(json=WORDS, truncation_side="right", uses_token_types=False)
    pool = TokenizerPool(spec, vocab_size=2, do_lower_case=False, num_workers=1, max_chars=10_000)
    waiting: list[Callable[[], None]] = []
    jobs = pool._jobs
    chars = jobs.chars
    monkeypatch.setattr(jobs, "_begin", lambda loop: waiting.append(lambda: TokenizerJobs._begin(jobs, loop)))
    limit = Truncation(max_num_tokens=100_000)
    first = asyncio.create_task(pool.encode(["a " * 3000], limit))
    second = asyncio.create_task(pool.encode(["a " * 1000], limit))
    await asyncio.sleep(0)
    assert chars.used == 8000
    with pytest.raises(EngineOverloadedError):
        await pool.encode(["a " * 1001], limit)
    assert len((await pool.encode(["a"], limit))[0]) == 1  # at once: it does not wait
    assert chars.used == 8000
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert chars.used == 6000
    while waiting:
        waiting.pop()()
    assert len((await first)[0]) == 3000
    assert chars.used == 0
    monkeypatch.undo()
    with pytest.raises(InvalidRequestError):
        await pool.encode([[5]], limit)
    assert chars.used == 0
    pool.close()
