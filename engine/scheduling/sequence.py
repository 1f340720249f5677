"""The records of scheduling: a request, its sequences, the chunks that run of them, and a batch. Plain Python.

A sequence is WAITING, then RUNNING, then ENDED; one that loses its memory to another waits again. What a forward runs
of it is a chunk: the whole of a short one, a part of a long one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeAlias, TypeVar

from ..protocol.params import PoolingParams
from .sequence_pool import Allocation


class Status(StrEnum):
    """Where a sequence stands in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class ChunkState(StrEnum):
    """Where a chunk, or a prompt in chunks as a whole, stands."""

    PENDING = "pending"  # not cut yet; or it failed, or lost its memory, and its tokens are cut again
    SCHEDULED = "scheduled"  # cut, and not started; the scheduler starts it at once
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"  # too often to be tried again
    CANCELLED = "cancelled"  # its prompt was removed


@dataclass(slots=True, eq=False)
class ChunkedRequest:
    """A prompt that is read: how far that has come, and the chunk that is under way."""

    request_id: Hashable  # of a QueuedSequence: the number of its request, and its place there
    prompt: Any = field(repr=False)  # ids, or a range of places; of a QueuedSequence: the TokenizedInput
    num_tokens: int  # its whole length
    turn_s: float = 0.0  # Seconds, monotonic; lower goes first. Set once, before it is in line
    due_s: float = 0.0  # Seconds, monotonic: of its next chunk, while it runs in chunks
    chunk_size: int = 0  # tokens of a chunk while memory is free; 0 takes the manager's
    status: Status = Status.WAITING
    num_done: int = 0  # tokens at the start that need not run any more: what later ones read of them is there
    num_cached: int = 0  # tokens of these that never ran, because they were found in a cache
    chunk: PrefillChunk[Any] | None = None  # what is scheduled or runs of it
    begun: tuple[PrefillChunk[Any], ...] = ()  # what runs of it before that, in order; see ChunkQueue.go_on
    num_chunks: int = 0  # completed since it began, or began again
    num_failures: int = 0  # since a chunk was last completed
    error: str | None = None  # the last failure
    has_failed: bool = False  # too often to be tried again
    completed: list[PrefillChunk[Any]] = field(default_factory=list, repr=False)  # those that gave an output
    kv_cache: Any = field(default=None, repr=False)  # what the caller handed in with the last completed chunk

    @property
    def is_complete(self) -> bool:
        """Whether every token is done."""
        return self.num_done == self.num_tokens

    @property
    def num_cut(self) -> int:
        """Tokens at the start that are done or under way: its next chunk begins behind them."""
        newest = self.chunk or (self.begun[-1] if self.begun else None)
        return self.num_done if newest is None else newest.end

    @property
    def is_ready(self) -> bool:
        """Whether its next chunk may be scheduled."""
        is_cut = self.chunk is not None or self.num_cut == self.num_tokens
        return self.status is Status.RUNNING and not (is_cut or self.has_failed)

    @property
    def state(self) -> ChunkState:
        """Where it stands as a whole, in the words for chunks."""
        if self.has_failed:
            return ChunkState.FAILED
        if self.is_complete:
            return ChunkState.COMPLETED
        if self.status is Status.ENDED:
            return ChunkState.CANCELLED
        oldest = self.begun[0] if self.begun else self.chunk
        return ChunkState.PENDING if oldest is None else oldest.state

    def is_under_way(self, chunk: PrefillChunk[Any]) -> bool:
        """Whether a chunk of it still counts: it was neither completed nor taken back."""
        return chunk is self.chunk or chunk in self.begun

    def drop_chunks(self, state: ChunkState) -> None:
        """Takes back the chunks that are under way, if there are any; what they still give must be dropped."""
        for chunk in self.begun:
            chunk.state = state
        self.begun = ()
        if self.chunk is not None:
            self.chunk.state, self.chunk = state, None


R = TypeVar("R", bound=ChunkedRequest)


