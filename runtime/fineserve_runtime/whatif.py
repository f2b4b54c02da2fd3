"""The twin's side: the requests that a server had, simulated with the steps that its engines took.

    python -m fineserve_runtime.whatif FOLDER NICENESS

``FOLDER`` has what ``twin.py`` wrote. The answer is printed as JSON.
"""

from __future__ import annotations

import copy
import csv
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fineserve_runtime.step_probe import Row, write_table
from fineserve_sim.catalog import weight_bytes
from fineserve_sim.cluster import simulate
from fineserve_sim.cluster.compose.memory import fixed_bytes
from fineserve_sim.cluster.scenario import Fate, Scenario, ScenarioError, ServedModel
from fineserve_sim.experiment.file.document import Document, to_yaml
from fineserve_sim.experiment.file.errors import ConfigError
from fineserve_sim.experiment.file.plan import build
from fineserve_sim.experiment.run.run import Run, scenario
from fineserve_sim.latency.table_operators import GEMM_DTYPE, KV_DTYPE
from fineserve_sim.latency.tables import TableError

Floats = NDArray[np.float64]
_LEAST = 3
"""Steps in a row of the table."""

_ROWS = 400
"""About so many rows has a table of a model. A kind of many steps has several, so that what is common weighs most."""

_LEVELS = 12
"""Into so many parts steps are divided by their tokens, sequences and cached tokens."""

_COUNTERS = ("drops", "restores", "migrations")
"""Counters of a single-model cluster that an answer has."""

_UNPLAYED = {
    "sweeps": [{"name": "run", "at": {"rate_scale": 1.0}}],
    "loads": {},
    "claims": [],
    "figures": [],
    "seeds": 1,
}


@dataclass(frozen=True)
class Past:
    """The past of a server: its requests in the order of their arrivals, from the first on. Seconds; NaN: it never came."""

    arrival_s: Floats
    model: NDArray[np.int64]
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]
    front_s: Floats
    ttft_s: Floats
    end_s: Floats
    window_s: float


def past(rows: Floats, now_s: float) -> Past:
    """An output that is not known, since its request goes on or was refused, is taken to be as long as the model's mean."""
    arrival_s, model, prompt, output, most, front_s, ttft_s, end_s = rows.T
    begin_s, number = float(arrival_s[0]), model.astype(np.int64)
    for each in np.unique(number):
        mine, unknown = number == each, (number == each) & np.isnan(output)
        known = output[mine & ~np.isnan(output)]
        output[unknown] = np.minimum(most[unknown], known.mean() if len(known) else np.inf)
    tokens = np.maximum(1, output.round()).astype(np.int64)
    sizes = prompt.astype(np.int64), tokens
    return Past(arrival_s - begin_s, number, *sizes, front_s, ttft_s, end_s - begin_s, now_s - begin_s)


# --- steps as a table --------------------------------------------------------------------------------------------------


def _levels(values: Floats) -> NDArray[np.int64]:
    """The part of each value, parts being of like sizes; equal values are together."""
    if len(np.unique(values)) <= _LEVELS:
        return np.unique(values, return_inverse=True)[1]
    edges = np.unique(np.quantile(values, np.linspace(0, 1, _LEVELS + 1)[1:-1]))
    return np.searchsorted(edges, values, side="right")


def _means(values: Floats, level: NDArray[np.int64]) -> Floats:
    """Each value's level's mean, in whole numbers."""
    counts = np.maximum(1, np.bincount(level))
    means: Floats = (np.bincount(level, values) / counts).round()[level]
    return means


