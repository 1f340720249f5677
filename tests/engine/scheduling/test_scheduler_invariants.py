"""Invariants of the scheduler under random requests, failures, cancellations and shortages of memory."""

from collections.abc import Sequence
from typing import Any

from hypothesis import example, given, settings, strategies as st

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


class Events(CheckedScheduler):
    """The calls that hypothesis makes, by name and keyword arguments."""

    def request(self, lengths: list[int], **options: Any) -> None:
        self.add(*lengths, **options)

    def urgent(self, lengths: list[int], urgent: list[int], last_row: bool) -> None:
        """Adds a request of low priority, and one of high priority while the first one runs."""
        self.add(*lengths, priority=2, last_row=last_row)
        self.step()
        self.add(*urgent, priority=-2, last_row=last_row, token_id=1)
        self.step()

    def short_steps(self, count: int) -> None:
        for _ in range(count):
            self.step(0.01)

    def record(self, chunk_tokens: int, short_tokens: int, step_s: float) -> None:
        self.scheduler.chunk_sizes.record(chunk_tokens, short_tokens, step_s)


Event = tuple[str, dict[str, Any]]


def call(name: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Event]:
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


def requests(*lengths: st.SearchStrategy[list[int]]) -> st.SearchStrategy[Event]:
    return call(
        "request",
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
steps = call(
    "step",
    step_s=st.sampled_from([0.0, 0.1, 0.4]),
    free_tokens=st.sampled_from([None, None, 100, 10, 2, 0]),
    failing=indices,
    cancelled=indices,
)
others = st.one_of(
    call("cancel", number=st.integers(0, 20), drop_cached_blocks=st.booleans()),
    call("lower_budget", num_tokens=st.integers(1, 40)),
    call(
        "record",
        chunk_tokens=st.integers(0, 40),
        short_tokens=st.integers(0, 40),
        step_s=st.sampled_from([0.001, 0.1, 3.0]),
    ),
    call("short_steps", count=st.integers(1, 40)),
    call("reset_prefix_cache"),
)


def events(*lengths: st.SearchStrategy[list[int]]) -> st.SearchStrategy[list[Event]]:
    return st.lists(st.one_of(requests(*lengths), requests(*lengths), steps, steps, others), max_size=40)


def play(setup: Setup, events: Sequence[Event]) -> None:
    checked = Events(setup)
    for name, arguments in events:
        getattr(checked, name)(**arguments)
    checked.run_all()
    assert not checked.scheduler.requests
    assert checked.sequence_pool.usage == 0


few = st.lists(st.integers(17, 80), min_size=1, max_size=3)
urgent = call("urgent", lengths=few, urgent=few, last_row=st.booleans())
mixed = st.lists(st.one_of(short, short, long), min_size=1, max_size=6)


def sent(client: str, *lengths: int) -> Event:
    options = {"priority": 0, "timeout_s": None, "last_row": False, "token_id": 0, "shares_prefix": False}
    return "request", {"lengths": [*lengths], "client": client, **options}


@settings(max_examples=150, deadline=None)
@given(setup=setups(), events=events(mixed))
@example(  # two sequences refer to a cached block of a third one, which has ended, when the cache is cleared
    Setup(num_blocks=40, num_slots=0, prefixes=True, budget=32, max_num_seqs=6, chunk_size=None),
    [
        sent("a", 1),
        ("lower_budget", {"num_tokens": 4}),
        sent("a", 17),
        sent("b", 5, 17),
        ("short_steps", {"count": 5}),
        ("reset_prefix_cache", {}),
    ],
)
def test_invariants_hold_for_long_and_short_sequences(setup: Setup, events: list[Event]) -> None:
    play(setup, events)


@settings(max_examples=100, deadline=None)
@given(
    setup=setups([24, 40, 0], [0, 0, 1, 2]),
    events=st.lists(st.one_of(urgent, urgent, steps, requests(few)), max_size=12),
)
def test_invariants_hold_if_memory_is_short(setup: Setup, events: list[Event]) -> None:
    play(setup, events)


@settings(max_examples=100, deadline=None)
@given(
    setup=setups([12, 40], [0]),
    events=events(st.lists(aligned, min_size=1, max_size=8), st.lists(short, min_size=1, max_size=8)),
)
def test_invariants_hold_for_shared_prefixes(setup: Setup, events: list[Event]) -> None:
    play(setup, events)