@dataclass(slots=True, eq=False)
class PrefillChunk(Generic[R]):
    """Consecutive tokens of one prompt that go through the model in one forward."""

    sequence: R
    start: int  # its first token
    end: int  # the token after its last
    index: int = 0  # among the chunks of the prompt
    state: ChunkState = ChunkState.PENDING
    output: Any = field(default=None, repr=False)  # what its run gave, where the caller hands it in
    started_s: float = 0.0  # Seconds, monotonic

    @property
    def request_id(self) -> Hashable:
        """Name of its prompt."""
        return self.sequence.request_id

    @property
    def chunk_id(self) -> tuple[Hashable, int]:
        """Its name: that of its prompt, and its first token."""
        return self.request_id, self.start

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""
        return self.end - self.start

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends with it."""
        return self.end == self.sequence.num_tokens

    @property
    def tokens(self) -> Any:
        """Its part of the prompt: tokens, or their places where only the prompt's length is known."""
        return self.sequence.prompt[self.start : self.end]


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedSequence(ChunkedRequest):
    """One input of a request."""

    request: Request = field(repr=False)
    index: int = 0  # among the inputs of the request
    block_keys: Sequence[bytes] = ()  # keys of its full blocks in the prefix cache; none where it takes no part
    is_long: bool = False  # runs in chunks, and holds memory for all of its length meanwhile
    order: int = 0  # of arrival, among all sequences
    is_first: bool = True  # of its request, among its short or its long ones
    entry: Entry | None = field(default=None, repr=False)  # while it stands in line; see line.py
    before: QueuedSequence | None = field(default=None, repr=False)  # the last of these that waits before it
    behind: QueuedSequence | None = field(default=None, repr=False)  # the next that waits
    num_pooled: int = 0  # tokens that were pooled; they count even if what was done is lost, and they run again
    allocation: Allocation | None = None  # what it holds in the pool

    def turn_for(self, client: str) -> float:
        """Returns its turn as a client sees it: where they are told apart, another's priority counts for nothing."""
        return self.turn_s if client == self.request.client else self.turn_s - self.request.lead_s


Chunk: TypeAlias = PrefillChunk[QueuedSequence]
Entry: TypeAlias = tuple[float, int, QueuedSequence]
"""Turn, order of arrival, sequence."""


@dataclass(slots=True, eq=False)
class Request:
    """What the sequences of one request have in common, from its arrival to its end."""

    request_id: int
    params: PoolingParams  # resolved
    arrival_s: float = 0.0  # Seconds, monotonic
    priority: int = 0  # lower goes first
    deadline_s: float | None = None  # Seconds, monotonic; later, its answer is of no use
    client: str = ""  # whose it is; clients that wait take turns
    needs_last_row: bool = False  # only last tokens make its answer, so that what a cache holds need not run again
    sequences: list[QueuedSequence] = field(default_factory=list)  # one for each input, in order
    num_left: int = 0  # of these, that have not ended
    started_s: float | None = None  # Seconds, monotonic: its first forward began
    lead_s: float = 0.0  # Seconds that its priority is worth: turns are later by them


@dataclass(slots=True)
class PrefillBudget:
    """What the batch that is being made has room for; it ends with it."""

    num_tokens: int
    num_seqs: int
    is_untouched: bool = True  # nothing was added yet

    def has_room(self, num_tokens: int) -> bool:
        """Whether a sequence may have so many tokens; the first one may have more than there is room for."""
        return self.num_seqs > 0 and (num_tokens <= self.num_tokens or self.is_untouched)

    def add(self, num_tokens: int) -> bool:
        """Takes the room of a sequence, if it has any; returns whether it has."""
        if not self.has_room(num_tokens):
            return False
        self.num_tokens -= num_tokens
        self.num_seqs -= 1
        self.is_untouched = False
        return True


@dataclass(slots=True)
class Batch:
    """What runs next."""

    chunks: list[Chunk] = field(default_factory=list)  # first those that begin a sequence, by length
    num_long: int = 0  # of these, of long sequences
    expired: list[Request] = field(default_factory=list)  # their deadline has passed, and they have ended
    preempted: list[tuple[QueuedSequence, Allocation]] = field(default_factory=list)  # wait again; what they gave up
    ended: list[QueuedSequence] = field(default_factory=list)  # since the last batch; the runner forgets them
    num_left: int = 0  # sequences that found no place in it
