"""What do executors cost, and what do they gain? The same runs in this process, in processes, and on Ray nodes of this machine.

    python -m benchmarks.executors [--workers 1,2] [--cells 8] [--requests 40000] [--repeat 1] [--json]
    PYTHONPATH=build/compiled:. python benchmarks/executors.py             the compiled build, on the nodes, too

* start: seconds until every worker of an executor has imported what it needs and done some work.
* a work: milliseconds of a work that does nothing, many of them one after the other.
* cells: seconds for ``--cells`` runs of ``--requests`` requests each, 16 models on 8 GPUs under FineServe, once all workers are
  there.
* asking: CPU seconds of this process meanwhile, which with one worker of ``local`` simulates itself.
* components: seconds for one run of as many requests in all, which falls apart.

The speed-up of cells and components is that over the same executor with the first of ``--workers``. Ray's nodes start once, one
of a CPU for each worker, and stay; where fewer are asked for, ``jobs`` keeps the others idle. They are raylets of one machine,
on loopback, which share its memory and disk, and no network lies between them. The files of all runs are compared, byte for
byte: exit status 1 where they differ. Seconds are the least of ``--repeat`` rounds in which all executors take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.engine import machine
from fineserve_sim.build import build
from fineserve_sim.experiment import Experiment, experiment_from, run_loaded
from fineserve_sim.experiment.run import spread
from fineserve_sim.experiment.run.executor import Executor
from fineserve_sim.experiment.run.executors import executor_of
from fineserve_sim.experiment.run.work import TellShare

MODELS, GPUS, RATE_PER_S = 16, 8, 1.0
EMPTY = 200
WARM_REQUESTS = 50
MEASURES = ("start_s", "work_ms", "cells_s", "asking_cpu_s", "components_s")
MET_S = 0.2
"""How long a worker waits for the others."""

NODE = {"num_cpus": 1, "object_store_memory": 200 * 2**20}
HEAD = {
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,  # the autoscaler: there is nothing to scale
    "_system_config": {"health_check_timeout_ms": 60_000, "gcs_rpc_server_reconnect_timeout_s": 300},
}
PATIENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on loopback
    "RAY_gcs_server_request_timeout_seconds": "300",  # where others use the machine, too
    "RAY_USAGE_STATS_ENABLED": "0",
}


@dataclass(frozen=True)
class Nothing:
    """Work that is none. It says which process it met, and its build; with ``waits_s`` that is busy for a while, so that
    others get some."""

    number: int
    waits_s: float = 0.0

    def __call__(self, out: Path, tell: TellShare) -> tuple[int, str]:
        time.sleep(self.waits_s)
        return os.getpid(), build()

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
    """The address of a Ray cluster of so many nodes with a CPU each, and of little else."""
    for variable, value in PATIENT.items():
        os.environ.setdefault(variable, value)
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        cluster.add_node(wait=False, **NODE, **HEAD)
        for _ in range(count - 1):
            cluster.add_node(wait=False, **NODE)
        cluster.wait_for_nodes(timeout=300)
        yield cluster.address
    finally:
        cluster.shutdown()


def seconds_of(executor: Executor, tried: Experiment, digests: set[str]) -> float:
    """The seconds of one experiment into a new folder; what is in there is added to ``digests``."""
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.perf_counter()
        run_loaded(tried, Path(folder), executor=executor)
        taken_s = time.perf_counter() - began_s
        digest = sha256()
        for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
        digests.add(digest.hexdigest())
    return taken_s


def seconds_until(executor: Executor, works: Iterable[Nothing]) -> tuple[float, set[tuple[int, str]]]:
    """All are done, and the processes that did them."""
    began_s = time.perf_counter()
    met = {found for _, found in executor.each(works, Path(), lambda work, share: None)}
    return time.perf_counter() - began_s, met


def meet(executor: Executor) -> None:
    """Until every worker is there and has imported what it needs. Raises ValueError where one runs another build."""
    met: set[tuple[int, str]] = set()
    while len(met) < executor.workers:
        met |= seconds_until(executor, [Nothing(number, MET_S) for number in range(2 * executor.workers)])[1]
    if {here for _, here in met} != {build()}:
        raise ValueError(f"workers are {met}, this process is {build()}")


def measured(where: str, jobs: int, cells: Experiment, whole: Experiment, digests: Sequence[set[str]]) -> Any:
    """One executor, from its start to its end."""
    began_s = time.perf_counter()
    with executor_of(where, jobs) as executor:
        meet(executor)
        seconds_of(executor, experiment(WARM_REQUESTS, 2 * executor.workers), set())
        start_s = time.perf_counter() - began_s
        work_ms = 1e3 * seconds_until(executor, map(Nothing, range(EMPTY)))[0] / EMPTY
        began_cpu_s = time.process_time()
        cells_s = seconds_of(executor, cells, digests[0])
        asking_cpu_s = time.process_time() - began_cpu_s
        components_s = seconds_of(executor, whole, digests[1])
        return dict(zip(MEASURES, (start_s, work_ms, cells_s, asking_cpu_s, components_s), strict=True))


def lines(found: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """A row an executor, with the speed-up over the first one of its kind."""
    first: dict[str, Mapping[str, float]] = {}
    for name, row in found.items():
        base = first.setdefault(name.partition(" ")[0], row)
        faster = (f"{each} {base[f'{each}_s'] / row[f'{each}_s']:.2f}" for each in ("cells", "components"))
        yield "  ".join([f"{name:8}", *(f"{key} {row[key]:8.2f}" for key in MEASURES), "times as fast:", *faster])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", default="1,2", help="how many of each, with commas")
    parser.add_argument("--cells", type=int, default=8)
    parser.add_argument("--requests", type=int, default=40_000)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    cells, whole = experiment(given.requests, given.cells), experiment(given.requests * given.cells, 1)
    spread.WORTH_REQUESTS = 0
    digests: tuple[set[str], set[str]] = (set(), set())
    found: dict[str, dict[str, float]] = {}
    counts = [int(text) for text in given.workers.split(",")]
    with nodes(max(counts)) as address:
        for _ in range(given.repeat):
            for (kind, where), count in product((("local", "local"), ("ray", f"ray:{address}")), counts):
                new = measured(where, count, cells, whole, digests)
                name = f"{kind} {count}"
                print(name, *(f"{key} {value:.2f}" for key, value in new.items()), file=sys.stderr)
                found[name] = {key: min(new[key], found.get(name, new)[key]) for key in MEASURES}
    same = all(len(each) == 1 for each in digests)
    if given.json:
        print(json.dumps({"machine": machine(), "found": found, "same_bytes": same}, indent=1))
    else:
        print(machine(), f"{given.cells} x {given.requests} requests", *lines(found), sep="\n")
        print("same bytes" if same else "BYTES DIFFER")
    return not same


if __name__ == "__main__":
    sys.exit(main())
