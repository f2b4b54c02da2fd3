"""kvcached's benchmark: copies of Llama-3.1-8B on one A100 without MPS, with fixed shares of its memory or with kvcached.

The names describe a run. The set's name ends on vLLM's memory utilization (0.3, 0.5; 0.9 over the copies if it has none). A
file's name has the wanted lengths, the copies, and the delay from one copy's start to the next. Fixed rates send for their
duration. A ramp ``0to12to1-inc1`` sends r requests in second r, up to 12 and down to 1. Then it sends one a second for as long
as all copies' delays last. The number of requests says so (p^2 while ramping, copies x delay after), and so do the durations.
Outputs end by themselves, or at the wanted length. The means of runs with 128 to 1,024 wanted tokens say how many requests are
left at a length (``Ends``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from fineserve_traces import arrivals

from fineserve_evidence.validate.cases import (
    SEED,
    Case,
    Floats,
    Label,
    MeasuredSet,
    OpenLoop,
    Sensitivity,
    Serving,
    with_load,
    with_serving,
)
from fineserve_evidence.validate.front_end import HTTP
from fineserve_evidence.validate.rows import (
    UnsupportedRow,
    cases_of,
    check_positive,
    model_named,
    stem,
    supported,
)
from fineserve_sim.catalog import deployment, gpu, precision

COLUMNS = (
    "set", "file", "hardware", "kvcached", "model_id", "completed", "request_rate", "burstiness", "total_input_tokens",
    "total_output_tokens", "mean_ttft_ms", "mean_tpot_ms", "request_throughput",
)  # fmt: skip
HOST = "vllm-v1-kvcached"
FITTED_MODELS = 2
"""The engine's host time and the law of time-slicing were fitted on the runs with so many copies."""
UTILIZATION = 0.9
KEPT_UP = 0.95
"""A copy below saturation keeps up with this part of the requests a second."""
_FILE = re.compile(r"-(?P<instance>\d+)-delay-(?P<delay_s>\d+)-model-num-(?P<models>\d+)\.json$")
_ASKED = re.compile(r"-completion_(?P<asked>\d+)-")
_RAMP = re.compile(r"ramp-up-down-(?P<start>\d+)to(?P<peak>\d+)to(?P<end>\d+)-inc(?P<step>\d+)")
_SHARE = re.compile(r"-(?P<share>0\.\d+)(-\d+)?$")


class Ends(NamedTuple):
    """The lengths at which outputs end by themselves. The part ``left`` of all requests, falling, goes on beyond ``tokens``."""

    tokens: Floats
    left: Floats

    def lengths(self, rng: np.random.Generator, n: int, asked: int) -> Floats:
        """Draw the output tokens of ``n`` requests, spread evenly over the law and shuffled, at most ``asked``."""
        part = rng.permutation((np.arange(n) + 0.5) / n)
        found: Floats = np.clip(np.round(np.interp(part, self.left[::-1], self.tokens[::-1], left=asked)), 1, asked)
        return found


def ends_of(rows: pd.DataFrame) -> Ends:
    """Read the law off the mean outputs under each wanted length.

    From one length to the next, the mean grows by the difference times the part of the requests that is left there.
    """
    means = (rows["total_output_tokens"] / rows["completed"]).groupby(rows["asked"].astype(float)).mean()
    asked, tokens = (np.concatenate([[0.0], values]) for values in (means.index, means))
    left = np.minimum.accumulate(np.diff(tokens) / np.diff(asked))
    return Ends(np.concatenate([[0.0], (asked[1:] + asked[:-1]) / 2]), np.concatenate([[1.0], left]))


def read_kvcached(frame: pd.DataFrame, path: Path) -> MeasuredSet:
    """Make one case a run, with one row of means a copy.

    Runs with neighbours that the set does not record, and runs on other vendors' GPUs, are unsupported. Runs with two copies
    gave constants, and are not reported.
    """
    frame = _with_names(frame)
    ends = ends_of(frame[_on_one_gpu(frame)])
    runs = [rows for _, rows in frame.groupby(["set", "run", "model_id"], sort=False)]
    found, unsupported = cases_of(
        runs, lambda rows: _case(rows, ends, path), lambda rows: ("vllm", str(rows.model_id.iloc[0])), len
    )
    cases = tuple(case for case in found if len(case.parts) != FITTED_MODELS)
    fitted = FITTED_MODELS * (len(found) - len(cases))
    return MeasuredSet(
        stem(path),
        cases,
        unsupported,
        assumptions=(
            "copies, delays, ramps and memory shares as in file and set names; mean prompts; outputs end as their means under "
            "each length asked for say; elastic copies draw on one KV memory; token budget 2048 (vLLM's default on an A100), "
            "256 sequences",
            f"host time and time-slicing fitted on the runs with {FITTED_MODELS} models: {fitted} rows, not reported",
            "below and above saturation by measured throughput: at least 95 % of what was asked, or less",
        ),
        sensitivities=(
            Sensitivity("token budget 8192", with_serving(token_budget=8192)),
            Sensitivity("ideal processor sharing", with_load(OpenLoop, sharing="fluid")),
        ),
        fitted=fitted,
    )


