"""What three steps of an 8B model on an H100 are made of, by where their seconds come from."""

from __future__ import annotations

from collections import defaultdict

from docs.generate.markdown import table
from fineserve_sim.catalog import deployment, gpu, model, precision
from fineserve_sim.latency import StepModel
from fineserve_sim.latency.accounting import Batch, time_shares
from fineserve_sim.latency.tables import shipped

DEPLOYMENT = "vllm-v1-eager"
PRECISIONS = ("W16A16", "W8A8KV8", "W4A16", "W4A8KV4")
STEPS = {
    "32 decodes at 1,000 tokens": Batch(32, 32_000, 0, 0.0, 0, 32),
    "prompt of 2,048": Batch(0, 0, 2_048, 2_048 * 2_049 / 2, 0, 1),
    "1,024 tokens after 1,024 cached": Batch(0, 0, 1_024, 1_024 * 1_024 + 1_024 * 1_025 / 2, 1_024, 1),
}
KINDS = ("measured", "fitted", "roofline", "assumed")


def parts_table() -> str:
    """Percent of a step's seconds; the roofline beyond a table counts as roofline and stands beside it."""
    rows = []
    for name in PRECISIONS:
        step = StepModel(
            model("llama-3.1-8b"), precision(name), 1, gpu("h100-sxm"), deployment(DEPLOYMENT), tables=shipped()
        )
        for what, batch in STEPS.items():
            shares: dict[str, float] = defaultdict(float)
            for sources in time_shares(step, [batch]).values():
                for source, share in sources.items():
                    shares[source] += share
            beyond = shares["extrapolated"]
            shares["roofline"] += beyond
            rows.append((name, what, *(f"{shares[kind]:.0%}"[:-1] for kind in KINDS), f"{beyond:.0%}"[:-1]))
    headers = ("precision", "step", *KINDS, "of the roofline, beyond a table")
    return table(headers, rows, right=headers[2:])
