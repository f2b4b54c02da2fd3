"""llm-d's LMBench runs (vLLM, April and May 2025): single requests at replicas of Llama-3.1-70B, or of 8B.

Users hold conversations. The short-input runs name the users; in the ShareGPT runs the lengths tell which user asks again. A
prompt begins with the prompt before it. It does not begin with the answer: prompts are the same in all runs, answers are not.

``conversations`` finds the turns of one conversation where a record holds their lengths alone. Users ask in turn. Each asks its
next question as soon as all others have asked theirs. A prompt is the prompt and the answer before it, and the new question.
A user whose conversation has ended is passed over; no user joins. So request j continues request j - users, where the number
of users still there never rises. Its question must have a token at least:

    question[j] = prompt[j] - prompt[j - users] - answer[j - users] >= 1

There are many numbers of users, and many ways to let them drop out. The one counts whose requests bring the fewest new tokens,
by the sum of their logs. A first request brings its whole prompt, a later one its question. Wrong pairs leave differences as
large as prompts. The search is dynamic programming over requests and users; nothing but the lengths enters.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd

from fineserve_evidence.validate.cases import (
    Case,
    Floats,
    Ints,
    Label,
    MeasuredSet,
    OpenLoop,
    Sensitivity,
    Serving,
    blocks_of_conversations,
    with_load,
    with_serving,
    without_prefix_cache,
)
from fineserve_evidence.validate.front_end import TOKENISE_S, Api
from fineserve_evidence.validate.rows import (
    UnsupportedRow,
    cases_of,
    check_positive,
    gpu_named,
    model_named,
    stem,
    supported,
)
from fineserve_sim.catalog import deployment, precision

COLUMNS = (
    "config", "gpu", "scenario", "qps", "launch_s", "prompt_tokens", "generation_tokens", "ttft_s", "generation_s",
)  # fmt: skip
CONFIGURATION = re.compile(r"\w+-vllm-(?P<size>8b|70b)(-(?P<replicas>\d+)replicas)?")
SYNCHRONOUS_V1 = deployment("vllm-v1")
"""vLLM V1 with CUDA graphs before it scheduled a step ahead by default (0.8 to 0.13). Scheduling, input copies and sampling lie
between two steps."""
MODELS = {"8b": ("llama-3.1-8b", 1), "70b": ("llama-3.1-70b", 2)}
"""Model and TP degree by the size in a configuration's name. The TP degree is not recorded."""
FITTED_CONFIGURATION, FITTED_SCENARIO, FITTED_QPS = "exp3-vllm-70b-2replicas", "short_input", 1.0
"""Runs at up to this rate, where no request waits, gave the time of the gateway. They are not reported."""
GATEWAY = Api(0.0086, TOKENISE_S)
"""Client, gateway and server: the median of what TTFT exceeds the engine's and the tokeniser's in the runs above."""
COMPLETE = 0.9
"""A run below this part of its stated rate was broken off: requests that loaded the engines are not recorded."""


def read_lmbench(frame: pd.DataFrame, path: Path) -> MeasuredSet:
    """Make one case a run (configuration, scenario, rate). Its rows are requests."""
    fitted = (frame.config == FITTED_CONFIGURATION) & (frame.scenario == FITTED_SCENARIO) & (frame.qps <= FITTED_QPS)
    runs = [rows for _, rows in frame[~fitted].groupby(["config", "scenario", "qps"], sort=False)]
    return MeasuredSet(
        stem(path),
        *cases_of(runs, lambda rows: _case(rows, path), lambda rows: ("vllm", str(rows.config.iloc[0])), len),
        assumptions=(
            "70B at TP 2, 8B at TP 1, 16-bit, replicas in turn; token budget 2048; memory utilization 0.9 (vLLM's default); "
            "prefix cache as vLLM 0.8 has by default",
            f"{GATEWAY}, fitted on the short-input runs of "
            f"{FITTED_CONFIGURATION} at up to {FITTED_QPS:g} requests/s ({int(fitted.sum())} rows here, not reported)",
            "ShareGPT runs: who asks again is read off the lengths of prompts and answers",
            "a request's time is its mean over the moments of a step at which it may come",
        ),
        sensitivities=(
            Sensitivity("one run, requests at the recorded times", with_load(OpenLoop, phases=1)),
            Sensitivity("no prefix cache", without_prefix_cache),
            Sensitivity("TP 4 a replica", with_serving(tp=4)),
            Sensitivity("GPU memory utilization 0.95", with_serving(memory_utilization=0.95)),
            Sensitivity("GPU memory utilization 0.95, one replica", _one_full_replica),
            Sensitivity("token budget 8192", with_serving(token_budget=8192)),
        ),
        shares_prefixes=True,
        fitted=int(fitted.sum()),
    )


SCOUT = "exp4-vllm-llama4-scout-tp4"


def _one_full_replica(case: Case) -> Case:
    return with_serving(memory_utilization=0.95)(with_load(OpenLoop, replicas=1)(case))


