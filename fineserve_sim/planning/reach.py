"""What no plan can do: models that miss too much even alone on idle GPUs, in whichever of their options."""

from __future__ import annotations

import math

from fineserve_sim.experiment.file.metric_names import EACH
from fineserve_sim.experiment.show.out_of_reach import out_of_reach_lines
from fineserve_sim.experiment.sizing.feasibility import Feasibility, Lengths, Limit, Question, alone
from fineserve_sim.planning.problem import Problem
from fineserve_sim.planning.target import Target

_WORST = "worst model's "


def out_of_reach(problem: Problem, target: Target) -> str | None:
    """Why fewer requests than the target can be on time, in one line; None where nothing is known to forbid it."""
    scenario, limits = problem.scenario, problem.limits
    trace, gpus = problem.parts[0].trace, dict.fromkeys(gpu.spec for gpu in scenario.gpus)
    models = []
    for number in range(len(problem.models)):
        rows = problem.requests(0, number)
        limit = Limit(limits.ttft_s[number], limits.tpot_s or math.inf, limits.e2e_s or math.inf)
        lengths = Lengths(trace.prompt_tokens[rows], trace.output_tokens[rows])
        question = Question(scenario.engine, scenario.system.memory, limit, lengths)
        ways = (problem.served(number, option) for option in range(len(problem.options[number])))
        if len(rows):
            found = alone(question, [(way, gpu) for way in ways for gpu in gpus])
            if found is None:
                return None
            models.append(found)
    found_all = Feasibility(models, target.shares)
    if not models or not found_all.hopeless:
        return None
    within = ", ".join(
        f"{100 * share:.1f} % of the {_WORST * metric.startswith(EACH)}requests at most"
        for metric, share in found_all.bounds.items()
    )
    told = found_all.told()["models"]
    return f"{within} are on time on idle GPUs. {' '.join(out_of_reach_lines(told))}".rstrip(".")
