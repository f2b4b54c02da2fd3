"""Seconds of an engine step under speculative decoding, told as steps of one token.

A *round* drafts k tokens for each decode, and checks them in one step of the model, which adds a token of its own. So a
sequence gets E = 1 + accepted tokens of a round, on average. The engine counts a token of each decode an iteration. Here an
iteration takes the part of a round that brings one token:

    round     = host + max(model, floor) + draft
    model     = tokens[n (k + 1)] + lm_head[n (k + 1)] + attention of n decodes
    draft     = a pass over the n (k + 1) tokens of the round before, then k - 1 passes over n tokens,
                each with host time of its own and of each sequence
    iteration = round / E                                                 where only n sequences decode
    iteration = (round with a chunk - round) + round / E                  where a prompt's chunk joins

A chunk adds to a round what it adds, whichever part of it the iteration is. So all work is done once, and TPOT, throughput and
memory follow. Two effects are lost: a prompt waits for the rest of an iteration instead of a round's, and a sequence does not
overshoot its end in its last round. The slots of drafted tokens, k a sequence, take no KV memory here.

A token of the draft is checked beside its predecessors, so attention reads the KV of a sequence once a round.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fineserve_sim.catalog import AttentionVariant, Deployment, GpuSpec, ModelSpec, PrecisionSpec, data_ranks, drafted
from fineserve_sim.catalog import precision as precision_named
from fineserve_sim.latency.ranks import RanksStepModel
from fineserve_sim.latency.rates import Provenance
from fineserve_sim.latency.sharing import Demand
from fineserve_sim.latency.step import StepModel
from fineserve_sim.latency.tables import TableSet

DRAFT_PRECISION = "W16A16"


Pass = tuple[float, float, float]
"""Device seconds of one pass of a model, and those in which compute units and bandwidth are busy."""

Prompt = tuple[int, float, int]
"""The prompt chunks of a batch: tokens, query-key pairs, tokens before them."""

NO_PROMPT: Final[Prompt] = (0, 0.0, 0)


def step_model_of(
    model: ModelSpec,
    precision: PrecisionSpec,
    tp: int,
    gpu: GpuSpec,
    deployment: Deployment,
    tables: TableSet | None = None,
    kernel: AttentionVariant | None = None,
) -> StepModel:
    """The step times of a model, behind a draft model or in data-parallel ranks where it has them. Raises ValueError for
    both."""
    kind: type[StepModel] = StepModel if model.speculation is None else SpeculativeStepModel
    if data_ranks(model) > 1:
        if model.speculation is not None:
            raise ValueError(f"model {model.name} has a draft model: data-parallel ranks (dp) have none yet")
        kind = RanksStepModel
    return kind(model, precision, tp, gpu, deployment, tables, kernel)


class SpeculativeStepModel(StepModel):
    """Step times of a model with ``speculation``; see above. Arguments and errors as for ``StepModel``."""

    def __init__(
        self,
        model: ModelSpec,
        precision: PrecisionSpec,
        tp: int,
        gpu: GpuSpec,
        deployment: Deployment,
        tables: TableSet | None = None,
        kernel: AttentionVariant | None = None,
    ) -> None:
        super().__init__(model, precision, tp, gpu, deployment, tables, kernel)
        found = drafted(model, tp)
        if model.speculation is None or found is None:
            raise ValueError(f"model {model.name} has no draft model")
        draft, degree = found
        self.width = model.speculation.tokens + 1
        self.round_tokens = model.speculation.round_tokens
        host = deployment.draft_pass_s, deployment.draft_sequence_s
        self.pass_s, self.draft_sequence_s = (quantity.value if quantity else 0.0 for quantity in host)
        self.draft = StepModel(draft, precision_named(DRAFT_PRECISION), degree, gpu, deployment, tables)

    def slow_down(self, factor: float) -> None:
        super().slow_down(factor)
        self.draft.slow_down(factor)
        self.pass_s, self.draft_sequence_s = factor * self.pass_s, factor * self.draft_sequence_s

    def step_s(
        self,
        decodes: int,
        decode_context: int,
        prefill_tokens: int,
        prefill_pairs: float,
        prefill_context: int,
        sampled: int,
    ) -> float:
        """Seconds of an iteration: a token of each decode, and the chunks."""
        alone_s = self.round_s(decodes, decode_context, NO_PROMPT, decodes) if decodes else 0.0
        if not prefill_tokens:
            return alone_s / self.round_tokens
        prompt = prefill_tokens, prefill_pairs, prefill_context
        return self.round_s(decodes, decode_context, prompt, sampled) - alone_s + alone_s / self.round_tokens

    def round_s(self, decodes: int, decode_context: int, prompt: Prompt, sampled: int) -> float:
        """Seconds of a round of ``decodes`` sequences with these chunks."""
        host_s = self.overhead_s + sampled * self.sequence_s + (self.prompt_s if prompt[0] else 0.0)
        check, *drafts = self._passes(decodes, decode_context, prompt, sampled)
        if decodes:
            host_s += (self.width - 1) * (self.pass_s + decodes * self.draft_sequence_s)
        return host_s + max(check[0], self.floor_s) + sum([draft[0] for draft in drafts])

    def _passes(self, decodes: int, decode_context: int, prompt: Prompt, sampled: int) -> list[Pass]:
        """The model's step that checks the drafted tokens; the draft's first pass, over all new tokens, and its later ones."""
        drafted_tokens = decodes * (self.width - 1)
        tokens = decodes + drafted_tokens + prompt[0]
        batch = decodes, decode_context, *prompt
        check = self.device(*batch, tokens, sampled + drafted_tokens)
        first = self.draft.device(*batch, tokens, sampled)
        later = self.draft.device(decodes, decode_context, *NO_PROMPT, decodes, decodes) if decodes else (0.0, 0.0, 0.0)
        return [check, first, *[later] * (self.width - 2)]

    def decode_steps_s(self, decodes: int, decode_context: int, steps: int) -> NDArray[np.float64]:
        each = [self.step_s(decodes, decode_context + i * decodes, 0, 0, 0, decodes) for i in range(steps)]
        return np.array(each, dtype=np.float64)

    def decode_span_s(
        self, start_s: float, decodes: int, decode_context: int, steps: int, slowdown: float
    ) -> tuple[list[float], list[float]]:
        alone_s: list[float] = self.decode_steps_s(decodes, decode_context, steps).tolist()
        ends = list(accumulate([each_s * slowdown for each_s in alone_s], initial=start_s))
        return ends[1:], alone_s

    def decode_ends_s(
        self,
        start_s: float,
        decodes: int,
        decode_context: int,
        steps: int,
        slowdown: float,
        until_s: float = math.inf,
    ) -> list[float]:
        now, ends = start_s, list[float]()
        for step in range(steps):
            now += self.step_s(decodes, decode_context + step * decodes, 0, 0, 0, decodes) * slowdown
            ends.append(now)
            if now > until_s:
                break
        return ends

    def demand(
        self,
        decodes: int,
        decode_context: int,
        prefill_tokens: int,
        prefill_pairs: float,
        prefill_context: int,
        sampled: int,
        step_s: float | None = None,
    ) -> Demand:
        """Needs of a round as fractions of its time; the iteration lasts ``step_s``."""
        prompt = prefill_tokens, prefill_pairs, prefill_context
        whole_s = self.round_s(decodes, decode_context, prompt, sampled)
        passes = self._passes(decodes, decode_context, prompt, sampled)
        device_s, compute_s, memory_s = (sum(column) for column in zip(*passes, strict=True))
        if step_s is None:
            step_s = self.step_s(decodes, decode_context, *prompt, sampled)
        return Demand(compute_s / whole_s, memory_s / whole_s, min(1.0, device_s / whole_s), 1.0, step_s)

    def provenance(self) -> list[Provenance]:
        drafts = [one._replace(quantity=f"draft.{one.quantity}") for one in self.draft.operators.provenance()]
        return [*super().provenance(), *drafts]
