"""Who gives up memory for whom, where there is too little of it. Plain Python without torch."""

from __future__ import annotations

from collections.abc import Iterable

from .sequence import QueuedSequence
from .sequence_pool import Allocation, SequencePool


def victims_of(
    sequence: QueuedSequence, running: Iterable[QueuedSequence], sequence_pool: SequencePool
) -> list[tuple[QueuedSequence, Allocation]]:
    """Returns the long sequences that give up their memory for one that waits, with what they hold, the last first.

    Their turn is later: for both clients, and in the one order of all turns; else three could take it in a circle, for
    ever. None where all that they hold were not enough.
    """
    client = sequence.request.client
    later = sorted((s for s in running if s.turn_s > sequence.turn_s), key=lambda s: (s.turn_s, s.order))
    later = [s for s in later if s.turn_for(client) > sequence.turn_for(s.request.client)]
    victims: list[tuple[QueuedSequence, Allocation]] = []
    while not sequence_pool.has_room(sequence.num_tokens, after=[held for _, held in victims]):
        if not later:
            return []
        victim = later.pop()
        assert victim.allocation is not None, "a long sequence that runs holds memory"
        victims.append((victim, victim.allocation))
    return victims
