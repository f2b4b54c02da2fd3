"""Host times of engine generations, fitted on the rows that ``validate`` does not report.

* ``fit_eager``: vLLM V1 without CUDA graphs, on the authors' decodes with 256 input tokens and all SMs, TP 1 and 2:
  ``tpot = overhead + batch x sequence + max(device, floor)``; at TP 2 the floor holds two collectives a layer, measured by
  aiconfigurator, and a step one ``doubling``. What a prompt costs a group comes from the TTFT of all SM shares at TP 2.
* ``fit_whole_batches``: vLLM 0.5, on Aegaeon's decode steps of batches that one prefill takes.

Those of ``vllm-v1`` and ``sglang-0.5`` are steps of closed loops, chosen on a grid (docs/fidelity.md).
All fits are least squares of log ratios.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from fineserve_calibrate.fit.host_overhead import NO_HOST
from fineserve_calibrate.validate.aegaeon import BUDGETS, OUTPUT_TOKENS, USUAL_BUDGET
from fineserve_calibrate.validate.authors import HOST, WHOLE
from fineserve_calibrate.validate.cases import Floats
from fineserve_calibrate.validate.names import gpu_named, model_named
from fineserve_calibrate.validate.predict import StepFactory
from fineserve_calibrate.validate.profile_fit import FLOORS, Profile
from fineserve_calibrate.validate.sm_share import sm_shares
from fineserve_sim.catalog import Deployment, GpuSpec, GroupCosts, deployment, gpu, precision
from fineserve_sim.latency import StepModel

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
