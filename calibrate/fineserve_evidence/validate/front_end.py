"""What lies between a client and its engine.

Every server takes a time for each request (HTTP, messages between processes, the stream of tokens), and tokenises its prompt:
``Api``. A request's TTFT holds both. They delay no other request, but in the bursts that GPUStack's reader queues.

One process may do it for all, one after the other: ``FrontEnd``.

SGLang serves HTTP, tokenises and writes all streams in one process of one thread, at every TP degree. A prompt takes time by
its tokens, and so does each token that a step yields. Prompts do not wait for tokens, as the thread takes turns; the tokens of
steps queue in their order. While engines are slower than that, a request hardly waits. When they yield more tokens than the
process writes, it becomes the queue of the whole loop: first tokens wait behind the tokens of others.

Constants are from outside of the sets that are predicted, see ``SGLANG``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


class Api(NamedTuple):
    """Seconds outside of the engine that a request's TTFT holds, and those for each token of its prompt."""

    request_s: float = 0.0
    prompt_token_s: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.request_s * 1e3:g} ms and {self.prompt_token_s * 1e6:g} us a prompt token between client and engine"
        )

    def seconds(self, prompt_tokens: ArrayLike) -> Floats:
        """Seconds of requests with prompts of so many tokens, shape (n,)."""
        seconds: Floats = self.request_s + self.prompt_token_s * np.asarray(prompt_tokens, dtype=np.float64)
        return seconds


NO_API = Api()
TOKENISE_S = 3.5e-6
"""Seconds of a prompt's token: Hugging Face's tokenizers on one core. The median of twelve measurements, 1.8 to 6.7 us.
Vocabularies: DeepSeek-V3's and Claude's, as litellm 1.110 has them. Prompts: random tokens and English words, of 1,000, 7,400
and 30,000 tokens."""
HTTP = Api(0.005, TOKENISE_S)
"""A server that its client reaches directly. vLLM's own OpenAI server over a tiny model on a CPU: what the client's TTFT
exceeds the engine's queue and prefill, as its metrics count them; prompts of token ids. Six runs of 100 requests: 4.5 to
6.0 ms."""


class FrontEnd(NamedTuple):
    """Seconds of the process for each token of a prompt, and for each token that it hands out."""

    prompt_token_s: float
    token_s: float


SGLANG = FrontEnd(TOKENISE_S, 50e-6)
"""A token takes SGLang's processes 50 to 100 us (measured beside H100s; jmyjmy.top, "sglang multi process tokenizer", 2025).
The lower end is taken: with the upper one no run could yield over 10,000 tokens/s, and some yield 19,600. Our own
measurement of its server has 53 us on a core of 2.4 GHz, and 36 more where 1,000 tokens came before
(``benchmarks/sglang_front_end.py``)."""


@dataclass(slots=True)
class Desk:
    """The queue of one front end: when its work is done, when the last prompt was read, and when the tokens of each step were
    with their clients."""

    front_end: FrontEnd
    free_s: float = 0.0
    read_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    seen_s: list[float] = field(default_factory=list)

    def take(self, now: float, prompt_tokens: int) -> float:
        """A request comes now. Returns when the engine gets it: after the prompts before, not after tokens."""
        work_s = self.front_end.prompt_token_s * prompt_tokens
        self.free_s, self.read_s = max(self.free_s, now) + work_s, max(self.read_s, now) + work_s
        return self.read_s

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
