"""Whose chunk is next. Plain Python; used through ChunkedPrefillManager."""

from __future__ import annotations

import heapq

from .chunked_prefill_request import ChunkedRequest


class ChunkedRequestQueue:
    """Requests whose next chunk may be scheduled, in order of their turn.

    A request has at most one entry. Entries of requests that are not ready any more are skipped when they come up.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], ChunkedRequest]] = []

    def push(self, request: ChunkedRequest) -> None:
        """Gives a request its place, if it is ready and has none."""
        if request.is_ready and not request.is_queued:
            heapq.heappush(self._heap, (request.turn, request))
            request.is_queued = True

    def peek(self) -> ChunkedRequest | None:
        """Returns the request whose turn it is, or None where none is ready."""
        while self._heap:
            request = self._heap[0][1]
            if request.is_ready:
                return request
            self.pop()
        return None

    def pop(self) -> None:
        """Removes the first entry."""
        heapq.heappop(self._heap)[1].is_queued = False

    def compact(self, num_live: int) -> None:
        """Drops the entries that would be skipped, once they are more than the others."""
        if len(self._heap) <= 2 * num_live + 64:
            return
        for _, request in self._heap:
            request.is_queued = request.is_ready
        self._heap = [entry for entry in self._heap if entry[1].is_queued]
        heapq.heapify(self._heap)
