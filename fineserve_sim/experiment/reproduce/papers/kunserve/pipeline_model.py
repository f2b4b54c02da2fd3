"""How long microbatches take through a pipeline (KunServe App. A).

With sends that no stage waits for, microbatch k leaves stage s at

    finish[k][s] = max(finish[k-1][s], finish[k][s-1] + transfer) + t[k][s]

The paper's eq. (4) hands over in lock step: a stage only passes on when its neighbour is free. For two stages of equal cost
this is an upper bound of the recurrence. Times 5, 1, 5 take 16 with asynchronous sends and 20 by eq. (4).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def finish_times_s(stage_s: Sequence[Sequence[float]], transfer_s: float = 0.0) -> list[list[float]]:
    """When each microbatch leaves each stage, shape (microbatches, stages), all being ready at time 0.

    ``stage_s[k][s]`` are the seconds of microbatch k in stage s; ``transfer_s`` passes between two stages.
    """
    finish: list[list[float]] = []
    for batch in stage_s:
        above = finish[-1] if finish else [0.0] * len(batch)
        row: list[float] = []
        for stage, seconds in enumerate(batch):
            ready_s = row[-1] + transfer_s if stage else 0.0
            row.append(max(above[stage], ready_s) + seconds)
        finish.append(row)
    return finish


def lockstep_bound_s(cost_s: Sequence[float]) -> float:
    """Eq. (4): two stages of equal cost, handing over in lock step. 0 without microbatches."""
    if not cost_s:
        return 0.0
    return cost_s[0] + sum(max(pair) for pair in pairwise(cost_s)) + cost_s[-1]
