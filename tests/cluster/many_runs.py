"""Random clusters of all kinds in turn until enough engine steps are counted: what they went through, and any law broken.

    python tests/cluster/many_runs.py [--steps 1000000] [--kinds swap,qlm] [--first-seed 0]

Each cluster runs merged, plain, again, and some beside a static twin; the counts are those of the merged runs. Exit status 1
when a law is broken: the line names kind and seed, and ``randomkit.scenario_of(kind, seed)`` is the cluster.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from itertools import count

from lawkit import counting_swaps
from randomkit import KINDS, judged

from fineserve_sim.cluster import ScenarioError

COLUMNS = (
    *("runs", "misfits", "requests", "finished", "dropped", "rejected", "unfinished", "steps", "preemptions", "swaps"),
    *("faults", "drops", "restores", "migrations", "activations", "evictions", "broken"),
)


def run(kinds: list[str], steps: int, first_seed: int) -> dict[str, Counter[str]]:
    """The counts of each kind, one seed of each after the other."""
    totals: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    for seed in count(first_seed):
        for kind in kinds:
            totals[kind].update(_one(kind, seed))
        if sum(total["steps"] for total in totals.values()) >= steps:
            return totals
    raise AssertionError("seeds never end")


def _one(kind: str, seed: int) -> Counter[str]:
    with counting_swaps() as swaps:
        try:
            verdict = judged(kind, seed)
        except ScenarioError:
            return Counter(misfits=1)
    for law, problem in verdict.broken.items():
        print(f"{kind} {seed} breaks {law}: {problem}", flush=True)
    return verdict.counts + swaps + Counter(broken=int(bool(verdict.broken)))


def show(totals: dict[str, Counter[str]]) -> None:
    """A line a kind; ``swaps`` are of all runs of a cluster, and ``broken`` counts clusters."""
    rows = {**totals, "all": sum(totals.values(), Counter())}
    width = [max(len(name), *(len(str(row[name])) for row in rows.values())) for name in COLUMNS]
    print("kind".ljust(10), *(name.rjust(size) for name, size in zip(COLUMNS, width, strict=True)))
    for kind, row in rows.items():
        print(kind.ljust(10), *(str(row[name]).rjust(size) for name, size in zip(COLUMNS, width, strict=True)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000, help="engine steps to count over all kinds")
    parser.add_argument("--kinds", default=",".join(KINDS), help="separated by commas; all if not given")
    parser.add_argument("--first-seed", type=int, default=0)
    args = parser.parse_args(arguments)
    kinds = args.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"there is no kind {unknown[0]}; expected {', '.join(KINDS)}")
    totals = run(kinds, args.steps, args.first_seed)
    show(totals)
    return 1 if any(total["broken"] for total in totals.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
