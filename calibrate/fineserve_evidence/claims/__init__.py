"""The papers' claims that need a GPU.

Each claim is decided from the imported tables or from probe tables. An open claim says what would decide it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from fineserve_evidence.claims import kernels, probed
from fineserve_evidence.claims.evidence import Evidence, Missing, Verdict, read_probes, undecided

__all__ = ["EVALUATORS", "ClaimError", "Evidence", "Verdict", "ids_of", "read_probes", "verdict_of"]

BACKEND = "calibrator-gpu"
EVALUATORS: Mapping[str, Callable[[Evidence], Verdict] | Verdict] = MappingProxyType(
    {
        "FS-C3-percall": probed.call_takes_tens_of_us,
        "FS-C3-growth": probed.growth_takes_ms,
        "FS-6-all-gain": probed.every_pair_gains,
        "FS-6-fp8fp8": probed.fp8_pair,
        "PR-4-kv-throughput": undecided(
            "an engine, saturated, on 5 and on 15 GB of KV memory; no probe runs it, a simulation does"  # prism_fig04.yaml
        ),
        "PR-9-naive": probed.cold_start_takes_tens_of_s,
        "PR-9-small": probed.small_models_activate_in_time,
        "PR-9-14b": probed.activation_14b,
        "KS-4.1-api": probed.remap_takes_5_ms,
        "KS-eq1": probed.chunk_cost_beats_token_count,
        "KS-eq1-err": probed.chunk_cost_error,
        "KS-4.3-second-chunk": kernels.second_chunk_is_slower,
        "VT-3-mha": undecided(kernels.LEGACY),
        "VT-3-cap": undecided(kernels.LEGACY),
        "VT-3-mqa": kernels.mqa_throughput,
        "VT-3-trend": kernels.throughput_rises_with_intensity,
        "VT-7-batch": undecided(kernels.LEGACY),
        "VT-7-fapaged": undecided(kernels.CONTIGUOUS),
        "VT-7-seq": undecided(kernels.LEGACY),
        "VT-7-heads": undecided(kernels.LEGACY),
        "VT-8-batch": undecided(kernels.TRITON),
        "VT-8-ratio": undecided(kernels.TRITON),
        "VT-7.2.3-table": undecided(kernels.CONTIGUOUS),
        "VT-7-native": undecided(kernels.LEGACY),
        "VT-kernel-avg": undecided(f"{kernels.LEGACY}; and {kernels.TRITON}"),
        "VT-5-overlap": probed.extension_is_hidden,
    }
)
"""The function that decides a claim, or a verdict where no probe can decide it."""


class ClaimError(ValueError):
    """A claim is unknown, or a ledger cannot be read. The text is one line."""


def verdict_of(name: str, evidence: Evidence) -> Verdict:
    """Decide the claim of this id. It stays open where no evaluator knows it, or tables are missing."""
    found = EVALUATORS.get(name, undecided("no evaluator knows this claim"))
    try:
        return found if isinstance(found, Verdict) else found(evidence)
    except Missing as missing:
        return undecided(str(missing))


def ids_of(ledger: Path) -> list[str]:
    """List the ids of the claims that name this backend, in the ledger's order. Raises ClaimError for another file."""
    try:
        document: Any = yaml.safe_load(ledger.read_text(encoding="utf-8"))
        return [str(claim["id"]) for claim in document["claims"] if claim["backend"] == BACKEND]
    except OSError as error:
        raise ClaimError(f"{ledger}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise ClaimError(
            f"{ledger}: not a ledger of claims with id and backend ({' '.join(str(error).split())})"
        ) from error
