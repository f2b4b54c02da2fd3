"""QLM (a baseline of Prism): GPUs are shared in time, one model at a time on each, by groups of requests.

A *worker* is a GPU or TP group with one engine that has all its memory. Requests of a model that no engine serves form a
*group*, which enters the queue of a random worker. When a worker has served its group, it swaps to the model of the group
at the head of its queue. If its queue is empty, it takes the first group that waits anywhere. While a group is served,
further requests of its model join it, without a limit on the batch.

A worker estimates when each group is served, from the requests ahead of it, the throughput of each model and the swaps between
models. When that breaks a deadline, the worker orders its groups by deadline; a group is served while its model has requests
(``goes_on``), for QLM's text reorders groups and closes none. With ``service="closes"`` the worker also closes the group in
service: later requests of that model form a new group.

A closed group first finishes the requests that its engine has. With ``running="requeue"`` (the later public version) every
group in service closes; its engine stops at once, and its requests start again elsewhere. In the order of deadlines, these
requests would often come back at once. So a group is then served at least as long as a swap takes.

A swap stops an engine and starts another, tens of seconds during which the GPU holds no KV (Prism, Fig. 3).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Literal

from fineserve_sim.policy.fleet.views import EngineView, FleetView, Pending, Start, Status, Stop, Suggestion
from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand
from fineserve_sim.policy.placement import tp_groups


class QlmSwapping:
    """QLM as a residency policy: the requests that the controller holds are its groups.

    ``models`` by id, with profiles. ``swap_s``: seconds between serving two models. Raises ValueError for an unknown option,
    a model without a profile, and when the GPUs do not suffice for a worker of every TP degree.
    """

    def __init__(
        self,
        models: Mapping[str, ModelDemand],
        gpus: Sequence[GpuSlot],
        *,
        swap_s: float = 30.0,
        running: Literal["finish", "requeue"] = "finish",
        service: Literal["closes", "goes_on"] = "goes_on",
    ) -> None:
        if service not in ("closes", "goes_on"):
            raise ValueError(f"service is {service!r}: use 'closes' or 'goes_on'")
        if running not in ("finish", "requeue"):
            raise ValueError(f"running is {running!r}: use 'finish' or 'requeue'")
        if swap_s < 0:
            raise ValueError(f"swap_s is {swap_s}: a swap cannot take less than no time")
        self._models = dict(models)
        for id, model in models.items():
            if not model.profile:
                raise ValueError(f"model {id} has no profile, which QLM's estimates need")
        self._workers = partition_workers(list(models.values()), gpus)
        kind_of = {gpu.id: gpu.kind for gpu in gpus}
        per_s = {kind: {id: model.on(kind).most_per_s for id, model in models.items()} for kind in kind_of.values()}
        self._throughput_per_s = [per_s[kind_of[worker[0]]] for worker in self._workers]
        self._memory_bytes = {gpu.id: gpu.memory_bytes for gpu in gpus}
        self._queues: list[list[str]] = [[] for _ in self._workers]
        self._swapped_s = [float("-inf")] * len(self._workers)  # when the last swap began
        self._swap_s = swap_s
        self._finishes, self._may_close = running == "finish", service == "closes" or running == "requeue"
        self._random = Random(0)  # of the worker for a new group: "a random worker", the same in every run

    def suggest(self, now: float, view: FleetView) -> list[Suggestion]:
        """The next step of each worker. Costs a step for each engine and worker, and for an idle worker one for each queue."""
        groups = {pending.model: pending for pending in view.pending}
        self._sort_in(groups)
        taken: set[str] = set()  # models that a worker swaps to
        suggestions: list[Suggestion] = []
        engines_on: defaultdict[int, list[EngineView]] = defaultdict(list)
        for engine in view.engines:  # those of the first placement may lie across workers
            for gpu in engine.gpus:
                engines_on[gpu].append(engine)
        for worker, gpus in enumerate(self._workers):
            if not view.free_bytes.keys() >= set(gpus):
                continue  # a GPU is lost
            here = [*{engine.engine: engine for gpu in gpus for engine in engines_on[gpu]}.values()]
            late = self._is_late(now, worker, here, groups)
            if late:
                self._queues[worker].sort(key=lambda model: self._deadline_s(groups[model]))
            suggestions += self._serve(now, worker, here, taken, closes=late and self._may_close)
        return suggestions

    def _sort_in(self, groups: Mapping[str, Pending]) -> None:
        """Groups that are served or were given up leave the queues; new ones enter one."""
        for queue in self._queues:
            queue[:] = [model for model in queue if model in groups]
        queued = {model for queue in self._queues for model in queue}
        for model in groups:
            able = [worker for worker in range(len(self._workers)) if self._fits(model, worker)]
            if able and model not in queued:
                self._queues[self._random.choice(able)].append(model)

    def _fits(self, model: str, worker: int) -> bool:
        """Whether the worker has the model's size, and memory for KV beside its engine."""
        demand, gpus = self._models[model], self._workers[worker]
        return len(gpus) == demand.tp and all(self._memory_bytes[gpu] > demand.weight_bytes for gpu in gpus)

    def _is_late(self, now: float, worker: int, here: Sequence[EngineView], groups: Mapping[str, Pending]) -> bool:
        """Whether a group in this queue would be served after its deadline."""
        throughput_per_s = self._throughput_per_s[worker]
        end_s = now + sum([engine.requests / throughput_per_s[engine.model] for engine in here])
        if any(engine.status is Status.LOADING for engine in here):
            end_s += max(0.0, self._swapped_s[worker] + self._swap_s - now)
        for model in self._queues[worker]:
            end_s += self._swap_s + groups[model].requests / throughput_per_s[model]
            if end_s > self._deadline_s(groups[model]):
                return True
        return False

    def _deadline_s(self, group: Pending) -> float:
        return group.oldest_arrival_s + self._models[group.model].slo_s

    def _serve(
        self, now: float, worker: int, here: Sequence[EngineView], taken: set[str], *, closes: bool
    ) -> Iterator[Suggestion]:
        """The next step of the worker; ``closes`` ends the group in service. When it is idle it takes the head of its queue,
        else the first group that waits anywhere and fits."""
        if any(engine.status is not Status.RESIDENT for engine in here):
            return
        busy = [engine for engine in here if engine.requests]
        if busy:
            if closes and (self._finishes or now - self._swapped_s[worker] >= 2 * self._swap_s):
                yield from (Stop(engine.engine, drain=self._finishes) for engine in busy)
            return
        waiting = (model for queue in (self._queues[worker], *self._queues) for model in queue if model not in taken)
        model = next((model for model in waiting if self._fits(model, worker)), None)
        if model is not None:
            taken.add(model)
            self._swapped_s[worker] = now
            yield from (Stop(engine.engine) for engine in here)
            yield Start(model, self._workers[worker])


