"""Builds a ready cluster of several models with roles: engines that prefill, decode, or do both, beside others on their GPUs.

The placement's engines of a model, in its order, are divided as ``DisaggregatedSpec`` says. A model with one engine keeps both
roles there. Each engine has a private pool, and its GPUs' SMs are shared as everywhere.
"""

from __future__ import annotations

from functools import partial

from fineserve_sim.cluster.compose.models import Builder, cluster_of
from fineserve_sim.cluster.compose.place import Placed
from fineserve_sim.cluster.engine.state import Seat
from fineserve_sim.cluster.fleet.migrate import Handovers, Home
from fineserve_sim.cluster.host import Scope
from fineserve_sim.cluster.run import Parts
from fineserve_sim.cluster.samples import Column
from fineserve_sim.cluster.scenario import Scenario
from fineserve_sim.cluster.sharing.domain import domains_of
from fineserve_sim.policy.groups.dispatch import GroupEngine, Phase, dispatcher
from fineserve_sim.policy.groups.roles import split_of
from fineserve_sim.policy.groups.several import RoleModel, RolesController
from fineserve_sim.policy.interfaces import EngineLoad
from fineserve_sim.systems.spec import DisaggregatedSpec


def compose_roles(scenario: Scenario, placed: Placed) -> Parts:
    """The engines of the placement with their roles, for a scenario that ``check_groups`` accepts. Raises ScenarioError for a
    memory that cannot be."""
    spec, dispatch = scenario.system.roles, scenario.system.dispatch
    assert spec is not None and dispatch is not None
    build = Builder(scenario, placed)
    gpus_of = [instance.gpus for instance in build.placement.instances]
    seats = build.seats()
    models = [_role_model(id, [seat for seat in seats if seat.model == id], spec) for id in build.served]
    controller = RolesController(models, partial(dispatcher, **dispatch.model_dump()))
    cluster = cluster_of(scenario, build.clock, controller, build.contention, build.links)
    engines = [build.engine(seat, cluster, alone=False) for seat in seats]
    for model in models:
        for prefills in model.prefill if model.decode else ():
            engines[prefills.id].hands_over = True
            engines[prefills.id].yields = spec.first_token == "prefill"
        for engine in engines:
            if engine.model == model.id:
                engine.max_tokens = min(engine.max_tokens, model.max_tokens)
    cluster.connect(engines, domains_of(engines, gpus_of, build.managers), [Scope((seat.engine,)) for seat in seats])
    for engine in engines:
        cluster.touch(engine)
    token_bytes = {id: build.token_bytes(id) for id in build.served}
    Handovers(cluster, lambda engine: Home(gpus_of[engine.index], token_bytes[engine.model]), spec.setup_s)
    columns = [Column(engine.model, partial(tuple, (engine,)), lambda: 0) for engine in engines]
    capacities = tuple(build.managers[gpu].ledger().total_bytes for gpu in sorted(build.managers))
    return build.parts(cluster, columns, capacities)


def _role_model(id: str, seats: list[Seat], spec: DisaggregatedSpec) -> RoleModel:
    """The model with these seats. Seats that hold no sequence get no requests."""
    able = [seat for seat in seats if seat.able]
    prefill = len(able) if len(able) < 2 else split_of(len(able), spec.prefill, spec.decode)
    engines = [
        GroupEngine(seat.engine, (seat.engine,), Phase.SERVING, EngineLoad(0, 0), seat.max_tokens) for seat in able
    ]
    longest = [max(one.holds_tokens for one in role) for role in (engines[:prefill], engines[prefill:]) if role]
    block_tokens = seats[0].settings.block_tokens if seats else 1
    return RoleModel(id, min(longest, default=0), block_tokens, engines[:prefill], engines[prefill:])
