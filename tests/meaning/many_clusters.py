"""Many drawn clusters under every meaning and system: how many were seen, and every broken one with what reproduces it.

    python tests/meaning/many_clusters.py --clusters 100000 --out meanings.jsonl
    python tests/meaning/many_clusters.py --shrink more_memory:prism:17

A block is ``BLOCK`` clusters that Hypothesis draws for one meaning and one system; its number is the seed, so it is always
the same. A line of the file is a block that is done: started again, the command goes on behind it. Blocks of all meanings and
systems take turns. A block ends at the first broken cluster; ``--shrink`` draws it again and shows the smallest broken one.
Exit status 1 when anything is broken. With ``PYTHONPATH=build/compiled`` it runs on the compiled build.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import count, islice
from pathlib import Path
from random import Random

import conftest  # noqa: F401 - puts the kits on the path
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from meanings import MEANINGS

from fineserve_sim.cluster import ScenarioError

BLOCK = 50


def block(name: str, *, shrink: bool = False) -> dict[str, object]:
    """Draw the block ``meaning:system:number``. ``seen`` counts clusters that could be, up to the first broken one."""
    meaning, system, number = name.rsplit(":", 2)
    law, seen, broken = MEANINGS[meaning].law, 0, ""
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]

    @seed(int(number))
    @settings(
        max_examples=BLOCK, database=None, deadline=None, derandomize=False, phases=phases,
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    @given(st.randoms(use_true_random=False))
    def holds(random: Random) -> None:
        nonlocal seen
        try:
            problem = law(random, system)
        except ScenarioError:
            assume(False)
        seen += not broken
        assert problem is None, problem

    try:
        holds()
    except Exception as problem:  # whatever it is, it must not be
        broken = f"{type(problem).__name__}: {problem}"
    return {"block": name, "seen": seen, "broken": broken}


def done(out: Path) -> dict[str, dict[str, object]]:
    """The blocks in the file; the last line may have been cut off."""
    blocks = {}
    for line in out.read_text(encoding="utf-8").splitlines() if out.exists() else ():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        blocks[found["block"]] = found
    return blocks


def names() -> list[str]:
    return [f"{meaning}:{system}" for meaning, laws in MEANINGS.items() for system in laws.systems]


def campaign(out: Path, clusters: int, processes: int) -> int:
    found = done(out)
    seen = sum(int(str(each["seen"])) for each in found.values())
    turns = (f"{name}:{number}" for number in count() for name in names())
    left = (name for name in turns if name not in found)
    with out.open("a", encoding="utf-8") as lines, ProcessPoolExecutor(processes) as pool:
        lines.write("\n" if found else "")  # behind a line that was cut off
        while seen < clusters:
            wanted = min(200, -(-(clusters - seen) // BLOCK))
            for result in pool.map(block, islice(left, wanted)):
                lines.write(json.dumps(result) + "\n")
                lines.flush()
                found[str(result["block"])] = result
                seen += int(str(result["seen"]))
                if result["broken"]:
                    print(f"{result['block']} is broken: {result['broken']}", flush=True)
            print(f"{seen} clusters", flush=True)
    show(found)
    return int(any(each["broken"] for each in found.values()))


def show(found: dict[str, dict[str, object]]) -> None:
    """Clusters seen by system and meaning, and broken blocks."""
    seen, broken = Counter[tuple[str, str]](), 0
    for name, each in found.items():
        meaning, system, _ = name.rsplit(":", 2)
        seen[system, meaning] += int(str(each["seen"]))
        broken += bool(each["broken"])
    systems = sorted({system for system, _ in seen})
    print("system".ljust(20), *(meaning.rjust(16) for meaning in MEANINGS))
    for system in systems:
        print(system.ljust(20), *(str(seen[system, meaning]).rjust(16) for meaning in MEANINGS))
    print(f"{seen.total()} clusters in {len(found)} blocks, {broken} of them broken")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=int, default=100_000, help="how many are to be seen in all")
    parser.add_argument(
        "--out", type=Path, default=Path("meanings.jsonl"), help="the file of blocks, which is gone on with"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--shrink", help="MEANING:SYSTEM:NUMBER of a broken block")
    args = parser.parse_args(arguments)
    if args.shrink:
        result = block(args.shrink, shrink=True)
        print(result["broken"] or "holds")
        return int(bool(result["broken"]))
    return campaign(args.out, args.clusters, args.processes)


if __name__ == "__main__":
    sys.exit(main())
