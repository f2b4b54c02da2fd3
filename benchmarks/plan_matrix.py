"""Plans against the systems of papers, in situations of all kinds, judged by requests that no search saw.

    python3 dev.py compile
    PYTHONPATH=build/compiled python benchmarks/plan_matrix.py --data ../shared/data --out results/matrix
    python benchmarks/plan_matrix.py --out results/matrix --table        # print what is there
    ... --only conv-12-8 code-8-4 --evaluations 100                      # some of them, less thoroughly
    ... --keep                                                           # and keep all that is there for the page

``plan_matrix.yaml`` has the situations. A situation that has its file in the folder is not run again, so a stopped command goes
on. Plans are searched with so many evaluations, so results are the same on every machine and with any ``--jobs``.

A plan is chosen by the first two thirds of the requests. On the last third it is compared with the system that is best on the
first part, with the best with hindsight, and with the clairvoyant bound. Systems are whole: their own schedulers,
memory and moves of models. The placement policy ``balanced``, which does not search, is compared with the best of the papers'.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from fineserve_traces import Trace, piecewise, read_trace
from fineserve_traces.servegen import servegen_clients

from fineserve_sim.cluster import ScenarioError, simulate
from fineserve_sim.planning.find import Budget, most_on_time, search
from fineserve_sim.planning.islands import Bools, kept_of, on_time
from fineserve_sim.planning.judge import difference, on
from fineserve_sim.planning.problem import Problem
from fineserve_sim.planning.wish import Wish, model_wish, problem_of, unseen
from fineserve_sim.systems import load_systems

SITUATIONS = Path(__file__).with_suffix(".yaml")
PAPERS = ("fineserve", "prism", "prism*", "muxserve", "muxserve++", "s-partition", "static*", "dedicated")
EVALUATIONS = 300
RESULTS = Path(__file__).resolve().parents[1] / "docs" / "data" / "plan_matrix.json"
HOUR_S = 10.0
"""Seconds in which an hour of counts passes."""

Situation = Mapping[str, Any]


# --- requests ----------------------------------------------------------------------------------------------------------


def requests_of(situation: Situation, data: Path) -> Trace:
    """The requests of a situation. A trace without models has one; its requests are dealt out later."""
    kind, count, models = situation["arrivals"], situation["requests"], len(situation["models"])
    rng, traces = np.random.default_rng(situation.get("seed", 0)), data / "traces"
    if kind in ("azure2023_conv", "azure2023_code", "mooncake_conversation"):
        (path,) = traces.glob(f"{kind}.*")
        trace = read_trace(path)
        first = situation.get("first", 0)
        trace = trace.take(np.arange(first, min(len(trace), first + count)))
        return replace(trace, arrival_s=trace.arrival_s - trace.arrival_s[0])
    if kind == "arena":
        trace = read_trace(traces / "arena_27models.csv.gz")
        names = tuple(f"m{number}" for number in range(models))
        busiest = np.argsort(-np.bincount(trace.model), kind="stable")
        rank = np.argsort(busiest)[trace.model]
        return replace(trace, model=(rank % models).astype(np.int32), models=names)
    arrival_s, model = _drawn(kind, count, models, rng, traces)
    lengths = read_trace(traces / f"{situation['lengths']}.csv.gz")
    rows = rng.integers(0, len(lengths), len(arrival_s))
    names = tuple(f"m{number}" for number in range(models))
    return Trace(
        arrival_s=arrival_s - arrival_s[0],
        model=model.astype(np.int32),
        prompt_tokens=lengths.prompt_tokens[rows],
        output_tokens=lengths.output_tokens[rows],
        models=names,
        source=f"{kind}, lengths of {situation['lengths']}",
    )


def _drawn(kind: str, count: int, models: int, rng: np.random.Generator, traces: Path) -> tuple[Any, Any]:
    """Arrivals and models: ServeGen's clients, a model each; BurstGPT's hours; Alibaba's requests to its busiest models."""
    if kind == "servegen":
        clients = servegen_clients(models)
        scale = count / sum(client.rate_per_s for client in clients) / 100.0
        times = [client.arrivals(rng, 100.0, scale) for client in clients]
        arrival_s, model = np.concatenate(times), np.repeat(np.arange(models), [len(each) for each in times])
    elif kind == "burstgpt":
        table = np.genfromtxt(traces / "burstgpt_v1_hourly_counts.csv", delimiter=",", names=True)
        hours = table["all"][9 * 24 : 9 * 24 + 24]
        arrival_s = piecewise(rng, [(HOUR_S, count * hour / hours.sum() / HOUR_S) for hour in hours])
        model = rng.integers(0, models, len(arrival_s))
    else:
        table = np.genfromtxt(
            traces / "alibaba_gentd26_requests.csv.gz", delimiter=",", names=True, dtype=None, encoding="utf-8"
        )
        names, numbers = np.unique(table["model"], return_inverse=True)
        rank = np.argsort(np.argsort(-np.bincount(numbers, minlength=len(names)), kind="stable"))[numbers]
        rows = np.flatnonzero(rank < models)[:count]
        arrival_s, model = np.sort(table["arrival_s"][rows].astype(float)), rank[rows]
    order = np.argsort(arrival_s, kind="stable")[:count]
    return arrival_s[order], model[order]