def _engines(config: str) -> tuple[str, int, int]:
    """Model, TP degree and replicas of a configuration. Raises UnsupportedRow."""
    if config == SCOUT:
        return "llama-4-scout", 4, 1
    found = CONFIGURATION.fullmatch(config)
    if found is None:
        raise UnsupportedRow("not plain vLLM replicas of Llama-3.1 8B or 70B, or Llama 4 Scout")
    return *MODELS[found["size"]], int(found["replicas"] or 1)


def _case(rows: pd.DataFrame, path: Path) -> Case:
    config, scenario, qps = (rows[name].iloc[0] for name in ("config", "scenario", "qps"))
    name, tp, replicas = _engines(config)
    rows = rows.sort_values("launch_s", kind="stable")
    check_positive(rows, ("prompt_tokens", "generation_tokens", "ttft_s"), path)
    if (len(rows) - 1) < COMPLETE * qps * np.ptp(rows.launch_s.to_numpy(np.float64)):
        raise UnsupportedRow("broken off: requests that were sent are not recorded")
    n, prompts, outputs = len(rows), rows.prompt_tokens.to_numpy(np.int64), rows.generation_tokens.to_numpy(np.int64)
    load = OpenLoop(
        arrival_s=rows.launch_s.to_numpy(np.float64),
        model=np.zeros(n, dtype=np.int64),
        prompt_tokens=prompts,
        output_tokens=outputs,
        replicas=replicas,
        blocks=blocks_of_conversations(_conversations(rows), prompts),
    )
    served = model_named(name)
    device = gpu_named(str(rows.gpu.iloc[0]))
    engine = Serving(served, precision("fp16"), tp, device, SYNCHRONOUS_V1, 2048, 256, api=GATEWAY)
    label = Label(f"{stem(path)}, {scenario}", "vllm", served.name, "W16A16", tp)
    return Case(
        label, supported(engine), load, rows.ttft_s.to_numpy(np.float64), _per_token(rows.generation_s, outputs)
    )


def _conversations(rows: pd.DataFrame) -> Ints:
    """The user of each request: by name where the rows have one, else by the lengths. Rows come in order of arrival."""
    if "user_id" in rows and rows.user_id.notna().all():
        return pd.factorize(rows.user_id)[0].astype(np.int64)
    return conversations(rows.prompt_tokens.to_numpy(np.int64), rows.generation_tokens.to_numpy(np.int64))


def _per_token(seconds: pd.Series, outputs: Ints) -> Floats:
    gaps = np.where(outputs > 1, outputs - 1, np.nan)
    result: Floats = seconds.to_numpy(np.float64) / gaps
    return result


def conversations(prompt_tokens: Ints, answer_tokens: Ints) -> Ints:
    """Find the conversation of each request, shape (n,), numbered by its first request.

    Requests come in order of arrival. If nothing fits, each is a conversation of its own.
    """
    n = len(prompt_tokens)
    cost = _costs(prompt_tokens, answer_tokens)
    first = np.cumsum(np.log(prompt_tokens))
    least, found = float(first[-1]), (n, list[int]())
    for users in range(1, n):
        later, there = _cheapest(cost, users)
        if first[users - 1] + later < least:
            least, found = first[users - 1] + later, (users, there)
    return _numbered(n, *found)


def _costs(prompt_tokens: Ints, answer_tokens: Ints) -> Floats:
    """Log of the question that request j would hold if ``users`` were there, at [j, users]; infinite where it cannot be."""
    n = len(prompt_tokens)
    before = np.arange(n)[:, None] - np.arange(n)[None, :]
    question = prompt_tokens[:, None] - (prompt_tokens + answer_tokens)[np.maximum(before, 0)]
    possible = (before >= 0) & (before < np.arange(n)[:, None]) & (question >= 1)
    result: Floats = np.where(possible, np.log(np.maximum(question, 1)), np.inf)
    return result


def _cheapest(cost: Floats, users: int) -> tuple[float, list[int]]:
    """The least cost when so many ask at first, and how many are there at each later request."""
    totals, choices = cost[users, : users + 1], []
    for j in range(users + 1, len(cost)):
        # Over at least as many users before: the minimum from the right, and where it is.
        right = np.minimum.accumulate(totals[::-1])[::-1]
        if not np.isfinite(right[0]):
            return np.inf, []
        choices.append(_last_minimum(totals, right))
        totals = right + cost[j, : users + 1]
    last = int(np.argmin(totals))
    there = [last]
    for choice in reversed(choices):
        there.append(int(choice[there[-1]]))
    return float(totals[last]), there[::-1]


def _last_minimum(values: Floats, right: Floats) -> Ints:
    """For each place, a place at or behind it that holds the least value from there on."""
    places = np.where(values == right, np.arange(len(values)), len(values))
    result: Ints = np.minimum.accumulate(places[::-1])[::-1]
    return result


def _numbered(n: int, users: int, there: list[int]) -> Ints:
    numbers = np.arange(n)
    for j, present in enumerate(there, start=users):
        numbers[j] = numbers[j - present]
    return numbers