def _with_names(frame: pd.DataFrame) -> pd.DataFrame:
    """With what stands in the files' names."""
    name = frame["file"].str
    return frame.assign(run=name.replace(_FILE, "", regex=True), **name.extract(_FILE), **name.extract(_ASKED))


def _on_one_gpu(frame: pd.DataFrame) -> pd.Series[bool]:
    """Rows of runs that are known: on NVIDIA's GPUs, with all copies recorded."""
    return frame.hardware.str.startswith("A100") & frame.models.notna()


def _case(rows: pd.DataFrame, ends: Ends, path: Path) -> Case:
    first = rows.iloc[0]
    if not str(first["hardware"]).startswith("A100"):
        raise UnsupportedRow(f"hardware {first['hardware']}")
    if pd.isna(first["models"]) or len(rows) != int(first["models"]):
        raise UnsupportedRow("models that ran beside it are not recorded")
    if pd.isna(first["asked"]):
        raise UnsupportedRow("the output length asked for is not recorded")
    rows = rows.assign(instance=rows["instance"].astype(int)).sort_values("instance")
    check_positive(rows, ("completed", "total_input_tokens", "total_output_tokens", "mean_ttft_ms"), path)
    served, elastic = model_named(str(first["model_id"])), bool(first["kvcached"])
    named = _SHARE.search(str(first["set"]))
    share = float(named["share"]) if named else UTILIZATION / len(rows)
    serving = Serving(served, precision("fp16"), 1, gpu("a100-80gb"), deployment(HOST), 2048, 256, share, HTTP)
    kind = "kvcached" if elastic else "fixed shares"
    label = Label(f"{stem(path)}, {kind}", "vllm", served.name, "W16A16", 1)
    ttft_s, tpot_s = (rows[column].to_numpy(np.float64) / 1e3 for column in ("mean_ttft_ms", "mean_tpot_ms"))
    load = _load(rows, ends, elastic)
    return Case(
        label,
        supported(serving),
        load,
        ttft_s,
        tpot_s,
        throughput_per_s=rows.request_throughput.to_numpy(np.float64),
        parts=tuple(_parts(rows)),
    )


def _parts(rows: pd.DataFrame) -> Iterator[str]:
    """Whether each copy kept up with what it was asked."""
    for row in rows.to_dict("records"):
        asked_per_s = row["request_rate"]
        if not np.isfinite(asked_per_s):
            asked_per_s = row["completed"] / len(_rates(row, int(row["completed"])))
        yield "below saturation" if row["request_throughput"] >= KEPT_UP * asked_per_s else "above saturation"


def _load(rows: pd.DataFrame, ends: Ends, elastic: bool) -> OpenLoop:
    """The copies' arrivals, merged in time; prompts of a copy have its mean length, outputs end as all do."""
    rng = np.random.default_rng(SEED)
    columns: list[np.ndarray[Any, np.dtype[np.float64]]] = []
    for copy, row in enumerate(rows.to_dict("records")):
        n = int(row["completed"])
        times = copy * float(row["delay_s"]) + _arrivals(rng, row, n)
        prompt = max(1, round(row["total_input_tokens"] / n))
        outputs = ends.lengths(np.random.default_rng((SEED, copy)), n, int(row["asked"]))
        columns.append(np.stack([times, np.full(n, copy), np.full(n, prompt), outputs]))
    merged = np.concatenate(columns, axis=1)
    times, copies, prompts, outputs = merged[:, np.argsort(merged[0], kind="stable")]
    return OpenLoop(
        arrival_s=times,
        model=copies.astype(np.int64),
        prompt_tokens=prompts.astype(np.int64),
        output_tokens=outputs.astype(np.int64),
        models=len(rows),
        shared_kv=elastic,
        each=False,
        sharing="time_slice",
        starts_s=tuple(copy * float(delay_s) for copy, delay_s in enumerate(rows.delay_s)),
    )


def _arrivals(rng: np.random.Generator, row: dict[Any, Any], n: int) -> Floats:
    """Of one copy from its start: Gamma gaps with vLLM's burstiness (its shape: 1 is Poisson), stretched along a ramp."""
    cv = float(row["burstiness"]) ** -0.5
    if np.isfinite(row["request_rate"]):
        return arrivals.gamma(rng, row["request_rate"], cv, n)
    asked = np.concatenate([[0.0], np.cumsum(_rates(row, n))])
    order = arrivals.gamma(rng, 1.0, cv, n)
    order *= min(1.0, asked[-1] / order[-1])  # all are sent by the end
    found: Floats = np.interp(order, asked, np.arange(len(asked), dtype=np.float64))
    return found


def _rates(row: dict[Any, Any], n: int) -> list[float]:
    """Requests in each second of a ramp, and after it at its last rate until ``n`` are sent."""
    ramp = _RAMP.search(str(row["file"]))
    if ramp is None:
        raise UnsupportedRow("arrivals of a ramp are not recorded")
    start, peak, end, step = (int(ramp[name]) for name in ("start", "peak", "end", "step"))
    rates = [*range(start, peak, step), *range(peak, end - 1, -step)]
    tail_s = max(0, n - sum(rates)) // max(1, end)
    return [float(rate) for rate in (*rates, *[end] * tail_s)]
