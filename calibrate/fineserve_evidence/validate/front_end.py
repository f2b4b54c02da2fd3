"""The process between clients and engine: it tokenises prompts and streams tokens, one after the other.

SGLang serves HTTP, tokenises and hands tokens out in processes of one thread each, at every TP degree. All
work is taken to queue in one of them, in the order in which it comes. A prompt takes time by its tokens, and so does each
token that a step yields. While engines are slower than that, a request hardly waits. When they yield
more tokens than the process hands out, it becomes the queue of the whole loop: first tokens wait behind the tokens of others.

Constants are from outside of the sets that are predicted, see ``SGLANG``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class FrontEnd(NamedTuple):
    """Seconds of the process for each token of a prompt, and for each token that it hands out."""

    prompt_token_s: float
    token_s: float


SGLANG = FrontEnd(1.5e-6, 50e-6)
"""Hugging Face's tokenizers encode English at 2.7 MiB/s from Python, 4.3 bytes a token (gist 9090b155a310 of benvanik, 2026).
SGLang's detokenizer takes 50 to 100 us a token (measured beside H100s; jmyjmy.top, "sglang multi process tokenizer", 2025). The
lower end is taken: with the upper one no run could yield over 10,000 tokens/s, and some yield 19,600."""


@dataclass(slots=True)
class Desk:
    """The queue of one front end: when its work is done, and when the tokens of each step were with their clients."""

    front_end: FrontEnd
    free_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    seen_s: list[float] = field(default_factory=list)

    def take(self, now: float, prompt_tokens: int) -> float:
        """A request comes now. Returns when the engine gets it."""
        self.free_s = max(self.free_s, now) + self.front_end.prompt_token_s * prompt_tokens
        return self.free_s

    def hand_out(self, now: float, tokens: int) -> float:
        """A step yields so many tokens now. Returns when clients see them, on average."""
        begin_s = max(self.free_s, now)
        self.free_s = begin_s + self.front_end.token_s * tokens
        self.step_s.append(now)
        self.seen_s.append((begin_s + self.free_s) / 2)
        return self.seen_s[-1]

    def seen(self, moments_s: Floats) -> Floats:
        """Find when clients saw what steps yielded at these moments, shape (n,); NaN stays NaN."""
        if not self.step_s:
            return moments_s
        places = np.searchsorted(_array(self.step_s), np.nan_to_num(moments_s)).clip(max=len(self.step_s) - 1)
        return np.where(np.isnan(moments_s), np.nan, _array(self.seen_s)[places])


def _array(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=np.float64)
