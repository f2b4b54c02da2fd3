"""What each assumed number is worth: moves it by 20 % and prints the change of the SLO attainment of Fig. 10.

    python benchmarks/sensitivity.py [--quick] [--seeds N] [--only TEXT] [--jobs N] [--json]

One line an assumption of ``docs/reference/assumptions.md`` that is a number and acts on ``experiments/fig10.yaml``: change in
points of TTFT attainment of FineServe, Prism* and Static* when it is 20 % smaller / 20 % larger, at SLO scale 20 and rate
scale 8, under loads A and B. All runs see the same requests (common random numbers), so a change is the assumption's own. The
base SLOs are computed anew each time, as they depend on the assumption too. ``--quick`` takes the file's short version. The
first line tells the command, the seeds and the requests of a run, as that page states them.

Catalog numbers (kernel rates, launches, host times, driver independent) are changed in the catalog of a fresh process;
engine settings and policy options by the keys of the experiment file.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from fineserve_sim import catalog
from fineserve_sim.catalog import Quantity
from fineserve_sim.experiment import ConfigError, load_experiment, run_loaded

FIG10 = Path(__file__).parents[1] / "experiments" / "fig10.yaml"
ENGINE = "vllm-v1-eager"
"""The deployment of Fig. 10."""
FACTORS = (0.8, 1.2)
POINT = (
    ("sweeps", "[{name: point, axes: {slo_scale: [20], load: [A, B]}, at: {rate_scale: 8}}]"),
    ("claims", "[]"),
    ("figures", "[]"),
)
Attainment = dict[str, float]
"""Percent by ``load system``."""


@dataclass(frozen=True)
class Assumption:
    """A number of the table: its name there, and what moves it by a factor, in this process or as keys of the file."""

    name: str
    move: Callable[[float], Sequence[tuple[str, str]]]


def _scale(quantities: Sequence[Callable[[], Quantity]], factor: float) -> Sequence[tuple[str, str]]:
    """Change numbers of the catalog in this process; they are read once, so everybody sees the change."""
    for find in quantities:
        vars(find())["value"] *= factor  # the entries refuse changes by name, on purpose
    return ()


def of_catalog(name: str, *quantities: Callable[[], Quantity]) -> Assumption:
    return Assumption(name, partial(_scale, quantities))


def of_file(name: str, key: str, value: float, whole: bool = False) -> Assumption:
    """A key of the experiment file that holds ``value``."""
    return Assumption(name, lambda factor: ((key, str(round(value * factor) if whole else value * factor)),))


def _floor(precision: str) -> Callable[[], Quantity]:
    return lambda: (catalog.deployment(ENGINE).host_floors or {})[precision]


def _sequence() -> Quantity:
    found = catalog.deployment(ENGINE).sequence_s
    assert found is not None
    return found


def _awq_table(factor: float) -> Sequence[tuple[str, str]]:
    from fineserve_sim.latency.tables import shipped

    shipped().grids["gemm/int4_wo"].latency_s[:] *= factor
    return ()


def _shares(factor: float) -> Sequence[tuple[str, str]]:
    from fineserve_sim.latency import StepModel
    from fineserve_sim.latency.sharing import Demand

    plain = StepModel.demand

    def scaled(step: StepModel, *batch: Any) -> Demand:
        need = plain(step, *batch)
        return need._replace(
            compute=factor * need.compute, bandwidth=factor * need.bandwidth, resident=factor * need.resident
        )

    mock.patch.object(StepModel, "demand", scaled).start()  # ends with the process
    return ()


def _option(system: str, part: str, value: float) -> Callable[[float], Sequence[tuple[str, str]]]:
    """An option of one system's policies, such as ``scheduler: {policy: x, y: VALUE}`` with VALUE in place of ``%``."""

    def move(factor: float) -> Sequence[tuple[str, str]]:
        changed = {"fineserve": '"fineserve"', "prism*": '"prism*"', "static*": '"static*"'}
        number = round(value * factor) if isinstance(value, int) else value * factor
        changed[system] = f'{{base: "{system}", name: "{system}", {part.replace("%", str(number))}}}'
        return (("systems", f"[{', '.join(changed.values())}]"),)

    return move


def _references(factor: float) -> Sequence[tuple[str, str]]:
    from fineserve_sim.experiment.run import workload

    workload.ISOLATED_REQUESTS = round(workload.ISOLATED_REQUESTS * factor)
    return ()


