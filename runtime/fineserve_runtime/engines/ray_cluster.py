"""Devices as actors of a Ray cluster, joined or started when the runtime file says ``cluster``.

One placement group holds a bundle a device (a GPU, or a CPU), spread over the cluster's nodes as far as it goes. When a node
is lost, Ray moves its bundles to one that has room, and there the device's next actor starts.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fineserve_runtime.engines.api import Device, EngineHost, EngineListener, HostConfig
from fineserve_runtime.engines.device import LocalDevice, OpenDevice
from fineserve_runtime.engines.host import start_host
from fineserve_runtime.engines.ray_device import NEWS, DeviceActor, RayDevice

_RESOURCE = {"cpu": "CPU", "cuda": "GPU"}
_PLACED_S = 30.0
_ANSWERS_S = 5.0
_GOODBYE_S = 3.0
_LOG = logging.getLogger("fineserve.engines")


class RayCluster:
    """Starts hosts, each on the next bundle of ``group``; ``open_device`` runs in their actors."""

    def __init__(self, group: Any, kind: Device, open_device: OpenDevice) -> None:
        self._group = group
        self._kind = kind
        self._open_device = open_device
        self._bundles = itertools.count()

    def start_host(self, config: HostConfig, listener: EngineListener) -> EngineHost:
        """As `host.start_host`, on a device of the cluster."""
        new_actor = partial(self._new_actor, next(self._bundles))
        return start_host(config, listener, partial(RayDevice, new_actor=new_actor, open_device=self._open_device))

    def _new_actor(self, bundle: int) -> Any:
        actor = ray.remote(
            num_cpus=int(self._kind == "cpu"),
            num_gpus=int(self._kind == "cuda"),
            concurrency_groups={NEWS: 1},
            enable_task_events=False,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
        )(DeviceActor)
        return actor.remote()


@contextmanager
def ray_cluster(
    address: str | None, devices: int, kind: Device, open_device: OpenDevice = LocalDevice
) -> Iterator[RayCluster]:
    """The Ray cluster at ``address`` with a bundle for each of so many devices, until the block ends. None: the one that
    RAY_ADDRESS names or that runs on this machine, else a new one of this machine alone.

    Raises ValueError when no cluster answers there or it has too little.
    """
    with _joined(address), _placed(devices, _RESOURCE[kind]) as group:
        yield RayCluster(group, kind, open_device)


@contextmanager
def _joined(address: str | None) -> Iterator[None]:
    """Be a driver of the cluster, unless this process is one already."""
    if ray.is_initialized():
        yield
        return
    _check_answers(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="WARNING")
    except (ConnectionError, ValueError) as problem:
        raise ValueError(f"cluster: no Ray cluster at {address}: {str(problem).splitlines()[0]}") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray's own handler would end a server without a drain
    try:
        yield
    finally:
        if not _done(ray.shutdown):
            atexit.unregister(ray.shutdown)  # which would wait again


def _check_answers(address: str | None) -> None:
    """Ray itself tries for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), _ANSWERS_S).close()
        except OSError as problem:
            raise ValueError(f"cluster: no Ray cluster at {address}: {problem.strerror or problem}") from None


@contextmanager
def _placed(devices: int, resource: str) -> Iterator[Any]:
    """A placement group with a bundle for each device."""
    group = placement_group([{resource: 1}] * devices, strategy="SPREAD")
    try:
        if not group.wait(_PLACED_S):
            there = ray.cluster_resources().get(resource, 0)
            raise ValueError(
                f"cluster: a {resource} for each of {devices} devices is not free; the Ray cluster has {there:g}"
            )
        yield group
    finally:
        if not _done(partial(remove_placement_group, group)):
            _LOG.warning("cluster: Ray's head does not answer; its placement group and actors are left to it")


def _done(goodbye: Callable[[], object]) -> bool:
    """Whether this was over within seconds. Ray waits a minute for a head that is gone, and then ends the process."""
    thread = threading.Thread(target=goodbye, name="goodbye", daemon=True)
    thread.start()
    thread.join(_GOODBYE_S)
    return not thread.is_alive()
