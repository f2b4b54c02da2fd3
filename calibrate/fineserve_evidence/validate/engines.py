"""Engines of the simulator under recorded arrivals, or under clients that wait for their answers.

Engines, memory managers and contention are the same as in ``fineserve_sim.cluster.simulate``. A client of a closed loop sends
its next request at the moment the last one ends. So an engine that plans its next step then does not see the request yet, as
with a real client.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fineserve_evidence.validate.cases import Floats, Ints
from fineserve_evidence.validate.front_end import Desk, FrontEnd
from fineserve_sim.catalog import data_ranks
from fineserve_sim.cluster.clock import Clock
from fineserve_sim.cluster.compose.memory import engine_kv
from fineserve_sim.cluster.engine.links import Links
from fineserve_sim.cluster.engine.loop import Engine
from fineserve_sim.cluster.engine.ranks import Rank, Together
from fineserve_sim.cluster.engine.seating import seated
from fineserve_sim.cluster.engine.sequence import Prefix
from fineserve_sim.cluster.engine.spans import Spans, Wakeups
from fineserve_sim.cluster.engine.state import Seat
from fineserve_sim.cluster.fleet.migrate import Handovers, Home
from fineserve_sim.cluster.host import ARRIVAL, Cluster, Scope
from fineserve_sim.cluster.run import WholeTrace
from fineserve_sim.cluster.scenario import EngineSettings, Gpu
from fineserve_sim.cluster.sharing.contention import Contention
from fineserve_sim.cluster.sharing.domain import domains_of
from fineserve_sim.latency import StepModel
from fineserve_sim.latency.sharing import LAWS, SharingLaw
from fineserve_sim.policy.controller import Controller, Route
from fineserve_sim.policy.groups.dispatch import GroupEngine, Phase, dispatcher
from fineserve_sim.policy.groups.several import RoleModel, RolesController
from fineserve_sim.policy.interfaces import EngineLoad, Request
from fineserve_sim.policy.memory.geometry import plan_slabs
from fineserve_sim.policy.memory.paged import GpuMemory, PrivatePools
from fineserve_sim.policy.memory.slab import KVSlabManager

Role = Literal["both", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Instance:
    """One engine: the model that it serves, its GPU, and its KV memory on each GPU of its TP group.

    ``group``: data-parallel ranks of one group step together. ``node``: engines that ``prefill`` hand requests over to engines
    that ``decode`` by a link of the node, or by the network.
    """

    model: int
    gpu: int
    step: StepModel
    kv_bytes: int
    block_bytes: int
    role: Role = "both"
    group: int = 0
    node: int = 0


MakeMemory = Callable[[Mapping[int, Instance]], GpuMemory]
"""The KV memory of the engines of one GPU."""


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Columns of shape (n,): the model of each request, its prompt and output tokens."""

    model: Ints
    prompt_tokens: Ints
    output_tokens: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """Seconds, shape (n,): NaN where a moment never came."""

    arrival_s: Floats
    first_token_s: Floats
    finish_s: Floats

    @property
    def ttft_s(self) -> Floats:
        return self.first_token_s - self.arrival_s

    def tpot_s(self, output_tokens: Ints) -> Floats:
        """Compute the mean seconds a token after the first; NaN for outputs of one token."""
        gaps = np.where(output_tokens > 1, output_tokens - 1, np.nan)
        result: Floats = (self.finish_s - self.first_token_s) / gaps
        return result


