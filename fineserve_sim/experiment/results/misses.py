"""Where misses come from: every measured request is within its limits, or missed for one cause.

* unplaced: turned away because its model had no instance; rejected: turned away for another reason (a prompt that no engine of
  its model can hold). dropped: its scheduler gave it up. unfinished: it had not ended when the run did.
* cut_memory, cut_context: its output ended before it was as long as asked, since the KV memory of its engine or the context
  of its model was full. It is no miss where such outputs are accepted.
* prompt: it was late or dropped, and its prompt is so long that an idle engine would not have its first token in time either.
* late: it finished, its first token after the TTFT limit. slow: in time, but above the TPOT limit. overdue: both met, but
  above the end-to-end limit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from fineserve_sim.cluster import Cause, Fate
from fineserve_sim.experiment.run.run_data import Columns, Floats, Limits, Mask

CAUSES = (
    *("prompt", "late", "slow", "overdue", "cut_memory", "cut_context"),
    *("dropped", "rejected", "unplaced", "unfinished"),
)


def met(run: Columns, limits: Limits) -> dict[str, Mask]:
    """Which requests finished and met each limit that is given, and all of them, by metric."""
    finished = run.fate == Fate.FINISHED
    over = {"ttft": run.ttft_s, "tpot": run.tpot_s, "e2e": run.e2e_s}
    found = {}
    for (moment, latency_s), limit_s in zip(over.items(), limits.moments, strict=True):
        if limit_s:
            found[f"{moment}_attainment"] = finished & ~(latency_s > _by_request(run, limit_s))
    return found | {"slo_attainment": np.logical_and.reduce([finished, *found.values()])}


def _by_request(run: Columns, limit_s: Mapping[str, float]) -> Floats:
    limits: Floats = np.array([limit_s.get(name, np.inf) for name in run.models])[run.model]
    return limits


def causes(
    run: Columns, hits: Mapping[str, Mask], unplaced: Collection[str], reach_tokens: Mapping[str, int] | None = None
) -> NDArray[np.int8]:
    """For each request 0, or the place of its cause in ``CAUSES``, counted from 1. ``hits``: as ``met`` gives them;
    ``unplaced``: models without an instance; ``reach_tokens``: as of ``Limits``."""
    everything = np.ones(len(run.fate), dtype=np.bool_)
    homeless = np.array([name in unplaced for name in run.models], dtype=np.bool_)[run.model]
    rejected = run.fate == Fate.REJECTED
    late = ~hits.get("ttft_attainment", everything)
    reach = np.array([(reach_tokens or {}).get(name, np.inf) for name in run.models])[run.model]
    gave_up = (run.fate == Fate.DROPPED) | (late & (run.fate == Fate.FINISHED))
    of_cause = {
        "unplaced": rejected & homeless,
        "rejected": rejected,
        "prompt": gave_up & (run.prompt_tokens > reach),
        "dropped": run.fate == Fate.DROPPED,
        "unfinished": run.fate == Fate.UNFINISHED,
        "cut_memory": (run.fate == Fate.CUT) & (run.cause == Cause.MEMORY),
        "cut_context": (run.fate == Fate.CUT) & (run.cause == Cause.CONTEXT),
        "late": late,
        "slow": ~hits.get("tpot_attainment", everything),
        "overdue": ~hits.get("e2e_attainment", everything),
    }
    codes = [CAUSES.index(name) + 1 for name in of_cause]
    found: NDArray[np.int8] = np.select(list(of_cause.values()), codes, 0).astype(np.int8)
    return found


def counted(codes: NDArray[np.int8]) -> dict[str, int]:
    """How many requests missed for each cause."""
    counts = np.bincount(codes, minlength=len(CAUSES) + 1)[1:]
    return {cause: int(count) for cause, count in zip(CAUSES, counts, strict=True)}
