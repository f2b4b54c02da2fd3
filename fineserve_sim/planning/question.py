"""A plan as it is asked for, by command or by function: the wish, the target, and the kinds of GPU with their prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fineserve_sim.planning.fewest import prices_by_kind
from fineserve_sim.planning.find import SECONDS, Budget
from fineserve_sim.planning.gpus import Kind, Numbers, check, name_of
from fineserve_sim.planning.like import Like
from fineserve_sim.planning.target import Target
from fineserve_sim.planning.wish import ModelWish, Wish, rules_of


@dataclass(frozen=True, slots=True)
class Question:
    """``prices``: dollars an hour by kind of GPU, as far as they are known. ``kinds``: of which the cheapest is taken."""

    wish: Wish
    target: Target | None
    prices: Mapping[str, float]
    kinds: tuple[str, ...]


def question(
    trace: Path,
    models: tuple[ModelWish, ...],
    taken: Like | None,
    gpus: Numbers,
    types: Sequence[str],
    prices: Mapping[str, float],
    target: Target | None,
    *,
    apart: Sequence[Sequence[str]],
    pin: Mapping[str, Sequence[str | int]],
    most_per_gpu: int | None,
    survive: Literal["gpu", "node"] | None,
    **wished: Any,
) -> Question:
    """``types`` are kinds for a number of ``gpus`` alone; ``taken``: what is taken of a file; ``wished``: what else a wish has.
    Raises ValueError for what does not go together."""
    check(gpus)
    kinds = _kinds(gpus, types, target, taken)
    if isinstance(gpus, Mapping) and len(gpus) == 1:
        (gpus,) = gpus.values()
    names = tuple(map(name_of, kinds))
    known = prices_by_kind(names, prices, target)
    count = sum(gpus.values()) if isinstance(gpus, Mapping) else gpus
    rules = rules_of(apart, pin, most_per_gpu, [each.id for each in models], count, survive)
    kept = taken.kept if taken else {}
    return Question(Wish(trace, models, gpus, gpu=kinds[0], rules=rules, kept=kept, **wished), target, known, names)


def _kinds(gpus: Numbers, types: Sequence[str], target: Target | None, taken: Like | None) -> Sequence[Kind]:
    """The kinds of GPU that the question names, else the kind of the file."""
    if isinstance(gpus, Mapping):
        if types:
            raise ValueError(f"--gpu {types[0]}: --gpus names the kinds; leave it out")
        return list(gpus)
    if len(types) > 1 and target is None:
        raise ValueError(
            "--gpu: of several types of GPU the cheapest is chosen, which needs --target, the share to keep"
        )
    if not types and taken and taken.gpu is None:
        raise ValueError(f"--gpus {gpus}: --like has GPUs of several kinds; name them, as in --gpus h100-sxm:4,l40s:8")
    return types or [taken.gpu if taken and taken.gpu else "h100-sxm"]


def budget(evaluations: int | None, seconds: float | None, seed: int, **rest: Any) -> Budget:
    """What a search may take: 60 seconds where nothing is said."""
    if evaluations is None and seconds is None:
        seconds = SECONDS
    return Budget(evaluations, seconds, seed, **rest)
