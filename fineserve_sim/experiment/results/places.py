"""Where everything is: which GPU holds which models, the bytes of their weights and of KV, and models without a place.

The bytes come from the cluster itself (``cluster/compose/memory.py``): usable memory, less weights, activations and the
context of each engine, is KV memory. Where models come and go it is the placement at the start.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import numpy as np

from fineserve_sim.catalog import weight_bytes
from fineserve_sim.cluster import GpuUse, ServedModel
from fineserve_sim.cluster.compose.memory import fixed_bytes, kinds_of, usable_bytes
from fineserve_sim.experiment.file.degrees import AUTO, least_degree
from fineserve_sim.experiment.file.resolve import Setup
from fineserve_sim.experiment.run.run_data import RunData
from fineserve_sim.policy.groups.drop_plan import even_split
from fineserve_sim.policy.memory.ledger import MemoryLedger
from fineserve_sim.systems.spec import DedicatedPlacementSpec, SystemSpec

_GIB = 2**30


class Places:
    """One placement of one setup, as a run's stored JSON has it: ``instances`` with model, replica and GPUs, ``unplaced``.
    ``system``: whose it is, where that matters."""

    def __init__(self, setup: Setup, placement: Mapping[str, Any], system: SystemSpec | None = None) -> None:
        self._setup = setup
        execution = system.execution if system is not None else None
        self._stages = 1 if execution is None else execution.stages
        self._apart = system if system is not None and isinstance(system.placement, DedicatedPlacementSpec) else None
        self._placement = placement
        self.served = {
            model.id: ServedModel(
                model.id, model.spec, model.precision, least_degree(setup, model), 0.0, math.inf, 0.0, 0.0
            )
            for model in setup.models
        }
        self._auto = {model.id for model in setup.models if model.entry.tp == AUTO}
        self.usable_bytes = [usable_bytes(gpu, setup.engine) for gpu in setup.gpus]

    @property
    def instances(self) -> Sequence[Mapping[str, Any]]:
        found: Sequence[Mapping[str, Any]] = self._placement["instances"]
        return found

    def weight_bytes(self, model: str, gpus: int = 0) -> int:
        """Weights of the model on each of its GPUs; of an instance on ``gpus`` of them, whose degree the placement may have
        chosen."""
        served = self._served(model, gpus)
        return weight_bytes(served.model, served.precision, served.tp)

    def fixed_bytes(self, model: str, gpus: int = 0) -> int:
        """All that an engine of the model needs of each of its GPUs before any KV; ``gpus`` as above."""
        return fixed_bytes(self._served(model, gpus), self._setup.engine)

    def _served(self, model: str, gpus: int) -> ServedModel:
        served = self.served[model]
        return replace(served, tp=gpus) if gpus and model in self._auto else served

    def _bytes_of(self, instance: Mapping[str, Any]) -> tuple[int, int]:
        """Weights, and all that is taken before any KV, on each GPU of an instance. A stage of a pipeline has its layers alone,
        those outside the layers spread over them."""
        model, gpus = instance["model"], len(instance["gpus"])
        weights, layers = self.weight_bytes(model, gpus), self.served[model].model.layers
        own = even_split(layers, self._stages)[instance["replica"] % self._stages]
        elsewhere = weights - weights * len(own) // layers
        return weights - elsewhere, self.fixed_bytes(model, gpus) - elsewhere

    @cached_property
    def left_bytes(self) -> list[int]:
        """By GPU, what its engines leave for KV."""
        ledger = MemoryLedger(dict(enumerate(self.usable_bytes)))
        for number, instance in enumerate(self.instances):
            ledger.claim(number, instance["gpus"], self._bytes_of(instance)[1])
        return [ledger.left_bytes(gpu) for gpu in range(len(self.usable_bytes))]

    def on(self, gpu: int) -> list[Mapping[str, Any]]:
        """The instances on a GPU."""
        return [instance for instance in self.instances if gpu in instance["gpus"]]

    def rows(self) -> list[dict[str, Any]]:
        """One row an instance and GPU, then one a model without a place, whose GPU is null."""
        placed = [
            {
                "model": instance["model"],
                "replica": instance["replica"],
                "gpu": gpu,
                "tp": len(instance["gpus"]),
                **dict(zip(("weights_bytes", "fixed_bytes"), self._bytes_of(instance), strict=True)),
                "why": "",
            }
            for instance in self.instances
            for gpu in instance["gpus"]
        ]
        return placed + [
            {
                "model": entry["model"],
                "replica": None,
                "gpu": None,
                "tp": self.served[entry["model"]].tp,
                "weights_bytes": self.weight_bytes(entry["model"]),
                "fixed_bytes": self.fixed_bytes(entry["model"]),
                "why": entry["why"],
            }
            for entry in self.unplaced()
        ]

    def unplaced(self) -> list[dict[str, str]]:
        """Models without an instance, each with the reason."""
        return [{"model": model, "why": self._why(model)} for model in self._placement["unplaced"]]

    def _why(self, model: str) -> str:
        need, gpus = self.fixed_bytes(model), len(self.usable_bytes)
        if self._apart is not None and (own := sum(served.tp * served.ranks for served in self.served.values())) > gpus:
            count = len(self.served)
            return f"{self._apart.title} shares no GPU: the {count} models need {own} of their own, there are {gpus}"
        everything = sum(self.fixed_bytes(name) * served.tp * served.ranks for name, served in self.served.items())
        if everything > sum(self.usable_bytes):
            return (
                f"one instance of each of the {len(self.served)} models needs {_gib(everything)}, "
                f"{gpus} GPU{'s have' if gpus > 1 else ' has'} {_gib(sum(self.usable_bytes))}"
            )
        most = max(self.left_bytes)
        together = self.served[model].tp * self.served[model].ranks
        needs = f"it needs {_gib(need)}" + f" on each of {together} GPUs" * (together > 1)
        copies = Counter(instance["model"] for instance in self.instances)
        several = ", ".join(f"{count} of {name}" for name, count in copies.items() if count > 1)
        after = f" after the placement's {several}" if several else ""
        if need > most:
            return f"{needs}, the most left on a GPU is {_gib(most)}{after}"
        return f"{needs}, up to {_gib(most)} are left on a GPU{after}, too little with the KV memory that the placement wants"

    def gpus(self, gpu_use: Sequence[GpuUse], kv_left: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """One entry a GPU: its models, and how its time and memory were used until the last arrival. ``kv_left``: mean and
        least free bytes of each GPU with KV memory."""
        uses = {use.gpu: use for use in gpu_use}
        known = zip(self._kv_gpus(len(kv_left)), kv_left, strict=False)
        left = {gpu: {"kv_left_bytes": mean, "kv_least_bytes": least} for gpu, (mean, least) in known}
        several = len(kinds_of(self._setup.gpus)) > 1
        return [
            {
                "gpu": gpu.id,
                **({"kind": gpu.spec.name} if several else {}),
                "node": gpu.node,
                "models": [instance["model"] for instance in self.on(gpu.id)],
                "weights_bytes": sum(self._bytes_of(each)[0] for each in self.on(gpu.id)),
                "usable_bytes": self.usable_bytes[gpu.id],
                "kv_bytes": self.left_bytes[gpu.id],
                **left.get(gpu.id, {"kv_left_bytes": None, "kv_least_bytes": None}),
                **{name: value for name, value in asdict(uses.get(gpu.id, GpuUse(gpu.id))).items() if name != "gpu"},
            }
            for gpu in self._setup.gpus
        ]

    def _kv_gpus(self, number: int) -> list[int]:
        """Which GPUs have KV memory, if so many have: all, or those with an instance; none where it is another number."""
        found = sorted({gpu for instance in self.instances for gpu in instance["gpus"]})
        every = list(range(len(self.usable_bytes)))
        return next((gpus for gpus in (every, found) if len(gpus) == number), [])


def kv_left(run: RunData) -> list[tuple[int, int]]:
    """The free KV bytes of each GPU with KV memory, over the samples in the window: their mean and their least."""
    start_s, end_s = run.window_s
    rows = (run.sample_s >= start_s) & (run.sample_s <= end_s)
    if not rows.any():
        return []
    seen = run.gpu_free_bytes[rows]
    return [(int(np.mean(seen[:, at])), int(np.min(seen[:, at]))) for at in range(seen.shape[1])]


def mean_over_seeds(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The entries of the GPUs of several runs as one: the models of the first, means of all numbers that are known."""
    merged = []
    for entries in zip(*runs, strict=True):
        first = dict(entries[0])
        for name in first.keys() - {"gpu", "kind", "node", "models"}:
            known = [entry[name] for entry in entries if entry[name] is not None]
            if known:
                mean = sum(known) / len(known)
                first[name] = int(mean) if name.endswith("_bytes") else mean
        merged.append(first)
    return merged


def _gib(bytes: int) -> str:
    return f"{bytes / _GIB:.1f} GiB"
