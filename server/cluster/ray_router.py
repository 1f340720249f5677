"""A RequestRouter for Ray Serve that sends each request to the replica with the fewest queued tokens.

Every Ray proxy imports this module, so it has few imports.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .balancing import LoadReport, ReplicaLoads


class LeastTokensRouter(FIFOMixin, RequestRouter):
    """Tries replicas in order of load until one accepts the request. See balancing.py."""

    def initialize_state(self, **settings: Any) -> None:
        """Called once by Ray. There are no settings."""
        del settings
        self._loads = ReplicaLoads()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the replicas in the order in which Ray tries them."""
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        reports = {name: LoadReport.of(replica.routing_stats or {}) for name, replica in replicas.items()}
        return [[replicas[name]] for name in self._loads.order(reports)]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Counts a request that is sent to a replica."""
        super().on_send_request(replica_id)
        self._loads.send(replica_id)
