"""Which replica has the least to do: what each one reported last, and what was sent to it since."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

Id = TypeVar("Id", bound=Hashable)


class LoadReport(NamedTuple):
    """What a replica says of itself, about once a second.

    Attributes:
        queued_tokens: Tokens that wait or run; infinity: its engine takes no request now.
        done_tokens: Tokens that went through its model since the start.
        request_tokens: Mean tokens of its last requests; 0: it had none.
    """

    queued_tokens: float = 0.0
    done_tokens: float = 0.0
    request_tokens: float = 0.0

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> LoadReport:
        """Returns the report that Ray's routing stats hold; that of a new replica while they are empty."""
        return cls(**{name: float(stats[name]) for name in cls._fields if name in stats})


class LoadBook:
    """The load of each replica as one router knows it. What other routers send is seen with the next report."""

    def __init__(self) -> None:
        self._reports: dict[Hashable, LoadReport] = {}
        self._num_sent: dict[Hashable, int] = {}

    def order(self, reports: Mapping[Id, LoadReport]) -> list[Id]:
        """Returns the replicas, the one with the least to do first.

        Args:
            reports: The last report of each replica that there is.
        """
        for gone in self._reports.keys() - reports.keys():
            del self._reports[gone], self._num_sent[gone]
        for replica, report in reports.items():
            if report != self._reports.get(replica):
                self._reports[replica], self._num_sent[replica] = report, 0
        # A request whose size nobody knows counts as one like the others.
        sizes = [report.request_tokens for report in reports.values() if report.request_tokens]
        usual = sum(sizes) / len(sizes) if sizes else 1.0
        loads = {
            replica: (report.queued_tokens + self._num_sent[replica] * usual, self._num_sent[replica])
            for replica, report in reports.items()
        }
        return sorted(loads, key=loads.__getitem__)

    def send(self, replica: Hashable) -> None:
        """Counts a request that was sent to a replica."""
        if replica in self._num_sent:
            self._num_sent[replica] += 1
