"""Room for the outputs of running requests, kept before a prompt is admitted, and the requests that give way when there is
none (SGLang).

A request says how many tokens it may generate at most. SGLang admits a prompt only if the memory then still holds a part of
what all running requests may generate: the *ratio*. Few requests generate all that they may, so the ratio starts at 0.7 and
falls in a straight line, in 600 decode steps, to 0.14 of that. When memory runs out nevertheless, requests are *retracted*
until the others can go on for 20 steps, and the ratio jumps to the value that outputs so far suggest. It starts anew whenever
the engine has nothing to do. Source: SGLang's guide to hyperparameter tuning (``schedule-conservativeness``, and the ratio in
its log lines) and the defaults of its environment variables (``SGLANG_INIT_NEW_TOKEN_RATIO`` and the four after it).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

FIRST_RATIO = 0.7
LEAST_RATIO = FIRST_RATIO * 0.14
DECAY_STEPS = 600
RETRACT_STEPS = 20
LONGEST_RESERVE_TOKENS = 4096
"""More than so many tokens to come are not asked for, by no request."""

_DECAY = (FIRST_RATIO - LEAST_RATIO) / DECAY_STEPS


class Running(NamedTuple):
    """A request that decodes: its tokens so far and at most, its prompt, and a number that tells it from others."""

    generated_tokens: int
    most_tokens: int
    prompt_tokens: int
    request: int


class OutputReserve:
    """The ratio of one engine. Times are decode steps that the engine has done in all, non-decreasing."""

    def __init__(self) -> None:
        self._ratio = FIRST_RATIO
        self._since_step = 0

    def ratio(self, step: int) -> float:
        """The part of the tokens to come that is kept free, at most 1."""
        if step <= self._since_step:
            return self._ratio
        return max(LEAST_RATIO, self._ratio - _DECAY * (step - self._since_step))

    def start_anew(self, step: int) -> None:
        """The engine has nothing to do."""
        self._ratio, self._since_step = FIRST_RATIO, step

    def hold(self, step: int) -> None:
        """The next decode step, which carries prompts too, does not lower the ratio."""
        self._ratio, self._since_step = self.ratio(step), step + 1

    def jump(self, step: int, staying: Collection[Running]) -> None:
        """Requests were retracted and these stay. The ratio becomes the part of their most tokens that they will have
        generated ``RETRACT_STEPS`` from now."""
        tokens = sum(one.generated_tokens for one in staying) + RETRACT_STEPS * len(staying)
        self._ratio = min(1.0, tokens / (sum(one.most_tokens for one in staying) + 1))
        self._since_step = step

    def kept_tokens(self, to_come: Iterable[int], step: int) -> float:
        """Tokens to keep free for running requests, each of which may generate so many more."""
        return self.ratio(step) * sum([min(tokens, LONGEST_RESERVE_TOKENS) for tokens in to_come])


def wanted_tokens(prompt_tokens: int, most_tokens: int) -> int:
    """Tokens for which a request asks when it is admitted: its prompt and all that it may generate."""
    return prompt_tokens + min(most_tokens, LONGEST_RESERVE_TOKENS)


def retraction_order(running: Iterable[Running]) -> Sequence[Running]:
    """The order in which requests give way: the fewest tokens generated, then the longest prompt, then the highest number."""
    return sorted(running, key=lambda one: (one.generated_tokens, -one.prompt_tokens, -one.request))