class EngineRun:
    """One run over ``instances``. ``setup_s``: of each request that is handed over to an engine that decodes.

    With ``shared_kv``, the engines of a GPU draw on one memory of all their bytes. ``sharing`` is the law of their pace, and
    ``sm_share`` the part of the SMs that each may take. With ``prefixes``, one a request, engines have pools of their own that
    cache them. A ``front_end`` stands before one engine in a closed loop; times are then the clients'.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        requests: Requests,
        settings: EngineSettings,
        *,
        shared_kv: bool = False,
        sharing: str = "fluid",
        sm_share: float = 1.0,
        prefixes: Sequence[Prefix] = (),
        front_end: FrontEnd | None = None,
        setup_s: float = 0.0,
    ) -> None:
        n = len(requests.prompt_tokens)
        self._requests = requests
        self._arrival_s = np.full(n, np.nan)
        self._front_end = front_end
        self._clock, self._ended = Clock(), WholeTrace(n)
        memory, law, caches = _shared if shared_kv else _private, LAWS[sharing], bool(prefixes)
        merging = front_end is None  # which must see the tokens of each step
        self._cluster = _connect(
            instances, settings, self._clock, memory, law, sm_share, caches=caches, merging=merging
        )
        if any(instance.role != "both" for instance in instances):
            _hand_over(self._cluster, instances, settings.block_tokens, setup_s)
        self._outcomes = self._cluster.outcomes
        self._prefixes = prefixes

    def open_loop(self, arrival_s: Floats, most_under_way: int = 0) -> Times:
        """Run with request i sent at ``arrival_s[i]``, non-decreasing, or when fewer than ``most_under_way`` are under way,
        whichever is later; 0: any number may be."""
        due_s = arrival_s.tolist()
        first = most_under_way or len(due_s)
        left = iter(range(first, len(due_s)))
        for index, at_s in enumerate(due_s[:first]):
            self._clock.at(at_s, ARRIVAL, self._arrival(index))

        def answered(_: int, now: float) -> None:
            index = next(left, None)
            if index is not None:
                self._clock.at(max(now, due_s[index]), ARRIVAL, self._arrival(index))

        self._outcomes.begin(len(due_s), self._ended, answered)
        while self._outcomes.open:
            self._clock.step()
        return self._times()

    def closed_loop(self, clients: int, start_gap_s: float = 0.0) -> Times:
        """Run with the first ``clients`` requests of each model ``start_gap_s`` one after another. Each later one comes when
        one of its model ends."""
        if self._front_end is not None:
            return self._through(Desk(self._front_end), clients, start_gap_s)
        model, left = self._requests.model, {}
        for each in np.unique(model).tolist():
            rows = np.flatnonzero(model == each).tolist()
            left[each] = iter(rows[clients:])
            for number, index in enumerate(rows[:clients]):
                self._clock.at(number * start_gap_s, ARRIVAL, self._arrival(index))

        def answered(request: int, now: float) -> None:
            index = next(left[int(model[request])], None)
            if index is not None:
                self._clock.at(now, ARRIVAL, self._arrival(index))

        self._outcomes.begin(len(model), self._ended, answered)
        while self._outcomes.open:
            self._clock.step()
        return self._times()

    def _through(self, desk: Desk, clients: int, start_gap_s: float) -> Times:
        """As ``closed_loop``, with requests and tokens that pass the front end."""
        total, prompts = len(self._arrival_s), self._requests.prompt_tokens.tolist()
        sent_s = np.full(total, np.nan)
        (engine,) = self._cluster.engines.values()
        (lane,) = engine.lanes
        sent = 0

        def send(requests: int, now: float) -> None:
            nonlocal sent
            for index in range(sent, min(sent + requests, total)):
                sent_s[index] = now
                self._clock.at(max(desk.take(now, prompts[index]), self._clock.now), ARRIVAL, self._arrival(index))
                sent += 1

        for client in range(min(clients, total)):
            send(1, client * start_gap_s)
        self._outcomes.begin(total, self._ended)
        open_requests = total
        while self._outcomes.open:
            tokens = engine.batch_of(lane)[-1] if lane.launched else 0
            iterations = engine.iterations
            self._clock.step()
            if engine.iterations > iterations:
                seen_s = desk.hand_out(self._clock.now, tokens)
                send(open_requests - self._outcomes.open, seen_s)
                open_requests = self._outcomes.open
        times = self._times()
        return Times(sent_s, desk.seen(times.first_token_s), desk.seen(times.finish_s))

    def _arrival(self, index: int) -> Callable[[float], None]:
        def arrive(now: float) -> None:
            self._arrival_s[index] = now
            prompt, model = int(self._requests.prompt_tokens[index]), str(self._requests.model[index])
            output = int(self._requests.output_tokens[index])
            prefix = self._prefixes[index] if self._prefixes else None
            self._cluster.arrive(Request(index, model, now, prompt), output, now, prefix)

        return arrive

    def _times(self) -> Times:
        self._outcomes.close(self._outcomes.last_end_s)
        return Times(self._arrival_s, self._ended.first_token_s, self._ended.finish_s)


def _connect(
    instances: Sequence[Instance],
    settings: EngineSettings,
    clock: Clock,
    memory: MakeMemory,
    law: SharingLaw,
    sm_share: float,
    *,
    caches: bool,
    merging: bool,
) -> Cluster:
    contention = Contention({instance.gpu: law for instance in instances})
    for index, instance in enumerate(instances):
        contention.join(index, (instance.gpu,), sm_share)
    managers = {
        gpu: memory({index: i for index, i in enumerate(instances) if i.gpu == gpu})
        for gpu in sorted({instance.gpu for instance in instances})
    }
    kvs = [
        engine_kv(index, [managers[i.gpu]], settings.block_tokens, caches=caches) for index, i in enumerate(instances)
    ]
    limits = [min(i.step.model.max_context_tokens, kv.capacity_tokens()) for i, kv in zip(instances, kvs, strict=True)]
    scopes = [Scope((index,)) for index in range(len(instances))]
    contexts = {str(instance.model): instance.step.model.max_context_tokens for instance in instances}
    cluster = Cluster(clock, _controller(instances, limits, settings), contention, contexts, merging=merging)
    wakeups = {gpu: Wakeups(clock) for gpu in managers}
    seats = [
        Seat(index, str(i.model), i.step, kvs[index], limits[index], settings) for index, i in enumerate(instances)
    ]
    engines = [seated(seat, cluster) for seat in seats]
    groups: defaultdict[int, Together] = defaultdict(lambda: Together(clock))
    for engine, instance in zip(engines, instances, strict=True):
        if data_ranks(instance.step.model) > 1:
            Rank(engine, groups[instance.group])
        else:
            Spans(engine, wakeups[instance.gpu], shares_gpu=contention.contended(engine.index))
    cluster.connect(engines, domains_of(engines, [(i.gpu,) for i in instances], managers), scopes)
    return cluster


def _controller(instances: Sequence[Instance], limits: Sequence[int], settings: EngineSettings) -> Controller:
    """Turns among the engines of a model; with roles, prompts go where the fewest wait."""
    places = list(enumerate(zip(instances, limits, strict=True)))
    if all(instance.role == "both" for instance in instances):
        routes: dict[str, list[Route]] = {}
        for index, (instance, limit) in places:
            routes.setdefault(str(instance.model), []).append(Route(index, 1.0, limit))
        return Controller(routes)
    prefill, decode = (
        [
            GroupEngine(index, (index,), Phase.SERVING, EngineLoad(0, 0), limit)
            for index, (instance, limit) in places
            if instance.role == role
        ]
        for role in ("prefill", "decode")
    )
    longest = min(max(engine.holds_tokens for engine in role) for role in (prefill, decode))
    model = RoleModel(str(instances[0].model), longest, settings.block_tokens, prefill, decode)
    return RolesController([model], lambda: dispatcher("least_queued"))


def _hand_over(cluster: Cluster, instances: Sequence[Instance], block_tokens: int, setup_s: float) -> None:
    """Engines that prefill hand over to those that decode, each GPU of a TP group its part of the KV."""
    cluster.links = Links(cluster.clock, [Gpu(i.gpu, i.node, i.step.gpu) for i in instances])
    for index, engine in cluster.engines.items():
        engine.hands_over = instances[index].role == "prefill"
        cluster.touch(engine)

    def home_of(engine: Engine) -> Home:
        instance = instances[engine.index]
        return Home((instance.gpu,), instance.block_bytes / block_tokens)

    Handovers(cluster, home_of, setup_s)


def _pools(here: Mapping[int, Instance]) -> dict[int, tuple[int, int]]:
    return {index: (instance.block_bytes, instance.kv_bytes) for index, instance in here.items()}


def _private(here: Mapping[int, Instance]) -> GpuMemory:
    return PrivatePools(_pools(here))


def _shared(here: Mapping[int, Instance]) -> GpuMemory:
    owners = {index: instance.block_bytes for index, instance in here.items()}
    return KVSlabManager(sum(i.kv_bytes for i in here.values()), owners, plan=plan_slabs(owners.values()))
