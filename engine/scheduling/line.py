"""A line of sequences that wait, in the order of their turns. Whoever looks at its head pays for no more than that.

Sequences mostly come with the latest turn and go from about the head. So a line is a sorted list: one that comes is put
in its place, one that goes is passed over by the next walk along the line, and then left out of it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from .sequence import Entry, QueuedSequence


class Line:
    """Sequences in the order of their turns. One that stands in it has its entry.

    Attributes:
        num_seqs: Sequences in line.
        entries: Theirs, and some of those that have left it.
    """

    __slots__ = ("_num_walked", "entries", "num_seqs")

    def __init__(self) -> None:
        self.num_seqs = 0
        self.entries: list[Entry] = []
        self._num_walked = 0  # entries from the head on that a walk has come by since some were left out

    def push(self, sequence: QueuedSequence) -> None:
        """Puts a sequence where its turn is."""
        sequence.entry = entry = (sequence.turn_s, sequence.order, sequence)
        self.num_seqs += 1
        if not self.entries or self.entries[-1] < entry:
            self.entries.append(entry)
        else:
            insort(self.entries, entry)
            self._num_walked += 1  # it may be among these

    def leave(self, sequence: QueuedSequence) -> None:
        """Takes a sequence out of the line."""
        sequence.entry = None
        self.num_seqs -= 1
        if len(self.entries) > 2 * self.num_seqs + 64:
            self._leave_out(len(self.entries))

    def walk(self) -> Iterator[Entry]:
        """Yields the entries of those in line, in the order of their turns. Nobody may come or go meanwhile."""
        self._leave_out(self._num_walked)
        for entry in self.entries:
            self._num_walked += 1
            if entry[2].entry is entry:
                yield entry

    def _leave_out(self, num_entries: int) -> None:
        """Drops those that are not in line any more from so many entries at the head."""
        self.entries[:num_entries] = [entry for entry in self.entries[:num_entries] if entry[2].entry is entry]
        self._num_walked = 0
