"""Seconds of a step of data-parallel ranks: attention in data parallel, as vLLM's ``--data-parallel-size`` of a mixture of
experts (with ``--enable-expert-parallel`` where experts are whole).

Each rank is a TP group with requests, KV and weights of attention of its own. The experts are over the GPUs of all ranks. In
each layer of experts the hidden states of all ranks are gathered, and outputs are summed and scattered back. So ranks wait for
each other in every layer, and all have the time of the slowest:

    step   = max over ranks of: host + max(device, host floor)
    device = tokens[own] + experts[tokens of all ranks] + exchange[tokens of all ranks] + lm_head[sampled] + attention

A rank without requests computes one dummy token meanwhile. Two things are left out. vLLM pads batches to the size of the
largest: here experts do not compute padding. Experts get equal shares of the tokens on every rank.

``step_s`` and all that the base class has are of one rank while the others have equal batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fineserve_sim.catalog import data_ranks
from fineserve_sim.latency.attention import Attention
from fineserve_sim.latency.cost import Cost, Floats
from fineserve_sim.latency.operators import GROUP_COSTS, OperatorCosts
from fineserve_sim.latency.step import Counts, StepModel

Sums = tuple[int, int, int, int, int, int]
"""The running sums of a rank's batch, as ``StepModel.step_s`` takes them."""

DUMMY: Final[Sums] = (1, 0, 0, 0, 0, 0)
"""What a rank without requests computes: a token, of which nothing is sampled."""


class RanksStepModel(StepModel):
    """Step times of a model in data-parallel ranks (``Experts.ranks``); see above. Arguments and errors as ``StepModel``."""

    def _price_by(self, operators: OperatorCosts, attention: Attention) -> None:
        super()._price_by(operators, attention)
        ranks = data_ranks(self.model)

        def own(tokens: Floats) -> dict[str, Cost]:
            return {name: cost for name, cost in operators.by_tokens(tokens).items() if name not in GROUP_COSTS}

        def shared(tokens: Floats) -> dict[str, Cost]:
            found = operators.by_tokens(tokens / ranks)
            return {name: found[name] for name in GROUP_COSTS}

        self._own, self._shared = Counts(own), Counts(shared)

    def group_s(self, batches: Sequence[Sums]) -> float:
        """Seconds of one step of all ranks, one batch each; ``DUMMY`` for a rank without requests."""
        total = sum([decodes + prefill for decodes, _, prefill, _, _, _ in batches])
        shared_s = self._shared.at(total)
        return max([self._rank_s(shared_s, batch) for batch in batches])

    def _rank_s(self, shared_s: float, batch: Sums) -> float:
        """Seconds of one rank that waits for no other, with ``shared_s`` in the layers' experts."""
        decodes, decode_context, prefill_tokens, prefill_pairs, prefill_context, sampled = batch
        host_s = self.overhead_s + sampled * self.sequence_s
        attention_s, prefill_s = self.attention_s(
            decodes, decode_context, prefill_tokens, prefill_pairs, prefill_context
        )
        if prefill_tokens:
            attention_s = max(attention_s, self._attention_floor_s) + prefill_s
            host_s += self.prompt_s
        device_s = self._own.at(decodes + prefill_tokens) + shared_s + self._sampled.at(sampled) + attention_s
        return host_s + max(device_s, self.floor_s)
