"""Ray Serve's request router that sends each request to the replica with the fewest queued tokens."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .least_tokens import LoadBook, LoadReport


class LeastTokensRouter(FIFOMixin, RequestRouter):
    """Asks the replica with the least to do first, the others in turn where it takes no more. See least_tokens.py."""

    def initialize_state(self, **settings: Any) -> None:
        """Begins with an empty book. Called by Ray once; there are no settings."""
        del settings
        self._book = LoadBook()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the replicas in the order in which they are to be asked."""
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        reports = {name: LoadReport.of(replica.routing_stats or {}) for name, replica in replicas.items()}
        return [[replicas[name]] for name in self._book.order(reports)]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Counts a request that leaves for a replica."""
        super().on_send_request(replica_id)
        self._book.send(replica_id)
