"""The constants of the catalog that measured rows gave, fitted again on these rows. ``validate`` does not report them.

On the authors' profile, rows of the 8B models with 256 input tokens, on one GPU:

* ``fit_host``: ``tpot = overhead + max(device, floor)``, one overhead for all precisions, one floor a precision (FP16, whose
  device time hides its floor, shares AWQ's). All SMs.
* ``fit_rate``: compute rates of formats without a table (AWQ, QoQ). TTFT is linear in 1 / rate. All SMs, 2048 tokens or more,
  where the matrix products make the time.
* ``fit_shares``: the compute rate of each SM share on TTFT of 2048 tokens or more, the saturation of memory on TPOT, in turn.

By generation of engines:

* ``fit_eager``: vLLM V1 without CUDA graphs, on the authors' decodes with 256 input tokens and all SMs, TP 1 and 2:
  ``tpot = overhead + batch x sequence + max(device, floor)``; at TP 2 the floor holds two collectives a layer, measured by
  aiconfigurator, and a step one ``doubling``. What a prompt costs a group comes from the TTFT of all SM shares at TP 2.
* ``fit_whole_batches``: vLLM 0.5, on Aegaeon's decode steps of batches that one prefill takes.

The numbers of ``vllm-v1`` and ``sglang-0.5`` are steps of closed loops, chosen on a grid (docs/fidelity.md). All fits are
least squares of log ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from fineserve_calibrate.fit.step_costs import NO_HOST
from fineserve_evidence.validate.aegaeon import BUDGETS, OUTPUT_TOKENS, USUAL_BUDGET
from fineserve_evidence.validate.authors import HOST, TOKEN_BUDGET, WHOLE, SmShare, sm_shares
from fineserve_evidence.validate.cases import Floats
from fineserve_evidence.validate.predict import StepFactory
from fineserve_evidence.validate.rows import gpu_named, model_named, precision_named
from scipy.optimize import least_squares, minimize_scalar

from fineserve_sim.catalog import Deployment, GpuSpec, GroupCosts, deployment, gpu, kernel_rates, linears, precision
from fineserve_sim.latency import StepModel, batch_prefill_s

FLOORS = {"W16A16": "W4A16", "W4A16": "W4A16", "W8A8KV8": "W8A8KV8", "W4A8KV4": "W4A8KV4"}
"""Precision: whose floor it shares."""
LEAST_TOKENS = 2048
ROUNDS = 3
PAPERS_HOST = "vllm-0.9.1-authors"
"""The host time beside which rates and shares are fitted: the one in which the papers' experiments use them."""


class Profile:
    """The rows that constants are fitted on, and the step models that predict them."""

    def __init__(self, rows: pd.DataFrame, make_step: StepFactory) -> None:
        self.rows = rows.assign(precision=[precision_named(name).name for name in rows.qformat])
        self._make_step = make_step

    def step(self, row: Any, device: GpuSpec, host: Deployment) -> StepModel:
        """The step model of a row's engine."""
        return self._make_step(model_named(row.model), precision_named(row.qformat), int(row.tp), device, host)

    def tpot_s(self, rows: pd.DataFrame, device: GpuSpec, host: Deployment) -> Floats:
        """Predicted decode seconds a token, shape (rows,); all rows of one precision."""
        step = self.step(rows.iloc[0], device, host)
        batches = rows[["batch_size", "input_len", "output_len"]].to_numpy(np.int64).tolist()
        return np.array([float(step.decode_steps_s(b, b * tokens, out - 1).mean()) for b, tokens, out in batches])

    def ttft_s(self, rows: pd.DataFrame, device: GpuSpec, host: Deployment) -> Floats:
        """Predicted mean TTFT: the first prompt alone, then the others together."""
        step = self.step(rows.iloc[0], device, host)
        batches = rows[["batch_size", "input_len"]].to_numpy(np.int64).tolist()
        return np.array([_mean_ttft_s(step, batch, tokens) for batch, tokens in batches])


def _mean_ttft_s(step: StepModel, batch: int, tokens: int) -> float:
    first_s = batch_prefill_s(step, 1, tokens, TOKEN_BUDGET)
    rest = batch - 1
    if not rest:
        return first_s
    rest_s = step.step_s(1, tokens, rest * tokens, rest * tokens * (tokens + 1) / 2, 0, batch)
    return first_s + rest / batch * rest_s


def _loss(predicted: Floats, measured: Any) -> float:
    return float((np.log(predicted / measured.to_numpy(np.float64)) ** 2).mean())


def _least(loss: Callable[[float], float], low: float, high: float) -> float:
    """The positive number between ``low`` and ``high`` with the least loss."""
    found = minimize_scalar(
        lambda log: loss(float(np.exp(log))),
        bounds=(np.log(low), np.log(high)),
        method="bounded",
        options={"xatol": 1e-3},
    )
    return float(np.exp(found.x))