def wish_of(situation: Situation, data: Path, folder: Path) -> Wish:
    """The wish, its trace written into the folder."""
    trace = requests_of(situation, data)
    if rate := situation.get("rate_per_s"):
        trace = replace(trace, arrival_s=trace.arrival_s * (len(trace) / rate / trace.arrival_s[-1]))
    path = folder / f"{situation['name']}.csv"
    trace.to_csv(path)
    models = tuple(model_wish(f"m{number}={model}") for number, model in enumerate(situation["models"]))
    return Wish(
        path,
        models,
        situation["gpus"],
        situation["ttft_s"],
        gpu=situation.get("gpu", "h100-sxm"),
        tpot_slo_s=situation.get("tpot_s"),
        spread=len(trace.models) == 1,
    )


# --- one situation -----------------------------------------------------------------------------------------------------


def kept_by(problem: Problem, system: str, trace: Trace) -> Bools | None:
    """Which requests a whole system keeps on time, each model in its first option that fits; None where it cannot run."""
    models = tuple(problem.served(model, option) for model, option in enumerate(problem.first))
    asked = replace(problem.scenario, models=models, trace=trace, system=load_systems()[system], sample_s=0.0)
    ttft_s = np.array([problem.limits.ttft_s[problem.number_of[name]] for name in trace.models])[trace.model]
    with suppress(ScenarioError):
        return kept_of(trace, simulate(asked), ttft_s, problem.limits)
    return None


def result_of(situation: Situation, data: Path, folder: Path, evaluations: int) -> dict[str, Any]:
    """Shares of the requests on time, in percent."""
    wish = wish_of(situation, data, folder)
    problem = problem_of(wish)
    first, rest = problem.parts[0].trace, unseen(wish)
    began_s = time.process_time()
    best = search(problem, Budget(evaluations))
    search_s = time.process_time() - began_s
    kept = {}
    for name in (*PAPERS, "balanced"):
        seen, later = kept_by(problem, name, first), kept_by(problem, name, rest)
        if seen is not None and later is not None:
            kept[name] = seen, later
    shares = {name: (_percent(seen), _percent(later)) for name, (seen, later) in kept.items()}
    chosen = max((name for name in shares if name in PAPERS), key=lambda name: shares[name][0])
    hindsight = max((name for name in shares if name in PAPERS), key=lambda name: shares[name][1])
    plan, theirs = on_time(on(problem, rest), 0, best.layout), kept[chosen][1]
    return {
        "plan": _percent(plan),
        "plan_promised": 100 * (1 - best.loss / problem.worth),
        "chosen": chosen,
        "hindsight": hindsight,
        "bound": 100 * most_on_time(on(problem, rest)) / len(rest),
        "systems": shares,
        "plan_half_width": 100 * difference(plan, theirs).half_width,
        "balanced_half_width": 100 * difference(kept["balanced"][1], theirs).half_width,
        "evaluations": best.runs,
        "search_cpu_s": search_s,
        "requests": len(first) + len(rest),
        "rate_per_s": len(first) / float(first.arrival_s[-1]),
    }


def _percent(kept: Bools) -> float:
    return 100 * float(np.mean(kept))


