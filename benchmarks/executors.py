"""What do executors cost, and what do they gain? The same runs in this process, in processes, and on Ray nodes of this machine.

    python -m benchmarks.executors [--workers 1,2] [--cells 8] [--requests 20000] [--repeat 3] [--json]

* start: seconds until the first work of an executor is done.
* a work: milliseconds of a work that does nothing, many of them one after the other.
* cells: seconds for ``--cells`` runs of ``--requests`` requests each, 16 models on 8 GPUs under FineServe.
* asking: CPU seconds of this process meanwhile, which with one worker of ``local`` simulates itself.
* components: seconds for one run of as many requests in all, which falls apart.

Each Ray node is a raylet of its own with one CPU, on loopback: they share the machine's memory and disk, and no network lies
between them. The files of all runs are compared, byte for byte: exit status 1 where they differ. Seconds are the least of
``--repeat`` rounds in which all executors take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.engine import machine
from fineserve_sim.experiment import Experiment, experiment_from, run_loaded
from fineserve_sim.experiment.run import spread
from fineserve_sim.experiment.run.executor import Executor
from fineserve_sim.experiment.run.executors import executor_of
from fineserve_sim.experiment.run.work import TellShare

MODELS, GPUS, RATE_PER_S = 16, 8, 1.0
EMPTY = 200
MEASURES = ("start_s", "work_ms", "cells_s", "asking_cpu_s", "components_s")


@dataclass(frozen=True)
class Nothing:
    """Work that is none."""

    number: int

    def __call__(self, out: Path, tell: TellShare) -> int:
        return self.number

    def packed(self) -> Nothing:
        return self


def experiment(requests: int, seeds: int) -> Experiment:
    """One system at one place, ``seeds`` runs of so many requests."""
    precisions = ("W16A16", "fp8", "W4A16")
    models = [
        {"id": f"m{n}", "model": "llama-3.1-8b", "precision": precisions[n % 3], "rate_per_s": RATE_PER_S}
        for n in range(MODELS)
    ]
    return experiment_from(
        {
            "fineserve": 1,
            "title": "Executors",
            "cluster": {"gpu": "h100-sxm", "count": GPUS},
            "models": models,
            "workload": {"lengths": {"prompt_tokens": 512, "output_tokens": 64}, "requests": requests},
            "slo": {"ttft_s": 1.0},
            "systems": ["fineserve"],
            "seeds": seeds,
        }
    )


@contextmanager
def nodes(count: int) -> Iterator[str]:
    """The address of a Ray cluster of so many nodes with a CPU each."""
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # on loopback
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 200 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    for _ in range(count - 1):
        cluster.add_node(**node)
    yield cluster.address
    cluster.shutdown()


def seconds_of(executor: Executor, tried: Experiment, digests: set[str]) -> float:
    """Of one experiment into a new folder; what is in there is added to ``digests``."""
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.perf_counter()
        run_loaded(tried, Path(folder), executor=executor)
        taken_s = time.perf_counter() - began_s
        digest = sha256()
        for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
        digests.add(digest.hexdigest())
    return taken_s


def measured(where: str, jobs: int | None, cells: Experiment, whole: Experiment, digests: Sequence[set[str]]) -> Any:
    """One executor, from its start to its end."""

    def empty(executor: Executor, count: int) -> float:
        began_s = time.perf_counter()
        for _ in executor.each(map(Nothing, range(count)), Path(), lambda work, share: None):
            pass
        return time.perf_counter() - began_s

    began_s = time.perf_counter()
    with executor_of(where, jobs) as executor:
        empty(executor, 2 * executor.workers)
        start_s = time.perf_counter() - began_s
        work_ms = 1e3 * empty(executor, EMPTY) / EMPTY
        began_cpu_s = time.process_time()
        cells_s = seconds_of(executor, cells, digests[0])
        asking_cpu_s = time.process_time() - began_cpu_s
        components_s = seconds_of(executor, whole, digests[1])
        return dict(zip(MEASURES, (start_s, work_ms, cells_s, asking_cpu_s, components_s), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", default="1,2", help="how many of each, with commas")
    parser.add_argument("--cells", type=int, default=8)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    cells, whole = experiment(given.requests, given.cells), experiment(given.requests * given.cells, 1)
    spread.WORTH_REQUESTS = 0
    digests: tuple[set[str], set[str]] = (set(), set())
    found: dict[str, dict[str, float]] = {}
    counts = [int(text) for text in given.workers.split(",")]
    for _ in range(given.repeat):
        for kind, count in product(("local", "ray"), counts):
            with nodes(count) if kind == "ray" else nullcontext() as address:
                where, jobs = (f"ray:{address}", None) if address else ("local", count)
                new = measured(where, jobs, cells, whole, digests)
            name = f"{kind} {count}"
            print(name, *(f"{key} {value:.2f}" for key, value in new.items()), file=sys.stderr)
            found[name] = {key: min(new[key], found.get(name, new)[key]) for key in MEASURES}
    same = all(len(each) == 1 for each in digests)
    if given.json:
        print(json.dumps({"machine": machine(), "found": found, "same_bytes": same}, indent=1))
    else:
        print(machine(), f"{given.cells} x {given.requests} requests", sep="\n")
        for name, row in found.items():
            print(f"{name:10}", *(f"{key} {row[key]:8.2f}" for key in MEASURES))
        print("same bytes" if same else "BYTES DIFFER")
    return not same


if __name__ == "__main__":
    sys.exit(main())
