"""Invariants of the scheduler under random requests, failures, cancellations and shortages of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Add:
    """Adds a request."""

    lengths: list[int]
    priority: int
    timeout_s: float | None
    client: str
    last_row: bool
    token_id: int
    shares_prefix: bool

    def apply(self, checked: CheckedScheduler) -> None:
        checked.add(
            *self.lengths,
            priority=self.priority,
            timeout_s=self.timeout_s,
            client=self.client,
            last_row=self.last_row,
            token_id=self.token_id,
            shares_prefix=self.shares_prefix,
        )


@dataclass(frozen=True)
class Step:
    """Runs a batch. Chunks at `failing` fail; the requests of the chunks at `cancelled` are cancelled."""

    step_s: float
    free_tokens: int | None
    failing: list[int]
    cancelled: list[int]

    def apply(self, checked: CheckedScheduler) -> None:
        checked.step(self.step_s, free_tokens=self.free_tokens, failing=self.failing, cancelled=self.cancelled)


@dataclass(frozen=True)
class ShortSteps:
    """Runs several batches."""

    count: int

    def apply(self, checked: CheckedScheduler) -> None:
        for _ in range(self.count):
            checked.step(0.01)


@dataclass(frozen=True)
class Cancel:
    """Cancels a request."""

    number: int
    uncache: bool

    def apply(self, checked: CheckedScheduler) -> None:
        checked.cancel(self.number, uncache=self.uncache)


@dataclass(frozen=True)
class Shrink:
    """Lowers the token budget because memory was short."""

    num_tokens: int

    def apply(self, checked: CheckedScheduler) -> None:
        checked.shrink(self.num_tokens)


@dataclass(frozen=True)
class Record:
    """Records the time of a forward."""

    chunk_tokens: int
    whole_tokens: int
    step_s: float

    def apply(self, checked: CheckedScheduler) -> None:
        checked.scheduler.chunk_sizes.record(self.chunk_tokens, self.whole_tokens, self.step_s)


@dataclass(frozen=True)
class ClearPrefixes:
    """Empties the prefix cache."""

    def apply(self, checked: CheckedScheduler) -> None:
        checked.clear_prefixes()


@dataclass(frozen=True)
class UrgentAdd:
    """Adds a request of low priority, and one of high priority while the first one runs."""

    lengths: list[int]
    urgent: list[int]
    last_row: bool

    def apply(self, checked: CheckedScheduler) -> None:
        checked.add(*self.lengths, priority=2, last_row=self.last_row)
        checked.step()
        checked.add(*self.urgent, priority=-2, last_row=self.last_row, token_id=1)
        checked.step()


Event = Add | Step | ShortSteps | Cancel | Shrink | Record | ClearPrefixes | UrgentAdd


def adds(*lengths: st.SearchStrategy[list[int]]) -> st.SearchStrategy[Add]:
    return st.builds(
        Add,
        lengths=st.one_of(*lengths),
        priority=st.integers(-2, 2),
        timeout_s=st.sampled_from([None, None, None, 0.3, 2.0]),
        client=st.sampled_from("aab"),
        last_row=st.booleans(),
        token_id=st.integers(0, 1),
        shares_prefix=st.booleans(),
    )


short, long, aligned = st.integers(1, 16), st.integers(17, 120), st.sampled_from([8, 12, 16])
indices = st.lists(st.integers(0, 5), max_size=2)
free_tokens = st.sampled_from([None, None, 100, 10, 2, 0])
steps = st.builds(Step, st.sampled_from([0.0, 0.1, 0.4]), free_tokens, indices, indices)
others = st.one_of(
    st.builds(Cancel, st.integers(0, 20), st.booleans()),
    st.builds(Shrink, st.integers(1, 40)),
    st.builds(Record, st.integers(0, 40), st.integers(0, 40), st.sampled_from([0.001, 0.1, 3.0])),
    st.builds(ShortSteps, st.integers(1, 40)),
    st.just(ClearPrefixes()),
)


def events(*lengths: st.SearchStrategy[list[int]]) -> st.SearchStrategy[list[Event]]:
    return st.lists(st.one_of(adds(*lengths), adds(*lengths), steps, steps, others), max_size=40)


def play(setup: Setup, events: Sequence[Event]) -> None:
    checked = CheckedScheduler(setup)
    for event in events:
        event.apply(checked)
    checked.run_all()
    assert not checked.scheduler.requests
    assert checked.sequence_pool.usage == 0


few = st.lists(st.integers(17, 80), min_size=1, max_size=3)
urgent_adds = st.builds(UrgentAdd, few, few, st.booleans())
mixed = st.lists(st.one_of(short, short, long), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(setup=setups(), events=events(mixed))
def test_invariants_hold_for_long_and_short_sequences(setup: Setup, events: list[Event]) -> None:
    play(setup, events)


@settings(max_examples=100, deadline=None)
@given(
    setup=setups([24, 40, 0], [0, 0, 1, 2]),
    events=st.lists(st.one_of(urgent_adds, urgent_adds, steps, adds(few)), max_size=12),
)
def test_invariants_hold_if_memory_is_short(setup: Setup, events: list[Event]) -> None:
    play(setup, events)


def test_three_sequences_do_not_preempt_in_a_cycle() -> None:
    setup = Setup(num_blocks=40, num_slots=0, prefixes=False, budget=32, max_num_seqs=6, chunk_size=None)
    events: list[Event] = [
        UrgentAdd([72], [61], False),
        UrgentAdd([72, 30, 67], [34, 50, 63], True),
        UrgentAdd([66], [31, 73, 56], True),
        Add([57, 61, 70], -2, None, "a", True, token_id=0, shares_prefix=False),
        UrgentAdd([44, 70, 66], [50, 42, 65], True),
        UrgentAdd([75], [17], False),
    ]
    play(setup, events)


@settings(max_examples=100, deadline=None)
@given(
    setup=setups([12, 40], [0]),
    events=events(st.lists(aligned, min_size=1, max_size=8), st.lists(short, min_size=1, max_size=8)),
)
def test_invariants_hold_for_shared_prefixes(setup: Setup, events: list[Event]) -> None:
    play(setup, events)
