"""A local Ray cluster of two nodes with the application, in a process of its own: orders come as lines of JSON.

Ray leaves threads and sockets behind in the process that started a cluster, so that is not the one of the tests.
"""

import json
import logging
import os
import random
import sys
from typing import Any

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
ORDERS = ("address", "kill_replica", "kill_node", "add_node", "redeploy", "replicas")


class TwoNodes:
    """Two nodes of one processor each. The first one has Ray's own services and stays."""

    def __init__(self, port: int, options: dict[str, Any]) -> None:
        import ray
        from halfeven.serve.ray import Options, app
        from ray import serve
        from ray.cluster_utils import Cluster

        self._ray, self._draw = ray, random.Random(5)
        self._cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        self.add_node()
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        self._deployment: dict[str, Any] = options["deployment"]
        self._run = lambda: serve.run(app(Options(**options)))
        self._run()

    def address(self) -> str:
        """The address of the cluster, for another process."""
        return str(self._cluster.address)

    def replicas(self) -> int:
        return len(self._names())

    def redeploy(self) -> None:
        """Ray replaces every replica by one with another option, as for a new build; it returns when that is done."""
        self._deployment["ray_actor_options"] = {"num_cpus": 0.4}
        self._run()

    def kill_replica(self) -> str:
        """The process of any replica ends at once."""
        name = self._draw.choice(self._names())
        self._ray.kill(self._ray.get_actor(name, namespace="serve"))
        return name

    def kill_node(self) -> None:
        """Every process of the second node ends at once: its proxy, its replica, perhaps the store's writer."""
        self._cluster.remove_node(self._second, allow_graceful=False)

    def add_node(self) -> None:
        self._second = self._cluster.add_node(**NODE)

    def _names(self) -> list[str]:
        named = self._ray.util.list_named_actors(all_namespaces=True)
        return sorted(
            one["name"] for one in named if one["name"].startswith("SERVE_REPLICA::default#halfeven#")
        )


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is not an answer
    cluster = TwoNodes(int(sys.argv[1]), json.loads(sys.argv[2]))
    print(json.dumps("up"), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        assert order in ORDERS
        print(json.dumps(getattr(cluster, order)()), file=answers, flush=True)


if __name__ == "__main__":
    main()