def partition_workers(models: Sequence[ModelDemand], gpus: Sequence[GpuSlot]) -> list[tuple[int, ...]]:
    """The GPUs cut into workers: aligned groups of the TP degrees that the models have, larger degrees first.

    Every degree gets GPUs in proportion to the weights of its models, one group at least. The smallest degree gets the rest.
    QLM does not say how workers of several sizes share GPUs; this is our choice. Raises ValueError if a degree has no group.
    """
    bytes_of: defaultdict[int, int] = defaultdict(int)
    for model in models:
        bytes_of[model.tp] += model.weight_bytes * model.tp
    degrees = sorted(bytes_of, reverse=True)
    free = list(gpus)
    workers: list[tuple[int, ...]] = []
    for turn, tp in enumerate(degrees):
        groups = tp_groups(free, tp)
        smaller = degrees[turn + 1 :]
        if smaller:
            share = round(bytes_of[tp] / sum(bytes_of.values()) * len(gpus) / tp)
            most = (len(free) - sum(smaller)) // tp
            groups = groups[: min(max(1, share), most)] if most > 0 else []
        if not groups:
            raise ValueError(f"QLM needs a worker of {tp} GPUs of one node beside those for other TP degrees")
        workers += groups
        used = {gpu for group in groups for gpu in group}
        free = [gpu for gpu in free if gpu.id not in used]
    return workers
