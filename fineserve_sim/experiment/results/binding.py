"""What binds a cell: for every model's misses, what kept its requests waiting on the GPUs where it is.

Requests that are turned away for want of an instance miss by the *placement*; those whose prompt no engine can hold by *KV
memory*. Where an idle engine would be too late as well, it is the *prompt* itself. For all others the GPUs of the model
decide. Where requests wait at a fifth of all looks or more, it is *KV memory* or *slots*, if short at half of these looks at
least. If neither is, it is what the steps in flight need more of, *compute* or memory *bandwidth*. Where requests hardly wait,
there are three causes. Dropped requests miss by the *policy*'s own rule, slow ones by what their steps need, and late ones by
*bursts* too short for the queue to be seen. A model that had no instance at the start, but got one, waited for its *weights*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

QUEUE = 0.2
"""Requests that wait at so many looks wait for a resource; at fewer it is chance."""

Cell = Mapping[str, Any]
Use = Mapping[str, float]


def binds(models: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What binds, the most misses first: each with its misses, models and GPUs, and how often requests wait on those.
    ``models`` and ``gpus`` as a cell of summary.json has them."""
    found: dict[str, dict[str, Any]] = {}
    for name, model in models.items():
        places = sorted({gpu for instance in model["instances"] for gpu in instance})
        for what, misses in _causes(model, [gpus[gpu] for gpu in places]).items():
            if misses:
                entry = found.setdefault(what, {"what": what, "misses": 0, "models": {}, "gpus": []})
                entry["misses"] += misses
                entry["models"][name] = misses
                if what not in ("placement", "prompt"):
                    entry["gpus"] = sorted({*entry["gpus"], *places})
    entries = sorted(found.values(), key=lambda entry: -entry["misses"])
    return [entry | {"waiting": _mean([gpus[gpu] for gpu in entry["gpus"]], "waiting")} for entry in entries]


def _causes(model: Mapping[str, Any], gpus: Sequence[Use]) -> dict[str, int]:
    """Misses of one model by what binds."""
    missed = model["misses"]
    queued = sum(missed[cause] for cause in ("late", "slow", "overdue", "dropped", "unfinished"))
    causes = {
        "prompt": missed["prompt"],
        "placement": missed["unplaced"],
        "KV memory": missed["rejected"] + missed["cut_memory"],
        "context": missed["cut_context"],
    }
    what = _resource(missed, gpus, queued) if gpus else "weights"
    return causes | {what: causes.get(what, 0) + queued}


def _resource(missed: Mapping[str, int], gpus: Sequence[Use], queued: int) -> str:
    waiting = _mean(gpus, "waiting")
    busiest = "compute" if _mean(gpus, "compute") > _mean(gpus, "bandwidth") else "bandwidth"
    if waiting >= QUEUE:
        if _mean(gpus, "kv_short") >= waiting / 2:
            return "KV memory"
        return "slots" if _mean(gpus, "slots_short") >= waiting / 2 else busiest
    if 2 * missed["dropped"] >= queued:
        return "policy"
    return busiest if 2 * missed["slow"] >= queued else "bursts"


def _mean(gpus: Sequence[Use], name: str) -> float:
    return sum(gpu[name] for gpu in gpus) / len(gpus) if gpus else 0.0
