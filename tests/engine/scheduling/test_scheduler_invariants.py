"""Invariants of the scheduler under random requests, failures, cancellations and shortages of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings, strategies as st

from .checked import CheckedScheduler, Setup


def setups(
    num_blocks: Sequence[int] = (40, 24, 0, 100), num_slots: Sequence[int] = (0, 0, 0, 2)
) -> st.SearchStrategy[Setup]:
    return st.builds(
        Setup,
        num_blocks=st.sampled_from(num_blocks),
        num_slots=st.sampled_from(num_slots),
        prefixes=st.booleans(),
        budget=st.sampled_from([32, 32, 128]),
        max_num_seqs=st.sampled_from([6, 3, 1]),
        chunk_size=st.sampled_from([None, None, 32, 7]),
    )


def adds(*lengths: st.SearchStrategy[list[int]]) -> st.SearchStrategy[Any]:
    return st.tuples(
        st.just("add"),
        st.one_of(*lengths),
        st.integers(-2, 2),  # priority
        st.sampled_from([None, None, None, 0.3, 2.0]),  # timeout
        st.sampled_from("aab"),  # client
        st.booleans(),  # needs only the last row
        st.integers(-1, 1),  # text
    )


short, long, aligned = st.integers(1, 16), st.integers(17, 120), st.sampled_from([8, 12, 16])
indices = st.lists(st.integers(0, 5), max_size=2)
free_tokens = st.sampled_from([None, None, 100, 10, 2, 0])
steps = st.tuples(st.just("step"), st.sampled_from([0.0, 0.1, 0.4]), free_tokens, indices, indices)
others = st.one_of(
    st.tuples(st.just("cancel"), st.integers(0, 20), st.booleans()),
    st.tuples(st.just("shrink"), st.integers(1, 40)),
    st.tuples(st.just("record"), st.integers(0, 40), st.integers(0, 40), st.sampled_from([0.001, 0.1, 3.0])),
    st.tuples(st.just("steps"), st.integers(1, 40)),
    st.just(("clear",)),
)


def events(*lengths: st.SearchStrategy[list[int]]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.one_of(adds(*lengths), adds(*lengths), steps, steps, others), max_size=40)


def play(setup: Setup, events: list[Any]) -> None:
    scheduler = CheckedScheduler(setup)
    for event in events:
        match event:
            case ("add", lengths, priority, timeout_s, client, last_row, text):
                scheduler.add(
                    *lengths, priority=priority, timeout_s=timeout_s, client=client, last_row=last_row, text=text
                )
            case ("step", step_s, free_tokens, failing, cancelled):
                scheduler.step(step_s, free_tokens=free_tokens, failing=failing, cancelled=cancelled)
            case ("cancel", number, uncache):
                scheduler.cancel(number, uncache=uncache)
            case ("shrink", num_tokens):
                scheduler.shrink(num_tokens)
            case ("record", chunk_tokens, whole_tokens, step_s):
                scheduler.scheduler.chunk_sizes.record(chunk_tokens, whole_tokens, step_s)
            case ("rush", lengths, urgent, last_row):
                scheduler.add(*lengths, priority=2, last_row=last_row)
                scheduler.step()
                scheduler.add(*urgent, priority=-2, last_row=last_row, text=1)
                scheduler.step()
            case ("steps", count):
                for _ in range(count):
                    scheduler.step(0.01)
            case ("clear",):
                scheduler.clear_prefixes()
    scheduler.run_all()
    assert not scheduler.scheduler.requests
    assert scheduler.sequence_pool.usage == 0


few = st.lists(st.integers(17, 80), min_size=1, max_size=3)
rushes = st.tuples(st.just("rush"), few, few, st.booleans())
mixed = st.lists(st.one_of(short, short, long), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(setup=setups(), events=events(mixed))
def test_invariants_hold_for_long_and_short_sequences(setup: Setup, events: list[Any]) -> None:
    play(setup, events)


@settings(max_examples=100, deadline=None)
@given(
    setup=setups([24, 40, 0], [0, 0, 1, 2]), events=st.lists(st.one_of(rushes, rushes, steps, adds(few)), max_size=12)
)
def test_invariants_hold_if_memory_is_short(setup: Setup, events: list[Any]) -> None:
    play(setup, events)


def test_three_sequences_do_not_preempt_in_a_cycle() -> None:
    setup = Setup(num_blocks=40, num_slots=0, prefixes=False, budget=32, max_num_seqs=6, chunk_size=None)
    rushes: list[Any] = [
        ("rush", [72], [61], False),
        ("rush", [72, 30, 67], [34, 50, 63], True),
        ("rush", [66], [31, 73, 56], True),
        ("add", [57, 61, 70], -2, None, "a", True, 0),
        ("rush", [44, 70, 66], [50, 42, 65], True),
        ("rush", [75], [17], False),
    ]
    play(setup, rushes)


@settings(max_examples=100, deadline=None)
@given(
    setup=setups([12, 40], [0]),
    events=events(st.lists(aligned, min_size=1, max_size=8), st.lists(short, min_size=1, max_size=8)),
)
def test_invariants_hold_for_shared_prefixes(setup: Setup, events: list[Any]) -> None:
    play(setup, events)
