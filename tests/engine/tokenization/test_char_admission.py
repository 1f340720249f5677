"""Text that waits for tokenization is bounded: whole requests are refused, and everything is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from penstock.engine.protocol.errors import EngineOverloadedError, InvalidRequestError
from penstock.engine.protocol.model_info import TokenizerSpec
from penstock.engine.tokenization.jobs import CharAdmission, TokenizerJobs
from penstock.engine.tokenization.model_tokenizer import Truncation
from penstock.engine.tokenization.tokenizer import TokenizerPool

WORDS = '{"version":"1.0","model":{"type":"WordLevel","vocab":{"a":0,"?":1},"unk_token":"?"},"added_tokens":[],'
WORDS += '"pre_tokenizer":{"type":"Whitespace"},"normalizer":null,"post_processor":null,"decoder":null}'


def test_what_does_not_fit_is_refused_whole_and_counted() -> None:
    refusals: list[None] = []
    admission = CharAdmission(100, lambda: refusals.append(None))
    with admission.hold(60):
        with admission.hold(40):
            assert admission.chars.used == 100
        with (
            pytest.raises(EngineOverloadedError, match=r"60 characters.*100 \(--max-queued-chars\).*has 41") as refused,
            admission.hold(41),
        ):
            pass
        assert refused.value.retry_after_s == 1.0
        assert admission.chars.used == 60
    assert (admission.chars.used, len(refusals)) == (0, 1)


def test_a_new_client_is_admitted_beside_borrowed_characters() -> None:
    admission = CharAdmission(100)
    with admission.hold(60, "a"), admission.hold(40, "a"):  # one key alone may use all
        with pytest.raises(EngineOverloadedError, match="each API key may have 50"):
            admission.check(51, "b")
        with admission.hold(30, "b"), admission.hold(20, "b"):
            with pytest.raises(EngineOverloadedError):
                admission.check(1, "b")
            with pytest.raises(EngineOverloadedError):
                admission.check(1, "a")
    assert admission.chars.used == 0
    assert not admission.chars._by_client


def test_a_large_request_runs_alone() -> None:
    admission = CharAdmission(100)
    with admission.hold(1000), pytest.raises(EngineOverloadedError), admission.hold(1):
        pass
    with admission.hold(1), pytest.raises(EngineOverloadedError), admission.hold(1000):
        pass


def test_when_to_come_back_follows_how_fast_text_went() -> None:
    now_s = 0.0
    admission = CharAdmission(1_000_000, clock_s=lambda: now_s)
    with admission.hold(500_000):
        now_s += 0.5  # a million characters a second
    for num_chars, retry_after_s in ((250_000, 0.25), (9_000_000, 1.0)):  # the large one runs alone then
        with admission.hold(1_000_000):
            with pytest.raises(EngineOverloadedError) as refused, admission.hold(num_chars):
                pass
            assert refused.value.retry_after_s == pytest.approx(retry_after_s)
            now_s += 1.0


async def test_the_pool_gives_back_what_it_held(monkeypatch: pytest.MonkeyPatch) -> None:
    admission = CharAdmission(10_000)
    spec = TokenizerSpec(json=WORDS, truncation_side="right", uses_token_types=False)
    pool = TokenizerPool(spec, vocab_size=2, do_lower_case=False, num_workers=1, admission=admission)
    waiting: list[Callable[[], None]] = []
    jobs = pool._jobs
    monkeypatch.setattr(jobs, "_begin", lambda loop: waiting.append(lambda: TokenizerJobs._begin(jobs, loop)))
    limit = Truncation(max_num_tokens=100_000)
    first = asyncio.create_task(pool.encode(["a " * 3000], limit))
    second = asyncio.create_task(pool.encode(["a " * 1000], limit))
    await asyncio.sleep(0)
    assert admission.chars.used == 8000
    with pytest.raises(EngineOverloadedError):
        await pool.encode(["a " * 1001], limit)
    assert len((await pool.encode(["a"], limit))[0]) == 1  # at once: it does not wait
    assert admission.chars.used == 8000
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert admission.chars.used == 6000
    while waiting:
        waiting.pop()()
    assert len((await first)[0]) == 3000
    assert admission.chars.used == 0
    monkeypatch.undo()
    with pytest.raises(InvalidRequestError):
        await pool.encode([[5]], limit)
    assert admission.chars.used == 0
    pool.close()
