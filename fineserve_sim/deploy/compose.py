"""Engines as services of Docker Compose: one file for each node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fineserve_sim.deploy.engines import Deployed, facts
from fineserve_sim.deploy.vllm import arguments, environment
from fineserve_sim.experiment.file.document import to_yaml


def files(engines: Sequence[Deployed], models: str) -> dict[str, str]:
    """Compose files by name. ``models``: the folder of checkpoints, which is the same within the containers."""
    nodes = sorted({engine.node for engine in engines})
    return {
        f"compose-node-{node}.yaml" if len(nodes) > 1 else "compose.yaml": to_yaml(
            {"services": {each.name: _service(each, models) for each in engines if each.node == node}}
        )
        for node in nodes
    }


def _service(engine: Deployed, models: str) -> dict[str, Any]:
    """MPS is a daemon of the host: its clients need the host's IPC and the daemon's folder."""
    variables, volumes = dict(environment(engine)), [f"{models}:{models}:ro"]
    if engine.mode == "mps":
        pipe = facts()["kai"]["mps_pipe"]
        variables["CUDA_MPS_PIPE_DIRECTORY"] = pipe
        volumes.append(f"{pipe}:{pipe}")
    ids = list(map(str, engine.devices))
    gpus = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
    return {
        "image": facts()["vllm"]["image"],
        "entrypoint": ["vllm", "serve"],
        "command": arguments(engine),
        "ipc": "host",
        "ports": [f"{engine.port}:{engine.port}"],
        "volumes": volumes,
        "deploy": {"resources": {"reservations": {"devices": [gpus]}}},
        "restart": "unless-stopped",
    } | ({"environment": variables} if variables else {})
