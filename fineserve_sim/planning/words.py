"""A plan in sentences."""

from __future__ import annotations

from fineserve_sim.planning.in_time import RIVALS, InTime
from fineserve_sim.planning.make import Found

STOPPED = "Stopped: this is the best so far. The same command goes on from here."


def answer(found: Found) -> str:
    """Where each model goes, a sentence, and what the plan keeps beside the best system's placement, a line a situation."""
    homes = "; ".join(
        f"{each.id} ({each.options[home.option][0]}) on "
        + (" and ".join(f"GPU {'+'.join(map(str, group))}" for group in home.groups) or "none")
        for each, home in found.homes
    )
    kept = [
        f"{row.situation}: {100 * row.plan:.1f} % of the requests on time ({100 * row.worst:.1f} % of {row.worst_model}'s), "
        f"{100 * row.best_system:.1f} % as {found.best_system} places the models"
        for row in found.judged
    ]
    where = f"On {found.wish.cluster}{found.sure.beside_gpus}: {homes}."
    return "\n".join([where, *kept, f"{found.sure}. {found.sure.why}"])


def in_time(found: InTime) -> str:
    """The shares on time of a plan in time after its first window, beside its rivals', and its number of moves."""
    moves = sum(window.came > 0 for window in found.windows)
    kept = [
        f"{name}: {100 * share:.1f} ± {100 * half:.1f} %"
        for name, (share, half) in zip(RIVALS, found.rivals, strict=True)
    ]
    first = (
        f"In {len(found.windows)} windows it moves {moves} times; {100 * found.on_time:.1f} % of the requests on time"
    )
    return "\n".join([f"{first}.", *kept])
