"""Prism, Fig. 9: what activating a model costs."""

from __future__ import annotations

from fineserve_sim.catalog import model, precision, weight_bytes
from fineserve_sim.cluster.fleet.loader import activation_cost
from fineserve_sim.experiment.reproduce.judge import Evaluation, holds, numbers
from fineserve_sim.experiment.reproduce.registry import claim

SIZES = (("llama-3.1-8b", 1), ("qwen2.5-14b", 1), ("llama-3.1-70b", 8))
"""Models of Fig. 9 with their TP degrees: the ends and the middle."""


def _load_s(name: str, tp: int, *, pool: bool = True, parallel: bool = True) -> float:
    shard_bytes = weight_bytes(model(name), precision("W16A16"), tp)
    return activation_cost(engine_pool=pool, parallel_loading=parallel).alone_s(shard_bytes, tp)


_INPUT = "The rates of the cost model were read off these figures of the paper, so this is an input."


@claim("PR-9-small")
def load_8b() -> Evaluation:
    """Activation of an 8B model."""
    return numbers(_load_s("llama-3.1-8b", 1), detail=f"16.1 GB at 22.7 GB/s and 0.02 s of engine work. {_INPUT}")


@claim("PR-9-14b")
def load_14b() -> Evaluation:
    """Activation of a 14B model, with parallel loading and without."""
    fast, naive = (_load_s("qwen2.5-14b", 1, parallel=parallel) for parallel in (True, False))
    return numbers(fast, naive, naive / fast, detail=f"29.5 GB at 22.7 and at 4.2 GB/s. {_INPUT}")


@claim("PR-9-70b")
def load_70b() -> Evaluation:
    """Activation of a 70B model on eight GPUs."""
    return numbers(_load_s("llama-3.1-70b", 8), detail=f"Eight shards over a node that delivers 94 GB/s. {_INPUT}")


@claim("PR-9-range")
def loading_gain() -> Evaluation:
    """Plain copy against parallel loading over model sizes, engines from the pool in both cases."""
    ratios = [_load_s(name, tp, parallel=False) / _load_s(name, tp) for name, tp in SIZES]
    return numbers(
        min(ratios),
        max(ratios),
        detail=f"8B {ratios[0]:.1f}, 14B {ratios[1]:.1f}, 70B on eight GPUs {ratios[2]:.1f}: the ranks of the 70B load side by "
        "side with plain copies too.",
    )


@claim("PR-9-order")
def activation_order() -> Evaluation:
    """Both optimisations shorten every activation, and parallel loading helps the TP model least."""
    steps = [
        [_load_s(n, tp, pool=p, parallel=q) for p, q in ((False, False), (True, False), (True, True))]
        for n, tp in SIZES
    ]
    gains = [plain / fast for _, plain, fast in steps]
    return holds(
        all(cold > plain > fast for cold, plain, fast in steps) and min(gains) == gains[-1],
        "Seconds cold, with the pool, and with parallel loading: "
        + "; ".join(
            f"{name} {' > '.join(f'{s:.1f}' for s in row)}" for (name, _), row in zip(SIZES, steps, strict=True)
        )
        + ".",
    )
