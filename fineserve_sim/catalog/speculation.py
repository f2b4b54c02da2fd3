"""Speculative decoding as a property of a model: what drafts for it, and how much of that is accepted.

The draft is another model, or a head as EAGLE trains it (Li et al. 2024): one layer behind the model's last hidden state.
Its weights and KV count on the GPUs of the model (``geometry``), its passes in each step (``latency.speculative``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from fineserve_sim.catalog.architecture import ModelSpec, Speculation
from fineserve_sim.catalog.load import CatalogError


def head_of(model: ModelSpec) -> ModelSpec:
    """A draft head as EAGLE trains it: one layer of the model, with full attention. Its dense MLP is as wide as what a token
    passes of the model's."""
    experts = model.experts
    width = model.intermediate_size
    if experts is not None:
        width = max(width, experts.active * experts.width + experts.shared_width)
    plain = {"experts": None, "window": None, "linear": None, "latent": None, "sinks": False, "speculation": None}
    own = {"name": f"{model.name} head", "layers": 1, "intermediate_size": width, "other_parameters": 0}
    return model.model_copy(update={**plain, **own})


def with_speculation(
    model: ModelSpec, tokens: int, acceptance: float | Sequence[float], draft: ModelSpec | None = None
) -> ModelSpec:
    """The model behind a draft model, by default a head of one layer (``head_of``).

    ``acceptance`` is what vLLM counts: the accepted share of all drafted tokens, or the share of rounds in which the first,
    second, ... drafted token was accepted. Raises CatalogError for shares that cannot be.
    """
    shares = [acceptance] * tokens if isinstance(acceptance, int | float) else list(acceptance)
    if len(shares) != tokens:
        raise CatalogError(
            f"{len(shares)} shares of acceptance for {tokens} drafted tokens: one a token, or one for all"
        )
    if not all(0 <= share <= 1 for share in shares):
        raise CatalogError(f"acceptance {', '.join(f'{share:g}' for share in shares)}: shares are between 0 and 1")
    if any(later > share for share, later in pairwise(shares)):
        raise CatalogError("acceptance must not rise: a drafted token is accepted behind accepted ones alone")
    speculation = Speculation(draft=draft or head_of(model), tokens=tokens, accepted=sum(shares))
    return model.model_copy(update={"speculation": speculation})