def run(situation: Situation, data: Path, out: Path, evaluations: int) -> str:
    """Run a situation unless its file is there; a line for the screen."""
    path = out / f"{situation['name']}.json"
    if not path.exists():
        found = result_of(situation, data, out, evaluations)
        path.with_suffix(".new").write_text(json.dumps(found, indent=1))
        path.with_suffix(".new").rename(path)
    return f"{situation['name']}: {json.loads(path.read_text())['plan']:.1f} %"


# --- what comes out ----------------------------------------------------------------------------------------------------


def spared(result: Mapping[str, Any], ours: float, theirs: float) -> float | None:
    """The part of their misses above the bound that we do not have; None where these are 2 % of the requests or fewer."""
    misses = result["bound"] - theirs
    return (ours - theirs) / misses if misses > 2 else None


def table(situations: Sequence[Situation], out: Path) -> Iterator[str]:
    """A Markdown table of the results that are there, and what they say together."""
    yield "| situation | req/s | limits | plan | chosen system | with hindsight | bound | `balanced` | misses spared |"
    yield "|---|---|---|---|---|---|---|---|---|"
    never_worse, by_plan, by_balanced, as_good, count = 0, [], [], 0, 0
    for situation in situations:
        path = out / f"{situation['name']}.json"
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        seen, hindsight = found["systems"][found["chosen"]][1], found["systems"][found["hindsight"]][1]
        plan, ours = found["plan"], found["systems"]["balanced"][1]
        share, own = (spared(found, each, seen) for each in (plan, ours))
        by_plan += [share] if share is not None else []
        by_balanced += [own] if own is not None else []
        never_worse += plan >= seen - found["plan_half_width"] and plan >= hindsight - 1
        as_good += ours >= seen - found["balanced_half_width"]
        count += 1
        limits = f"TTFT {situation['ttft_s']} s" + (f", TPOT {situation['tpot_s']} s" if "tpot_s" in situation else "")
        where = f"{len(situation['models'])} models, {situation['gpus']} {situation.get('gpu', 'h100-sxm')}"
        cells = (
            f"{situation['name']} ({where})",
            f"{found['rate_per_s']:.1f}",
            limits,
            f"{plan:.1f} ± {found['plan_half_width']:.1f}",
            f"{found['chosen']} {seen:.1f}",
            f"{found['hindsight']} {hindsight:.1f}",
            f"{found['bound']:.1f}",
            f"{ours:.1f} ± {found['balanced_half_width']:.1f}",
            "–" if share is None else f"{100 * share:.0f} %",
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield f"Plans not worse than the chosen system: {never_worse} of {count}; `balanced`: {as_good} of {count}."
    for name, spares in (("plans", by_plan), ("`balanced`", by_balanced)):
        if spares:
            yield f"Misses above the bound that {name} spare, median of {len(spares)}: {100 * statistics.median(spares):.0f} %."


def keep(situations: Sequence[Situation], out: Path) -> None:
    """Results that are there, in ``docs/data``, without the time that they took."""
    paths = {each["name"]: out / f"{each['name']}.json" for each in situations}
    found = {name: json.loads(path.read_text()) | {"search_cpu_s": 0} for name, path in paths.items() if path.exists()}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in found.items())
    RESULTS.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Plans against the systems of papers, on requests that no search saw.")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with traces/")
    parser.add_argument("--out", type=Path, default=Path("results/matrix"), help="folder of the results")
    parser.add_argument("--only", nargs="+", help="names of situations")
    parser.add_argument("--evaluations", type=int, default=EVALUATIONS, help="islands that a search simulates")
    parser.add_argument("--jobs", type=int, default=2, help="situations side by side")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--keep", action="store_true", help="keep the results in docs/data, for docs/planning.md")
    arguments = parser.parse_args()
    situations = {each["name"]: each for each in yaml.safe_load(SITUATIONS.read_text(encoding="utf-8"))["situations"]}
    wanted = [situations[name] for name in arguments.only or situations]
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.table:
        one = partial(run, data=arguments.data, out=arguments.out, evaluations=arguments.evaluations)
        with ProcessPoolExecutor(arguments.jobs) as pool:
            for done in as_completed([pool.submit(one, each) for each in wanted]):
                print(done.result(), flush=True)
    print("\n".join(table(wanted, arguments.out)))
    if arguments.keep:
        keep(wanted, arguments.out)


if __name__ == "__main__":
    main()
