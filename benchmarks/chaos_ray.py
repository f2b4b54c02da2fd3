"""Nodes of a Ray cluster on this machine's loopback, for the chaos campaign to lose."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.chaos_processes import children

DEVICES = 2
_TRIES = 4
_NODE = {
    "num_cpus": 1,
    "object_store_memory": 80 * 2**20,
    "include_dashboard": False,
    "node_ip_address": "127.0.0.1",
}
_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # which makes Ray take loopback for this machine's address
    "RAY_USAGE_STATS_ENABLED": "0",
}


class Nodes:
    """A node with room for one device each, and a head with room for none: without the head the cluster is lost. Ray's
    processes find what this one finds. Their owner is a process of its own, because Ray wants its main thread."""

    def __init__(self) -> None:
        os.environ.update(_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_own, args=(theirs,))
        self._process.start()
        theirs.close()
        self.address: str = self._pipe.recv()
        self._daemons: list[int] = []
        for _ in range(DEVICES):
            self.add()

    def actors(self) -> list[int]:
        """Processes that are devices."""
        return [pid for daemon in self._daemons for pid in _actors(daemon)]

    def lose(self, rng: random.Random) -> bool:
        """SIGKILL to a node that has a device, if there is one."""
        daemons = [each for each in self._daemons if _actors(each)]
        if not daemons:
            return False
        lost = rng.choice(daemons)
        self._daemons.remove(lost)
        self._pipe.send(lost)
        self._pipe.recv()
        return True

    def add(self) -> None:
        """Takes seconds."""
        self._pipe.send(None)
        self._daemons.append(self._pipe.recv())

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


def _own(pipe: Connection) -> None:
    """A process: start the head, send its address; then, at None, add a node and send its daemon's id, and at such an id lose
    its node. Until no process is there any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster(initialize_head=True, head_node_args=_NODE | {"num_cpus": 0})
    pipe.send(cluster.address)
    nodes: dict[int, Any] = {}
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            lost = pipe.recv()
            if lost is None:
                node = _add(cluster)
                daemon = node.all_processes["raylet"][0].process.pid
                nodes[daemon] = node
            else:
                cluster.remove_node(nodes.pop(lost), allow_graceful=False)
            pipe.send(lost or daemon)
    cluster.shutdown()


def _add(cluster: Any) -> Any:
    """On a busy machine a node's helpers may take longer than Ray waits for them."""
    for _ in range(_TRIES - 1):
        try:
            return cluster.add_node(**_NODE)
        except Exception as problem:  # Ray says it with no other
            print(f"a node did not start: {problem}", file=sys.stderr)
    return cluster.add_node(**_NODE)


@contextlib.contextmanager
def nodes_for(engines: str) -> Iterator[Nodes | None]:
    """Those that ``engines`` are to be on, if any."""
    if engines != "ray":
        yield None
        return
    with contextlib.closing(Nodes()) as nodes:
        yield nodes


def _actors(daemon: int) -> list[int]:
    """Ray's workers are children of their node's daemon, and named after what they do."""
    return children(daemon, "ray::DeviceActor")
