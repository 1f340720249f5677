"""Who is let in where several processes ask one engine: one bound over all of them, whichever of them is asked."""

from __future__ import annotations

from copy import copy

from ...protocol.errors import RefusalReason
from ..admission import Admission
from ..stats import DispatcherStats
from .load_board import MAX_REQUESTS, LoadBoard, LoadPlace


class SharedStats(DispatcherStats):
    """Figures of one process, whose refusals stand on the board, too."""

    def __init__(self, place: LoadPlace) -> None:
        super().__init__()
        self._place = place

    def count_refusal(self) -> None:
        """Counts a request that was refused."""
        super().count_refusal()
        self._place.count_refusal()


class SharedAdmission(Admission):
    """Admission by what is under way in all processes. What it lets in counts in the place of this one.

    The drain rate and the token budget of the core come from the process that hears of its steps.

    Args:
        stats: Of this process.
        max_tokens: See Admission.
        max_queue_s: See Admission.
        board: Of all.
        place: Of this process; None where it asks for nothing itself.
    """

    def __init__(
        self,
        stats: DispatcherStats,
        max_tokens: int,
        max_queue_s: float,
        board: LoadBoard,
        place: LoadPlace | None = None,
    ) -> None:
        super().__init__(stats, max_tokens, max_queue_s, [])
        self._board = board
        self._place = place

    def figures(self) -> DispatcherStats:
        """Returns the figures of this process, with what is under way in all, and what all have refused."""
        board, figures = self._board, copy(self.stats)
        figures.num_requests, figures.num_tokens = board.num_requests, board.num_tokens
        figures.num_refused_total, figures.token_budget = board.num_refused, board.token_budget
        if not figures.num_requests:
            figures.num_waiting = figures.num_waiting_tokens = 0
        return figures

    def enter(self, num_tokens: int, client: str = "") -> None:
        """Counts a request from now on; see Admission.enter."""
        if self._place is None or not self._place.has_room:
            raise self._refusal(
                f"This process of the server has {MAX_REQUESTS} requests under way.",
                num_tokens,
                RefusalReason.QUEUED_REQUESTS,
            )
        super().enter(num_tokens, client)
        self._place.enter(client, num_tokens)

    def leave(self, num_tokens: int, client: str = "") -> None:
        """Counts a request no more."""
        super().leave(num_tokens, client)
        if self._place is not None:
            self._place.leave(client, num_tokens)

    @property
    def _num_all(self) -> int:
        return self._board.num_tokens

    @property
    def _token_budget(self) -> int:
        return self._board.token_budget

    @property
    def _tokens_per_s(self) -> float:
        return self._board.tokens_per_s

    def _num_tokens(self, largest: int, client: str | None = None) -> int:
        if client is None and largest == self._max_tokens:
            return self._num_all
        return int(self._board.sizes(client).clip(max=largest).sum())

    def _num_clients(self, client: str) -> int:
        return self._board.num_clients(client)

    def _larger(self, largest: int, client: str | None = None) -> list[int]:
        sizes = self._board.sizes(client)
        larger: list[int] = sorted(sizes[sizes > largest].tolist())
        return larger
