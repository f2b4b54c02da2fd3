"""Errors of experiments, each one line for the author of the file or the user at the keyboard."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from fineserve_sim.cluster import ScenarioError

__all__ = ["ConfigError", "Interrupted", "MachineError", "NoLimitError", "ScenarioError", "nearest"]


class ConfigError(ValueError):
    """A mistake in the user's input: ``place: key: what was wrong; what is expected``, always one line."""

    def __init__(self, place: str, key: str, problem: str) -> None:
        self.place = place
        self.key = key
        self.problem = " ".join(problem.split())
        super().__init__(": ".join(part for part in (place, key, self.problem) if part))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str, str]]:
        return type(self), (self.place, self.key, self.problem)


class NoLimitError(ConfigError):
    """So few requests of a reference were served that no limit follows. What was simulated serves nothing."""


class MachineError(ConfigError):
    """A failure of the machine, for any input: a disk is full, workers die, a stored file is damaged."""


class Interrupted(KeyboardInterrupt):
    """The user stopped the run after ``done`` of ``total`` simulations; no finished one will be repeated."""

    def __init__(self, done: int, total: int) -> None:
        self.done = done
        self.total = total
        super().__init__(
            f"interrupted after {done} of {total} simulations, which are kept; run the same command again to go on"
        )


def nearest(name: object, valid: Iterable[str]) -> str:
    """``did you mean "x"?`` when a valid name is close, otherwise the names there are."""
    names = list(valid)
    close = get_close_matches(str(name), names, n=1, cutoff=0.6)
    if close:
        return f'did you mean "{close[0]}"?'
    return f"expected one of: {', '.join(names)}" if names else "nothing is expected here"
