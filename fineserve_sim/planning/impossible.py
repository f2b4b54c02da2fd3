"""Why no layout can give every model a place: the constraint that cannot be met, and by how much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fineserve_sim.planning.problem import Layout, Problem
from fineserve_sim.policy.interfaces import ModelDemand
from fineserve_sim.policy.placement import tp_groups

GIB = 2**30


def impossible(problem: Problem) -> str | None:
    """The constraint that cannot be met, in one line; None where no simple one forbids the wish."""
    return next(_reasons(problem), None)


def check_survives(problem: Problem, layout: Layout) -> None:
    """Raises ValueError where a loss that it must survive takes all of a model."""
    if exposed := [problem.models[model].id for model in problem.exposed(layout)]:
        raise ValueError(
            f"no plan survives the loss of a {problem.rules.survives}, as far as was searched: "
            f"one takes all of {', '.join(exposed)}"
        )


def _reasons(problem: Problem) -> Iterator[str]:
    yield from _one_engine(problem)
    yield from _too_few_for(problem)
    yield from _memory(problem)
    yield from _apart(problem)
    yield from _pinned(problem)


def _one_engine(problem: Problem) -> Iterator[str]:
    """Each model by itself."""
    largest = max(slot.memory_bytes for slot in problem.slots)
    for served, demands in zip(problem.models, problem.demands, strict=True):
        if not any(demand.engine_bytes <= largest for demand in demands):
            takes = min(demand.engine_bytes for demand in demands)
            yield (
                f"model {served.id} takes {takes / GIB:.1f} GiB of a GPU beside KV, which has {largest / GIB:.1f} GiB usable"
            )


def _memory(problem: Problem) -> Iterator[str]:
    """All models together, twice where each must have a second engine."""
    takes, has = _least_bytes(problem.demands), sum(slot.memory_bytes for slot in problem.slots)
    there = f"{len(problem.gpus)} GPUs have {has / GIB:.0f} GiB usable"
    if takes > has:
        yield f"the models take {takes / GIB:.0f} GiB beside KV, {there}"
    if (what := problem.rules.survives) and 2 * takes > has:
        yield f"two engines of each model, to survive the loss of a {what}, take {2 * takes / GIB:.0f} GiB beside KV, {there}"


def _least_bytes(models: Sequence[Sequence[ModelDemand]]) -> int:
    """The fewest bytes that an engine of each model takes of all its GPUs, without KV."""
    return sum(min(demand.tp * demand.engine_bytes for demand in demands) for demands in models)


def _too_few_for(problem: Problem) -> Iterator[str]:
    """Losses to survive, and engines on a GPU."""
    gpus, what, most = problem.gpus, problem.rules.survives, problem.rules.most_per_gpu
    if what == "node" and len({gpu.node for gpu in gpus}) < 2:
        yield f"{len(gpus)} GPUs are one node, whose loss nothing survives"
    if what == "gpu" and len(gpus) < 2:
        yield "there is one GPU, whose loss nothing survives; 2 GPUs would do"
    engines = _engines(problem) * sum(min(demand.tp for demand in demands) for demands in problem.demands)
    if most is not None and engines > most * len(gpus):
        needed = -(-engines // most)
        yield f"{engines} engines do not stand on {len(gpus)} GPUs with at most {most} on each; {needed} GPUs would do"


def _engines(problem: Problem) -> int:
    """How many engines a model needs."""
    return 2 if problem.rules.survives else 1


def _apart(problem: Problem) -> Iterator[str]:
    """Models of which each pair is apart need GPUs of their own."""
    for first in range(len(problem.models)):
        together = [first]
        for other in range(len(problem.models)):
            if all(_are_apart(problem, other, model) for model in together):
                together.append(other)
        needed = _engines(problem) * sum(min(demand.tp for demand in problem.demands[model]) for model in together)
        if needed > len(problem.gpus):
            names = ", ".join(problem.models[model].id for model in sorted(together))
            yield f"{names} share no GPU with each other and need {needed} GPUs, there are {len(problem.gpus)}"


def _are_apart(problem: Problem, one: int, other: int) -> bool:
    return frozenset((problem.models[one].id, problem.models[other].id)) in problem.rules.apart


def _pinned(problem: Problem) -> Iterator[str]:
    """What GPUs that models are pinned to do not hold."""
    pinned, bytes_of = problem.rules.pinned, {slot.id: slot.memory_bytes for slot in problem.slots}
    number = problem.number_of
    for name, gpus in pinned.items():
        if not gpus:
            yield f"{name} is pinned to GPUs that are none of these"
        where = f"{name} is pinned to GPU {', '.join(map(str, sorted(gpus)))}"
        own = [slot for slot in problem.slots if slot.id in gpus]
        degree = min(demand.tp for demand in problem.demands[number[name]])
        if not any(gpus.issuperset(group) for group in tp_groups(problem.slots, degree)):
            yield f"{where}, which hold no group of {degree} GPUs in a node"
        if problem.rules.survives and len({slot.id for slot in own}) < 2 * degree:
            yield f"{where}, and needs {2 * degree} GPUs to survive the loss of a {problem.rules.survives}"
        within = [other for other in pinned if pinned[other] <= gpus]
        takes, has = (
            _least_bytes([problem.demands[number[other]] for other in within]),
            sum(bytes_of[gpu] for gpu in gpus),
        )
        if takes > has:
            names = ", ".join(within)
            there = f"on the GPUs that they are pinned to, which have {has / GIB:.1f} GiB"
            yield f"{names} take {takes / GIB:.1f} GiB beside KV {there}"
        for other in within:
            if len(gpus) == 1 and other != name and _are_apart(problem, number[name], number[other]):
                yield f"{name} and {other} share no GPU, and both are pinned to GPU {min(gpus)}"