def fit_host(profile: Profile) -> tuple[float, Mapping[str, float]]:
    """Overhead of a step, and the floor of each precision, in seconds."""
    rows = profile.rows[profile.rows.mps_percentage == 100].sort_values("precision", kind="stable")
    names = rows.precision.drop_duplicates().tolist()
    device = np.concatenate([profile.tpot_s(rows[rows.precision == name], gpu(WHOLE), NO_HOST) for name in names])
    own = list(dict.fromkeys(FLOORS[name] for name in rows.precision))
    place = np.array([own.index(FLOORS[name]) for name in rows.precision])
    measured = rows.tpot.to_numpy(np.float64)

    def residuals(x: Floats) -> Floats:
        logs: Floats = np.log((x[0] + np.maximum(device, x[1:][place])) / measured)
        return logs

    start = [0.0015, *(float(measured[place == i].min()) - 0.0015 for i in range(len(own)))]
    found = least_squares(residuals, start, x_scale=1e-3).x
    return float(found[0]), dict(zip(own, found[1:].tolist(), strict=True))


def fit_rate(profile: Profile, precision: str) -> float:
    """Compute rate of a precision's matrix products in FLOP/s, beside the catalog's other numbers."""
    rows = profile.rows[(profile.rows.precision == precision) & (profile.rows.mps_percentage == 100)]
    rows = rows[rows.batch_size * rows.input_len >= LEAST_TOKENS]
    used = kernel_rates().gemm[precision].flops_per_s.value
    predicted = profile.ttft_s(rows, gpu(WHOLE), deployment(PAPERS_HOST))
    served = model_named(rows.iloc[0].model)
    token_flops = 2 * served.layers * sum(shape.inputs * shape.outputs for shape in linears(served, 1).values())
    rest = rows.batch_size - 1
    flops = (rows.input_len * (1 + rest * rest / rows.batch_size)).to_numpy(np.float64) * token_flops
    return _least(lambda rate: _loss(predicted + flops * (1 / rate - 1 / used), rows.ttft), used / 2, used * 2)


def fit_shares(profile: Profile, precision: str) -> SmShare:
    """Both numbers of ``SmShare``, each fitted beside the other."""
    rows = profile.rows[(profile.rows.precision == precision) & (profile.rows.mps_percentage < 100)]
    groups = {int(percent) / 100: rows[rows.mps_percentage == percent] for percent in sorted(set(rows.mps_percentage))}
    found = SmShare({share: share for share in groups}, 0.3)
    for _ in range(ROUNDS):
        saturation = found.memory_saturation
        compute = {share: _fit_compute(profile, group, share, saturation) for share, group in groups.items()}
        found = SmShare(compute, _fit_saturation(profile, groups, compute))
    return found


def _fit_compute(profile: Profile, rows: pd.DataFrame, share: float, saturation: float) -> float:
    """Compute rate at one share, on prefills of ``LEAST_TOKENS`` or more."""
    long = rows[rows.batch_size * rows.input_len >= LEAST_TOKENS]

    def loss(rate: float) -> float:
        device = SmShare({share: rate}, saturation).slice_of(gpu(WHOLE), share)
        return _loss(profile.ttft_s(long, device, deployment(PAPERS_HOST)), long.ttft)

    return _least(loss, share / 2, 1.0)


def _fit_saturation(profile: Profile, groups: Mapping[float, pd.DataFrame], compute: Mapping[float, float]) -> float:
    """Share that saturates memory, on the decodes of all shares."""

    def loss(saturation: float) -> float:
        law = SmShare(compute, saturation)
        losses = [
            _loss(profile.tpot_s(rows, law.slice_of(gpu(WHOLE), share), deployment(PAPERS_HOST)), rows.tpot)
            for share, rows in groups.items()
        ]
        return float(np.sum(losses))

    return _least(loss, 0.05, 1.0)


SCALE_S = 1e-3
EXACT = {"xtol": 1e-12, "ftol": 1e-12, "gtol": 1e-12}
OMNISERVE = "W4A8KV4"


class EagerFit(NamedTuple):
    """Seconds, by name as in the catalog's deployment."""

    overhead_s: float
    sequence_s: float
    doubling_s: float
    floors: dict[str, float]