def kinds(steps: NDArray[Any]) -> Iterator[tuple[int, int, int, int, bool, int, Floats]]:
    """Parts of a model's steps by kind: decodes, cached tokens of each, prompt tokens, how many, whether in turn, stages, and
    their seconds. ``steps``: prompt tokens, decodes, cached tokens, in turn, stages, seconds."""
    for prompts, stages in product((False, True), np.unique(steps[:, 4]).tolist()):
        wanted = ((steps[:, 0] > 0) == prompts) & (steps[:, 4] == stages)
        new, decodes, context, turned, _, seconds = steps[wanted].T.astype(np.float64)
        if not len(new):
            continue
        many, total = _levels(decodes), _levels(new + decodes)
        cached = context / np.maximum(1, decodes)
        keys = (
            [many, total, turned] if prompts else [many, np.digitize(cached, np.quantile(cached, [0.33, 0.67])), turned]
        )
        sequences, tokens = _means(decodes, many), _means(new + decodes, total)
        kind = np.unique(np.column_stack(keys), axis=0, return_inverse=True)[1].reshape(-1)
        for each in range(kind.max() + 1):
            rows = np.flatnonzero(kind == each)
            first, count = rows[0], int(sequences[rows[0]])
            added = max(1, int(tokens[first]) - count) if prompts else 0
            for part in np.array_split(rows, max(1, len(rows) // max(_LEAST, len(steps) // _ROWS))):
                context_tokens = round(float(cached[part].mean())) if count else 0
                yield count, context_tokens, added, len(part), bool(turned[first]), int(stages), seconds[part]


def table_of(steps: NDArray[Any], served: Scenario, path: Path) -> int:
    """Write ``steps`` (model, and as ``kinds`` has them) as a table for ``engine.step_times``; how many they are. Rare kinds of
    steps, which a disturbance stretches most, are in it only where the common ones do not give a model of step times. Raises
    ValueError for a served model with too few steps."""
    rows = []
    for number, model in enumerate(served.models):
        found = _rows(steps[steps[:, 0] == number, 1:], model)
        common = [row for row in found if row.repeats >= _LEAST]
        if not _vary(common) and not _vary(found):
            raise ValueError(f"model {model.id} had too few steps so far, or all alike; ask again later")
        rows += common if _vary(common) else found
    write_table(rows, path)
    return sum(row.repeats for row in rows)


def _rows(steps: NDArray[Any], model: ServedModel) -> list[Row]:
    """One of each kind of steps."""
    precision, rows = model.precision, []
    dtype = GEMM_DTYPE[precision.weight_bits, precision.activation_bits]
    about = model.model.name, dtype, "eager", KV_DTYPE[precision.kv_bits]
    for decodes, context, new, count, turned, stages, seconds in kinds(steps):
        low, high = np.quantile(seconds, [0.25, 0.75]).tolist()
        mean = float(seconds.mean())
        rows.append(Row(*about, decodes, context, new, 0, turned, mean, (high - low) / mean, count, stages))
    return rows


def _vary(rows: Sequence[Row]) -> bool:
    """Whether the simulator can fit step times to them."""
    counts = {row.decodes + row.prefill_tokens for row in rows}
    return len(counts) >= 3 and len(rows) > len(counts) + 3


# --- files that are simulated ------------------------------------------------------------------------------------------


class Answer:
    """The answer to a question that ``twin.py`` wrote into a folder. Raises ConfigError for a file that cannot be simulated."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._asked = json.loads((folder / "asked.json").read_text(encoding="utf-8"))
        self._question: dict[str, Any] = self._asked["question"]
        self._past = past(np.load(folder / "requests.npy"), self._asked["now_s"])
        self._write_trace()
        data = {key: value for key, value in self._asked["document"].items() if key not in ("runtime", "folder")}
        self._plain = copy.deepcopy(data) | _UNPLAYED | {"workload": {"trace": str(folder / "trace.csv")}}
        for model in self._plain["models"]:
            for key in ("rate_per_s", "share", "phases"):
                model.pop(key, None)
        sized = {"context_bytes": 0, "deployment": "vllm-eager"}  # no graphs, whose memory is not in the region
        self._plain["engine"] = self._plain.get("engine", {}) | sized
        if self._asked["in_turn"]:
            self._plain["cluster"]["sharing"] = "in_turn"
        self._setup = build(self._document(self._plain), "twin", self._home).setup
        served = self._scenario(self._plain | {"systems": [self._present()]})
        steps = np.load(folder / "steps.npy")
        self._steps = table_of(steps, served, folder / "steps.parquet")
        self._plain["engine"] |= {
            "step_times": str(folder / "steps.parquet"),
            "memory_utilization": self._utilization(served),
        }

    def _write_trace(self) -> None:
        names, seen = [model["id"] for model in self._asked["document"]["models"]], self._past
        with (self._folder / "trace.csv").open("w", newline="", encoding="utf-8") as file:
            out = csv.writer(file)
            out.writerow(["arrival_s", "model", "prompt_tokens", "output_tokens"])
            for row in zip(seen.arrival_s, seen.model, seen.prompt, seen.output, strict=True):
                out.writerow([f"{row[0]:.6f}", names[row[1]], row[2], row[3]])

    def _item(self) -> dict[str, Any]:
        """The present system as the file has it."""
        name = self._asked["system"]
        found = next(each for each in self._asked["document"]["systems"] if name in (each, _name(each)))
        return {"base": found, "name": f"{found} as it is"} if isinstance(found, str) else dict(found)

    def _present(self) -> dict[str, Any]:
        """The present system; on several devices its models stay where they are, unless it places instances or moves models."""
        item = self._item()
        spec = self._setup.systems[self._asked["system"]]
        if spec.residency is not None or spec.dispatch is not None or len(self._setup.gpus) == 1:
            return item
        return item | {"placement": {"policy": "pinned", "groups": self._asked["groups"]}}

    def _unpinned(self) -> dict[str, Any]:
        """The present system, which may place its models anew."""
        item = self._item()
        pinned = item.get("placement", {}).get("policy") == "pinned"
        return item | ({"placement": {"policy": "balanced"}} if pinned else {})

    @property
    def _home(self) -> Path:
        return Path(self._asked["folder"])

    @staticmethod
    def _document(data: dict[str, Any]) -> Document:
        return Document(copy.deepcopy(data), {})

    def _scenario(self, data: dict[str, Any]) -> Scenario:
        """Of the first system of ``data``."""
        setup = build(self._document(data), "twin", self._home).setup
        item = data["systems"][0]
        limits = tuple(model.entry.ttft_slo_s or setup.slo.ttft_s or np.inf for model in setup.models)
        return scenario(Run(setup, (), _name(item), None, 1.0, 0, limits))

    def _utilization(self, served: Scenario) -> float:
        """The part of a device's memory that leaves the region's bytes to KV, or to weights and KV where weights are there."""
        names = {
            gpu: [name for name, groups in self._asked["groups"].items() if any(gpu in group for group in groups)]
            for gpu in range(len(served.gpus))
        }

        def beside(gpu: int) -> int:
            here = [model for model in served.models if model.id in names[gpu]]
            return sum(fixed_bytes(model, served.engine) - self._slab_bytes(model) for model in here)

        wanted = max(map(beside, names)) + self._asked["region_bytes"] + 0.5
        memory_bytes = served.gpus[0].spec.memory_bytes
        if wanted > memory_bytes:
            raise ValueError(f"cluster.gpu has {memory_bytes} bytes, less than the {wanted:.0f} of region and engines")
        return float(wanted / memory_bytes)

    def _slab_bytes(self, served: ServedModel) -> int:
        """What the weights of a model take of the region: nothing where they lie outside it, whole slabs where an engine has
        them there now."""
        taken: dict[str, int] | None = self._asked["weight_bytes"]
        if taken is None:
            return 0
        return max(weight_bytes(served.model, served.precision, served.tp), taken.get(served.id, 0))

    def _changed(self) -> dict[str, Any] | None:
        """The file that is asked for; None: the present one."""
        question, data = self._question, copy.deepcopy(self._plain) | {"systems": [self._present()]}
        if question["system"] is not None:
            known = {each["name"]: each for each in self._asked["document"]["systems"] if isinstance(each, dict)}
            data["systems"] = [known.get(question["system"], question["system"])]
        if question["plan"] is not None:
            data |= self._planned(question["plan"])
        if question["ttft_slo_s"] is not None:
            data["slo"] = data.get("slo", {}) | {"ttft_s": question["ttft_slo_s"]}
            for model in data["models"]:
                model.pop("ttft_slo_s", None)
        if question["one_device_fewer"]:
            if len(self._setup.gpus) == 1 or "count" not in data["cluster"]:
                raise ValueError("one device fewer: the file has one device only, or no cluster.count")
            data["cluster"]["count"] -= 1
            if question["system"] is None and question["plan"] is None:
                data["systems"] = [self._unpinned()]
        changed = any(question[key] for key in ("system", "plan", "ttft_slo_s", "one_device_fewer"))
        return data if changed else None

    def _planned(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        """The keys that a plan changes: its system and its devices. Raises ValueError for a plan of other models."""
        own, given = [model["id"] for model in self._plain["models"]], plan.get("models")
        ids = [each.get("id") for each in given if isinstance(each, dict)] if isinstance(given, list) else []
        if set(ids) != set(own):
            raise ValueError(
                f"the plan has the models {', '.join(map(str, ids)) or 'none'}; served are {', '.join(own)}"
            )
        if not isinstance(plan.get("systems"), list) or not plan["systems"]:
            raise ValueError("the plan has no systems; expected a plan.yaml of fineserve-sim plan")
        cluster = plan.get("cluster")
        count = cluster.get("count", 1) if isinstance(cluster, dict) else 1
        return {"systems": plan["systems"][:1], "cluster": self._plain["cluster"] | {"count": count}}

    # --- simulated answers ----------------------------------------------------------------------------------------------

    def told(self) -> dict[str, Any]:
        """Measured, simulated as it was, and as it would be."""
        began_s = time.monotonic()
        measured = self._values(self._past.ttft_s, self._past.end_s, self._limits(self._plain))
        present = self._simulated(self._plain | {"systems": [self._present()]})
        found: dict[str, Any] = {
            "window_s": self._past.window_s,
            "requests": len(self._past.arrival_s),
            "steps": self._steps,
            "measured": measured,
            "simulated": present,
            "error": {
                "throughput": _error(present["throughput_per_s"], measured["throughput_per_s"]),
                "ttft": _error(present["ttft_median_s"], measured["ttft_median_s"]),
            },
        }
        if self._question["seconds"] is not None:
            found["plan"] = self._question["plan"] = self._search(self._question["seconds"])
        changed = self._changed()
        found["whatif"] = None if changed is None else self._simulated(changed)
        return found | {"took_s": time.monotonic() - began_s}

    def _limits(self, data: dict[str, Any]) -> Floats:
        """The TTFT limit of each request."""
        general = data.get("slo", {}).get("ttft_s", np.inf)
        limits: Floats = np.array([model.get("ttft_slo_s", general) for model in data["models"]])[self._past.model]
        return limits

    def _simulated(self, data: dict[str, Any]) -> dict[str, Any]:
        result = simulate(self._scenario(data))
        seen = self._past
        finish_s = np.where(result.fate == Fate.FINISHED, result.finish_s, np.nan)
        counts: dict[str, Any] = {"dropped": int(np.sum(result.fate == Fate.DROPPED))}
        counts |= {name: int(result.counters[name]) for name in _COUNTERS if name in result.counters}
        values = self._values(result.first_token_s - seen.arrival_s + seen.front_s, finish_s, self._limits(data))
        return values | counts

    def _values(self, ttft_s: Floats, end_s: Floats, limit_s: Floats) -> dict[str, Any]:
        """Of what came until now; a median of nothing is None."""
        window_s, come = self._past.window_s, self._past.arrival_s + ttft_s <= self._past.window_s
        here = ttft_s[come]
        return {
            "throughput_per_s": float(np.sum(end_s <= window_s) / window_s),
            "ttft_median_s": float(np.median(here)) if len(here) else None,
            "ttft_p99_s": float(np.quantile(here, 0.99)) if len(here) else None,
            "in_time": float(np.mean(ttft_s <= limit_s)),
        }

    def _search(self, seconds: float) -> dict[str, Any]:
        """The best plan that a search of so long finds for the models as they run, from where they are on."""
        from fineserve_sim.planning.find import Budget, search
        from fineserve_sim.planning.like import like
        from fineserve_sim.planning.problem import Home
        from fineserve_sim.planning.wish import Wish, plan_document, problem_of

        file = self._folder / "present.yaml"
        file.write_text(
            to_yaml(self._plain | {"folder": str(self._home), "systems": [self._present()]}), encoding="utf-8"
        )
        taken = like(file)
        if taken.gpu is None:
            raise ValueError("cluster: has several kinds of GPUs; a plan is searched for on one")
        limit_s = self._question["ttft_slo_s"] or float(self._limits(self._plain).min())
        wish = Wish(
            self._folder / "trace.csv", taken.models, len(self._setup.gpus), limit_s, gpu=taken.gpu, kept=taken.kept
        )
        problem, groups = problem_of(wish), self._asked["groups"]
        known = tuple(Home(0, tuple(map(tuple, groups.get(each.id, ())))) for each in taken.models)
        document = plan_document(wish, search(problem, Budget(seconds=seconds), known=[known]).layout)
        return {key: document[key] for key in ("cluster", "models", "systems")}


def _name(item: dict[str, Any] | str) -> str:
    """Of a system of a file."""
    return item if isinstance(item, str) else str(item["name"])


def _error(simulated: float | None, measured: float | None) -> float | None:
    return simulated / measured - 1 if simulated is not None and measured else None


def main(arguments: Sequence[str]) -> None:
    os.nice(int(arguments[1]))
    try:
        answer = Answer(Path(arguments[0])).told()
    except (ConfigError, ScenarioError, TableError, ValueError) as problem:
        answer = {"problem": " ".join(str(problem).split())}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
