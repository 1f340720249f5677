"""A Ray cluster of several nodes on this machine: `nodes.py CPUS [CPUS ...]`, the head first.

With 0 CPUs, the head runs no engine. Prints the address when all nodes run. `kill N` on standard input kills the
processes of node N. Ends with its standard input.
"""

import json
import os
import sys

os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
}

from ray.cluster_utils import Cluster

STORE_BYTES = 200 * 2**20


def main() -> None:
    head, *others = map(int, sys.argv[1:])
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": head, "include_dashboard": False, "object_store_memory": STORE_BYTES},
    )
    try:
        nodes = [cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES) for cpus in others]
        print(json.dumps({"address": cluster.address}), flush=True)
        for line in sys.stdin:
            command, number = line.split()
            assert command == "kill"
            cluster.remove_node(nodes[int(number) - 1], allow_graceful=False)
            print(json.dumps({"killed": int(number)}), flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