KERNELS = catalog.kernel_rates
ASSUMPTIONS = (
    of_catalog("host.overhead_s", lambda: catalog.deployment(ENGINE).overhead_s),
    of_catalog("host.sequence_s", _sequence),
    of_catalog("host.floor_s, W16A16 and W4A16", _floor("W16A16"), _floor("W4A16")),
    of_catalog("host.floor_s, W8A8KV8", _floor("W8A8KV8")),
    of_catalog("host.floor_s, W4A8KV4", _floor("W4A8KV4")),
    of_catalog("activation.launch_s", lambda: KERNELS().elementwise.activation.launch_s),
    of_catalog("gemm.launch_s, W4A8KV4", lambda: KERNELS().gemm["W4A8KV4"].launch_s),
    of_catalog("gemm.bytes_per_s, W4A8KV4", lambda: KERNELS().gemm["W4A8KV4"].bytes_per_s),
    of_catalog("attention.bytes_per_s, W4A8KV4", lambda: KERNELS().kv_bytes_per_s[4]),
    of_catalog("gemm.flops_per_s, W4A16", lambda: KERNELS().gemm["W4A16"].flops_per_s),
    of_catalog("gemm.flops_per_s, W4A8KV4", lambda: KERNELS().gemm["W4A8KV4"].flops_per_s),
    Assumption("AWQ: TensorRT-LLM's int4 times", _awq_table),
    Assumption("contention: what steps need of a GPU", _shares),
    of_file("token_budget", "engine.token_budget", 2048, whole=True),
    of_file("max_sequences", "engine.max_sequences", 1024, whole=True),
    of_file("block_tokens", "engine.block_tokens", 16, whole=True),
    Assumption("memory_utilization", lambda factor: (("engine.memory_utilization", str(min(1.0, 0.9 * factor))),)),
    of_file("context_bytes", "engine.context_bytes", 2**29, whole=True),
    Assumption(
        "scheduler.moore_hodgson.reserve_fraction",
        _option("prism*", "scheduler: {policy: moore_hodgson, reserve_fraction: %}", 0.02),
    ),
    Assumption(
        "memory.kv_slab.slab_cap_bytes", _option("fineserve", "memory: {policy: kv_slab, slab_cap_bytes: %}", 2**26)
    ),
    Assumption("isolated SLO reference: prompts", _references),
    of_file("base rate A", "loads.A.rate_per_s", 0.888),
    of_file("base rate B", "loads.B.rate_per_s", 4.0),
)


def attainment(move: tuple[int, float] | None, quick: bool, seeds: int | None) -> Attainment:
    """Attainment with assumption number ``move[0]`` times ``move[1]``; must run in a process of its own.
    Empty when the file refuses the number: then a model fits on no GPU."""
    keys = ASSUMPTIONS[move[0]].move(move[1]) if move else ()
    try:
        experiment = load_experiment(FIG10, [*POINT, *keys], quick, seeds)
    except ConfigError:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        summary = json.loads(run_loaded(experiment, Path(folder), jobs=1).read_text(encoding="utf-8"))
    return {
        f"{cell['axes']['load']} {cell['system']}": 100 * cell["metrics"]["ttft_attainment"]["mean"]
        for cell in summary["cells"]
    }


def changes(only: str, quick: bool, seeds: int | None, jobs: int) -> Iterator[tuple[str, Attainment, list[Attainment]]]:
    """For each assumption whose name has ``only`` in it: its name, attainment as it stands, and moved by each factor."""
    chosen = [index for index, assumption in enumerate(ASSUMPTIONS) if only in assumption.name]
    moves = [(index, factor) for index in chosen for factor in FACTORS]
    context = get_context("spawn")  # one task a process: what a task changes in the catalog dies with it
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        found = pool.map(partial(attainment, quick=quick, seeds=seeds), [None, *moves])
        base = next(found)
        for index in chosen:
            yield ASSUMPTIONS[index].name, base, [next(found) for _ in FACTORS]


def _change(moved: Attainment, base: Attainment, cell: str) -> str:
    """In points; a dash where the number cannot be."""
    return f"{moved[cell] - base[cell]:+.1f}" if moved else "-"


def conditions(arguments: Sequence[str], quick: bool, seeds: int | None) -> str:
    """The command, and what it simulates."""
    file = load_experiment(FIG10, POINT, quick, seeds).file
    command = shlex.join(["python", "benchmarks/sensitivity.py", *arguments])
    numbers = f"{file.workload.warmup_requests} + {file.workload.requests} requests a run"
    return f"{command}: seeds {', '.join(map(str, range(file.seeds)))}; {numbers}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the file's short version")
    parser.add_argument("--seeds", type=int, help="seeds a cell, instead of the file's")
    parser.add_argument("--only", default="", metavar="TEXT", help="assumptions with this text in their names")
    parser.add_argument("--jobs", type=int, default=1, help="simulations at a time")
    parser.add_argument("--json", action="store_true", help="print JSON: points of attainment")
    args = parser.parse_args(arguments)
    rows = changes(args.only, args.quick, args.seeds, args.jobs)
    said = conditions(sys.argv[1:] if arguments is None else arguments, args.quick, args.seeds)
    if args.json:
        found = [{"assumption": name, "base": base, "moved": moved} for name, base, moved in rows]
        print(json.dumps({"conditions": said, "changes": found}, indent=1))
        return 0
    print(said, flush=True)
    for name, base, moved in rows:
        cells = (f"{cell} {'/'.join(_change(run, base, cell) for run in moved)}" for cell in base)
        print(f"{name:44} {', '.join(cells)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
