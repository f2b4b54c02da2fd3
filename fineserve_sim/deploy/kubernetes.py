"""Engines as Kubernetes manifests: a Deployment each and a Service a model, on GPUs of NVIDIA's device plugin or of KAI.

The device plugin lends a whole GPU (``nvidia.com/gpu``), a slice of MIG (``nvidia.com/mig-3g.40gb``), or a replica of a shared
GPU (``nvidia.com/gpu.shared``). It shares all GPUs of a node in one way, with as many replicas each. Under MPS each replica has
an equal part of the memory and of the SMs. What a plan shares otherwise it cannot do. KAI can, by the share of a GPU's memory
(``gpu-fraction``).

Neither lets a manifest name a GPU: both choose which engines meet on one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fineserve_sim.deploy.engines import PORT, Deployed, facts, host_name
from fineserve_sim.deploy.vllm import arguments, environment
from fineserve_sim.experiment.file.document import to_yaml

Parts = dict[str, Any]
"""What a way to lend GPUs adds: ``limits`` of the container; ``labels``, ``annotations`` and parts of ``spec`` of the pod."""


def by_plugin(engines: Sequence[Deployed]) -> dict[str, str]:
    """Manifests, and the configuration that the device plugin needs, by file name. Raises ValueError, in one line, for an
    arrangement that the plugin cannot make."""
    _check_kinds(engines)
    names = facts()["device_plugin"]
    shared = [engine for engine in engines if engine.mode in names["sharing"]]
    config: dict[str, Any] = {"version": "v1"}
    if any(engine.mode == "mig" for engine in engines):
        config["flags"] = {"migStrategy": "mixed"}
    if shared:
        mode, replicas = _replicas(engines, shared)
        shares = {"renameByDefault": True, "resources": [{"name": names["gpu"], "replicas": replicas}]}
        config["sharing"] = {names["sharing"][mode]: shares}

    def lend(engine: Deployed) -> Parts:
        if engine.mode == "mig":
            return {"limits": {names["mig"].format(profile=engine.devices[0].profile): engine.tp}}
        return {"limits": {names["shared_gpu" if shared else "gpu"]: engine.tp}}

    found = {"kubernetes.yaml": _manifests(engines, lend)}
    return found | ({"device-plugin.yaml": to_yaml(config)} if len(config) > 1 else {})


def _check_kinds(engines: Sequence[Deployed]) -> None:
    """Raises ValueError for several kinds of GPUs: a manifest asks for some GPU."""
    kinds = list(dict.fromkeys(engine.gpu for engine in engines))
    if len(kinds) > 1:
        raise ValueError(
            f"engines stand on {' and '.join(kinds)}, and manifests ask for any GPU; take --as vllm or compose"
        )


def _replicas(engines: Sequence[Deployed], shared: Sequence[Deployed]) -> tuple[str, int]:
    """The one way in which the plugin shares all GPUs, and into how many replicas."""
    modes = sorted({engine.mode for engine in engines})
    if len(modes) > 1:
        raise ValueError(
            f"the device plugin shares all GPUs of a node in one way, and this has {' and '.join(modes)}; take --as kai"
        )
    replicas = max(Counter((each.node, device) for each in shared for device in each.devices).values())
    for engine in shared:
        if engine.tp > 1:
            raise ValueError(
                f"{engine.name} spans {engine.tp} shared GPUs; the device plugin lends one replica a container"
            )
        if engine.mode == "mps" and engine.memory_share > 1 / replicas:
            raise ValueError(
                f"{engine.name} takes {engine.memory_share:.3f} of a GPU's memory; the device plugin gives each of {replicas} "
                f"replicas {1 / replicas:.3f}; take --as kai"
            )
        if engine.sm_percent is not None and engine.sm_percent != 100 // replicas:
            raise ValueError(
                f"{engine.name} may take {engine.sm_percent} % of the SMs; the device plugin gives each of {replicas} replicas "
                f"{100 // replicas} %; take --as kai"
            )
    return modes[0], replicas


def by_kai(engines: Sequence[Deployed]) -> dict[str, str]:
    """Manifests for KAI's scheduler by file name. Raises ValueError, in one line, for an engine over several shared GPUs."""
    _check_kinds(engines)
    names = facts()["kai"]

    def lend(engine: Deployed) -> Parts:
        parts: Parts = {"labels": {names["queue_label"]: names["queue"]}, "spec": {"schedulerName": names["scheduler"]}}
        if engine.mode == "mig":
            resource = facts()["device_plugin"]["mig"].format(profile=engine.devices[0].profile)
            return parts | {"limits": {resource: engine.tp}}
        if engine.mode == "exclusive":
            return parts | {"limits": {facts()["device_plugin"]["gpu"]: engine.tp}}
        if engine.tp > 1:
            raise ValueError(f"{engine.name} spans {engine.tp} shared GPUs; a fraction is of one GPU")
        parts["annotations"] = {names["fraction"]: f"{engine.memory_share:.3f}"}
        return parts | ({"host": names["mps_pipe"]} if engine.mode == "mps" else {})

    return {"kai.yaml": _manifests(engines, lend)}


def _manifests(engines: Sequence[Deployed], lend: Callable[[Deployed], Parts]) -> str:
    """A Deployment an engine, and a Service a model, which spreads its requests over its engines."""
    documents = [_deployment(engine, lend(engine)) for engine in engines]
    documents += [_service(name) for name in dict.fromkeys(host_name(engine.model) for engine in engines)]
    return "---\n".join(map(to_yaml, documents))


def _labels(engine: Deployed) -> dict[str, str]:
    return {"app": engine.name, "model": host_name(engine.model)}


def _probe() -> dict[str, Any]:
    return {"httpGet": {"path": "/health", "port": PORT}}


def _deployment(engine: Deployed, parts: Parts) -> dict[str, Any]:
    notes = {"annotations": parts["annotations"]} if "annotations" in parts else {}
    volumes = [
        {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if "host" in parts:
        volumes.append({"name": "mps", "hostPath": {"path": parts["host"], "type": "DirectoryOrCreate"}})
    spec = {"containers": [_container(engine, parts)], "volumes": volumes} | parts.get("spec", {})
    pod = {"metadata": {"labels": _labels(engine) | parts.get("labels", {})} | notes, "spec": spec}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": engine.name, "labels": _labels(engine)},
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": _labels(engine)},
            "template": pod,
        },
    }


def _container(engine: Deployed, parts: Parts) -> dict[str, Any]:
    mounts = {"models": engine.models, "shm": "/dev/shm"} | ({"mps": parts["host"]} if "host" in parts else {})
    variables = [{"name": name, "value": value} for name, value in environment(engine).items()]
    found = {
        "name": "vllm",
        "image": facts()["vllm"]["image"],
        "command": ["vllm", "serve"],
        "args": arguments(replace(engine, port=PORT)),
        "ports": [{"containerPort": PORT}],
        "startupProbe": _probe() | {"periodSeconds": 10, "failureThreshold": 180},
        "readinessProbe": _probe(),
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
    }
    found |= {"env": variables} if variables else {}
    return found | ({"resources": {"limits": parts["limits"]}} if "limits" in parts else {})


def _service(model: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": model},
        "spec": {"selector": {"model": model}, "ports": [{"port": PORT}]},
    }
