"""A sweep of closed loops on one server, with the server's own metrics: gpt-oss-120b on one H200 under vLLM 0.22.

The server's flags and the load come from the set's ``exp_lib.sh``: 8,192 batch tokens, 256 slots, no prefix cache, MXFP4 by
Marlin. Prompts are uniform between 0.8 and 1.0 times 8,000 tokens, outputs of 1,000; each client sends ten requests.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fineserve_evidence.validate.cases import Case, ClosedLoop, Label, MeasuredSet, Serving
from fineserve_evidence.validate.front_end import HTTP
from fineserve_evidence.validate.rows import (
    HIDDEN,
    STEPS_AHEAD,
    UnsupportedRow,
    cases_of,
    check_positive,
    stem,
    supported,
)
from fineserve_sim.catalog import deployment, gpu, model, precision, with_speculation

COLUMNS = ("label", "completed", "mean_tpot_ms", "mean_ttft_ms", "iter_tokens_avg", "spec_accept_rate")
SWEEP = re.compile(r"sweep_c(\d+)")
PROMPT, OUTPUT, SHORTEST, ROUNDS, SLOTS = 8000, 1000, 0.8, 10, 256
DRAFTED = 7
"""Tokens that EAGLE3's head drafted a round, where runs have one. The set records the accepted share of all. The host time of a
draft's passes was fitted on every other of these rows, from the first one on."""


def read_inferencex(frame: pd.DataFrame, path: Path) -> MeasuredSet:
    """Make a case of each concurrency of the sweep; behind a draft head, where its accepted share is recorded."""
    check_positive(frame, ("mean_tpot_ms", "mean_ttft_ms"), path)
    rows = frame.to_dict("records")
    drafted = [row for row in rows if not math.isnan(row["spec_accept_rate"])]
    fitted = drafted[::2]
    kept = [row for row in rows if all(row is not one for one in fitted)]
    cases = cases_of(kept, lambda row: _case(row, path), lambda row: ("vllm", "openai/gpt-oss-120b"))
    return MeasuredSet(
        stem(path),
        *cases,
        assumptions=(
            "flags of exp_lib.sh: one H200, 8,192 batch tokens, 256 slots, MXFP4 by Marlin",
            f"{ROUNDS} requests a client; prompts of {PROMPT}, outputs of {OUTPUT} tokens, uniform in {SHORTEST}-1.0 of them",
            str(HTTP),
        ),
        fitted=len(fitted),
    )


def _case(row: dict[Any, Any], path: Path) -> Case:
    found = SWEEP.fullmatch(str(row["label"]))
    if found is None:
        raise UnsupportedRow("a repetition or a trace of one concurrency")
    clients = int(found[1])
    served, host = model("gpt-oss-120b"), deployment(HIDDEN)
    accepted = float(row["spec_accept_rate"])
    if not math.isnan(accepted):  # without a draft model it is
        served = with_speculation(served, DRAFTED, accepted)
    engine = (served, precision("mxfp4"), 1, gpu("h200-sxm"), host, 8192, SLOTS)
    serving = Serving(*engine, api=HTTP, steps_ahead=STEPS_AHEAD, mean_tokens=int(0.9 * (PROMPT + OUTPUT / 2)))
    load = ClosedLoop(clients, ROUNDS * clients, PROMPT, OUTPUT, SHORTEST)
    ttft_s, tpot_s = (np.array([row[column] / 1e3]) for column in ("mean_ttft_ms", "mean_tpot_ms"))
    label = Label(f"{stem(path)}, {clients} clients", "vllm", served.name, serving.precision.name, 1)
    return Case(label, supported(serving), load, ttft_s, tpot_s)
