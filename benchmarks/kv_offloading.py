"""From which hit on is copying KV back from host memory faster than computing it again?

    python -m benchmarks.kv_offloading [--figure docs/figures/kv_offloading.svg]

A prompt begins with a prefix of which host memory has the KV, and ends with 128 new tokens; its engine does nothing else. To
copy takes the prefix's bytes over the host links of the engine's GPUs, then a step with the new tokens. To compute takes the
steps of the whole prompt, 2,048 tokens each. The break-even is the shortest prefix from which on copying never takes longer, up
to 32,768 tokens. The table also says how much sooner a hit of 8,192 tokens is there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fineserve_sim.catalog import gpu, kv_token_bytes, model, precision
from fineserve_sim.cluster import EngineSettings, ServedModel
from fineserve_sim.cluster.compose.profiling import step_model
from fineserve_sim.latency import StepModel

NEW_TOKENS, BUDGET_TOKENS, BLOCK_TOKENS, LONGEST_TOKENS = 128, 2048, 16, 32_768
LINKS_GB_PER_S = (3.0, 6.0, 12.0, 25.0, 50.0, 100.0, 450.0)
"""One way, for one GPU: parts of PCIe 3 and all of it, PCIe 4 and 5 as measured, two of these, NVLink-C2C."""


class Engine(NamedTuple):
    """A model on its GPUs: bytes of a token's KV on each of them, and step times."""

    name: str
    token_bytes: float
    step: StepModel

    def copied_s(self, hit_tokens: int, bytes_per_s: float) -> float:
        """Seconds of a prompt with this hit, if the hit is copied."""
        pairs = NEW_TOKENS * hit_tokens + NEW_TOKENS * (NEW_TOKENS + 1) // 2
        return hit_tokens * self.token_bytes / bytes_per_s + self.step.step_s(0, 0, NEW_TOKENS, pairs, hit_tokens, 1)

    def computed_s(self, hit_tokens: int) -> float:
        """Seconds of the same prompt, if all of it is computed."""
        total_s, end = 0.0, hit_tokens + NEW_TOKENS
        for done in range(0, end, BUDGET_TOKENS):
            size = min(BUDGET_TOKENS, end - done)
            pairs = size * done + size * (size + 1) // 2
            total_s += self.step.step_s(0, 0, size, pairs, done, int(done + size == end))
        return total_s

    def break_even_tokens(self, bytes_per_s: float) -> int | None:
        """None where copying is slower at the longest hit."""
        found = None
        for hit_tokens in reversed(lengths()):
            if self.copied_s(hit_tokens, bytes_per_s) > self.computed_s(hit_tokens):
                break
            found = hit_tokens
        return found


def lengths() -> list[int]:
    """Hits in whole blocks: each of the first 64, then an eighth longer each."""
    blocks = [*range(1, 65)]
    while (more := blocks[-1] * 9 // 8) * BLOCK_TOKENS <= LONGEST_TOKENS:
        blocks.append(more)
    return [block * BLOCK_TOKENS for block in blocks]


def engine(name: str, fmt: str, tp: int, on: str = "h100-sxm") -> Engine:
    """An engine of the catalog."""
    served = ServedModel("m", model(name), precision(fmt), tp, 1.0, 1.0, 1024, 128)
    label = f"{name} {fmt}{f', TP {tp}' if tp > 1 else ''} on {on}"
    step = step_model(served, gpu(on), EngineSettings(deployment="vllm-v1"))
    return Engine(label, kv_token_bytes(served.model, served.precision, tp), step)


def engines() -> list[Engine]:
    """Small and large, with few and many KV heads, on a fast and a slow GPU."""
    return [
        engine("llama-3.2-1b", "fp16", 1),
        engine("llama-3.1-8b", "fp16", 1),
        engine("llama-3.1-8b", "fp16", 1, "l40s"),
        engine("llama-2-7b", "fp16", 1),
        engine("llama-3.1-70b", "fp8", 4),
        engine("qwen3-30b-a3b", "fp16", 1),
    ]


def table(found: Sequence[Engine]) -> str:
    """A row an engine: the break-even at each link, and how much faster a hit of 8,192 tokens is at 50 GB/s."""
    head = " | ".join(f"{link:g} GB/s" for link in LINKS_GB_PER_S)
    lines = [f"| engine | {head} | 8,192 tokens at 50 GB/s |", f"|---|{'---|' * (len(LINKS_GB_PER_S) + 1)}"]
    for one in found:
        at = [one.break_even_tokens(link * 1e9) for link in LINKS_GB_PER_S]
        ratio = one.computed_s(8192) / one.copied_s(8192, 50e9)
        cells = [*("never" if tokens is None else f"{tokens:,}" for tokens in at), f"{ratio:.1f} times as fast"]
        lines.append(f"| {one.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: Sequence[Engine], path: Path) -> None:
    """Break-even against the rate of the link. The same figures give the same bytes."""
    from matplotlib.figure import Figure

    from fineserve_sim.experiment.show.plot_style import house_style, look_at

    with house_style():
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        axes = figure.subplots()
        for place, one in enumerate(found):
            at = [(link, one.break_even_tokens(link * 1e9)) for link in LINKS_GB_PER_S]
            links, tokens = zip(*[(link, tokens) for link, tokens in at if tokens is not None], strict=True)
            axes.loglog(links, tokens, **look_at(place), markersize=4, label=one.name)
        axes.set(xlabel="host link of one GPU (GB/s)", ylabel="shortest hit worth its copy (tokens)")
        axes.set_xticks(LINKS_GB_PER_S, [f"{link:g}" for link in LINKS_GB_PER_S])
        axes.minorticks_off()
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7)
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, help="also draw this SVG")
    args = parser.parse_args()
    found = engines()
    print(table(found))
    if args.figure:
        draw(found, args.figure)


if __name__ == "__main__":
    main()
