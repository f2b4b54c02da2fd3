"""What the time to a first token was spent for: waits, the prompt by itself, others in the same steps, neighbours.

The prompt by itself is what it takes on an idle engine of its model, as the results folder describes that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from fineserve_sim.experiment.file.errors import ConfigError
from fineserve_sim.experiment.file.load import load_experiment
from fineserve_sim.experiment.run.alone import engines_of, first_token_s, step_of
from fineserve_sim.experiment.show.timelines.decode import BETWEEN, DECODES, NEIGHBOURS, PROMPTS, Decode
from fineserve_sim.experiment.show.timelines.stored import StoredRun
from fineserve_sim.latency import StepModel

OWN = "its own prompt, as on an idle engine"
OTHERS = "others' prompts and decodes in the same steps"
STEPS = "steps with its prompt"


def spent_to_first_s(run: StoredRun, request: int, prefill: Decode, waited_s: Mapping[str, float]) -> dict[str, float]:
    """Seconds to the first token by what they were spent for, the most first; they add up to the TTFT. Empty without one, or
    without decisions that tell it. ``prefill``: from the first chunk to the first token; ``waited_s``: before that."""
    ttft_s = float(run.data.ttft_s[request])
    if not prefill.seconds > 0 or math.isnan(ttft_s):
        return {}
    spent = prefill.spent_s
    steps_s = spent.get(PROMPTS, 0.0) + spent.get(DECODES, 0.0)
    own_s = own_prefill_s(run, request)
    found = {f"waiting for {what}": seconds for what, seconds in waited_s.items()}
    if own_s is None:
        found[STEPS] = steps_s
    else:
        found |= {OWN: min(own_s, steps_s), OTHERS: max(0.0, steps_s - own_s)}
    found[NEIGHBOURS] = spent.get(NEIGHBOURS, 0.0)
    found[BETWEEN] = ttft_s - sum(found.values())
    return dict(sorted(((what, s) for what, s in found.items() if s > 1e-9), key=lambda item: -item[1]))


def own_prefill_s(run: StoredRun, request: int) -> float | None:
    """Seconds; None where the folder does not tell the step times of its engine."""
    data = run.data
    model = data.models[data.model[request]]
    visits = data.visits.of(request)
    engine = visits[-1].engine if visits else -1
    tp = len(run.engine_gpus[engine]) if 0 <= engine < len(run.engine_gpus) else 0
    found = _engine(run.folder, run.system, json.dumps(run.axes, sort_keys=True), model, tp)
    return None if found is None else first_token_s(found[0], int(data.prompt_tokens[request]), found[1])


@lru_cache(maxsize=64)
def _engine(folder: Path, system: str, axes: str, model: str, tp: int) -> tuple[StepModel, int] | None:
    """The step times and the token budget of an engine of the model: that of the degree ``tp`` where it has several."""
    try:
        experiment = load_experiment(folder / "resolved.yaml")
    except (ConfigError, OSError):
        return None
    for point in experiment.points:
        if point.system == system and json.dumps(point.axes, sort_keys=True) == axes:
            setup = experiment.setup_of(point)
            resolved = next(each for each in setup.models if each.id == model)
            engines = list(engines_of(setup, resolved))
            own = next((each for each in engines if each[0].tp == tp), engines[0]) if engines else None
            step = None if own is None else step_of(*own, setup.engine, setup.systems[system].memory)
            return None if step is None else (step, setup.engine.token_budget)
    return None