def fit_eager(profile: Profile) -> EagerFit:
    """The numbers of ``HOST`` but for the prompts'; ``profile``: rows of TP 1 and 2. OmniServe's (QoQ) are another engine's."""
    whole = profile.rows[(profile.rows.mps_percentage == 100) & (profile.rows.precision != OMNISERVE)]
    groups = [group for _, group in whole.groupby(["precision", "tp"], sort=False)]
    rows = pd.concat(groups)
    device = np.concatenate([profile.tpot_s(group, gpu(WHOLE), NO_HOST) for group in groups])
    own = sorted({FLOORS[name] for name in rows.precision})
    place = np.array([own.index(FLOORS[name]) for name in rows.precision])
    grouped = (rows.tp > 1).to_numpy()
    batch, measured = rows.batch_size.to_numpy(np.float64), rows.tpot.to_numpy(np.float64)
    collectives_s = _collectives_s(rows)

    def residuals(x: Floats) -> Floats:
        floors = x[3:][place] + collectives_s
        predicted = x[0] + batch * x[1] * 1e-3 + grouped * x[2] + np.maximum(device, floors)
        logs: Floats = np.log(predicted / measured)
        return logs

    found = least_squares(residuals, [0.0015, 0.02, 0.0005, *np.full(len(own), 0.007)], x_scale=SCALE_S, **EXACT).x
    return EagerFit(found[0], found[1] * 1e-3, found[2], dict(zip(own, found[3:].tolist(), strict=True)))


def fit_floor(profile: Profile, name: str, overhead_s: float, sequence_s: float) -> float:
    """Floor of a precision beside known times, on decodes that the device does not bind; TP 1, all SMs."""
    rows = profile.rows[
        (profile.rows.precision == name) & (profile.rows.mps_percentage == 100) & (profile.rows.tp == 1)
    ]
    seconds = rows.tpot.to_numpy(np.float64) - overhead_s - rows.batch_size.to_numpy(np.float64) * sequence_s
    return float(np.median(seconds))


def _group(host: Deployment) -> GroupCosts:
    if host.group is None:
        raise ValueError(f"deployment {host.name} has no costs of a TP group")
    return host.group


def _collectives_s(rows: pd.DataFrame) -> Floats:
    """Seconds of the collectives' launches in each row's step."""
    launches = _group(deployment(HOST)).collective_s or {}
    ranks = rows.tp.astype(int).tolist()
    layers = [model_named(str(name)).layers for name in rows.model]
    seconds = [2 * count * launches[tp].value if tp > 1 else 0.0 for count, tp in zip(layers, ranks, strict=True)]
    return np.array(seconds)


def fit_prompt(profile: Profile) -> float:
    """Seconds that a step with prompts takes more on a TP group, on the rows of TP 2."""
    rows = profile.rows[profile.rows.tp > 1]
    host = _without_prompts(deployment(HOST))
    predicted, steps, measured = [], [], []
    for (name, percent), group in rows.groupby(["precision", "mps_percentage"], sort=False):
        predicted.append(profile.ttft_s(group, _share_of(str(name), int(str(percent))), host))
        batch = group.batch_size.to_numpy(np.float64)
        steps.append(1 + (batch - 1) / batch)  # the first prompt alone, then the others together
        measured.append(group.ttft.to_numpy(np.float64))
    bare, often, seen = map(np.concatenate, (predicted, steps, measured))
    return float(least_squares(lambda x: np.log((bare + often * x[0]) / seen), [0.005], x_scale=SCALE_S).x[0])


def _without_prompts(host: Deployment) -> Deployment:
    group = _group(host)
    nothing = group.prompt_s.model_copy(update={"value": 0.0})
    return host.model_copy(update={"name": "no prompts", "group": group.model_copy(update={"prompt_s": nothing})})


def _share_of(name: str, percent: int) -> GpuSpec:
    return gpu(WHOLE) if percent == 100 else sm_shares()[name].slice_of(gpu(WHOLE), percent / 100)


def fit_whole_batches(rows: pd.DataFrame, make_step: StepFactory) -> tuple[float, float]:
    """Overhead of a step and seconds of a sequence; ``rows`` in Aegaeon's layout."""
    budgets = [BUDGETS.get(gpu_named(name).name, USUAL_BUDGET) for name in rows.gpu]
    rows = rows[rows.batch * rows.input_len <= np.array(budgets)]
    steps: dict[str, StepModel] = {}
    for name in rows.gpu.unique():
        served = model_named("qwen2.5-7b")
        steps[name] = make_step(served, precision("fp16"), 1, gpu_named(name), NO_HOST)
    device = _decodes_s([steps[name] for name in rows.gpu], rows)
    batch, measured = rows.batch.to_numpy(np.float64), rows.decode_s.to_numpy(np.float64)
    found = least_squares(
        lambda x: np.log((x[0] + batch * x[1] * 1e-3 + device) / measured), [0.003, 0.08], x_scale=SCALE_S
    ).x
    return float(found[0]), float(found[1] * 1e-3)


def _decodes_s(steps: Sequence[StepModel], rows: pd.DataFrame) -> Floats:
    """Mean device seconds of each row's decodes."""
    loads = rows[["batch", "input_len"]].to_numpy(np.int64).tolist()
    means = [
        step.decode_steps_s(batch, batch * tokens, OUTPUT_TOKENS - 1).mean()
        for step, (batch, tokens) in zip(steps, loads, strict=True)
    ]
    return np.array(means)
