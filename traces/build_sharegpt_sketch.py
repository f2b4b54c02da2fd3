"""Build the embedded length sketches from the real pairs, and measure how far they are off.

    python traces/build_sharegpt_sketch.py DATA_DIR [--name sharegpt_v3_first_turn] [--out FOLDER]

DATA_DIR holds the public length files under the names in `fineserve_traces.lengths.DATASETS`, whose upstream and
licence go into each sketch. The result depends on the pairs alone: no random number is drawn. Errors compare the real
pairs with the sketch evaluated on a regular grid of about a million probabilities (u, v), and are printed and stored.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from fineserve_traces.lengths import DATASETS, LengthPairs, read_dataset
from fineserve_traces.schema import FloatArray, IntArray
from fineserve_traces.sketch import LengthSketch

MAX_BINS = 64
PAIRS_PER_BIN = 200  # fewer pairs give no stable quantiles, and come near to publishing the pairs themselves
GRID = (4096, 256)

# Denser towards the ends, where lengths spread most.
PROMPT_LEVELS = np.unique(np.concatenate([np.arange(257) / 256, [0.001, 0.999, 0.9995]]))
OUTPUT_TAIL = [0.95, 0.96, 0.975, 0.98, 0.985, 0.99, 0.995]
OUTPUT_LEVELS = np.unique(np.concatenate([np.arange(33) / 32, [0.01, 0.02], OUTPUT_TAIL]))


def build(name: str, pairs: LengthPairs) -> dict[str, Any]:
    """The sketch of ``pairs`` as a JSON document, errors included."""
    order = np.argsort(pairs.prompt_tokens, kind="stable")
    bins = max(1, min(MAX_BINS, len(pairs) // PAIRS_PER_BIN))
    output_quantiles = [_quantiles(part, OUTPUT_LEVELS) for part in np.array_split(pairs.output_tokens[order], bins)]
    prompt_quantiles = _quantiles(pairs.prompt_tokens, PROMPT_LEVELS)
    sketch = LengthSketch(PROMPT_LEVELS, prompt_quantiles, OUTPUT_LEVELS, np.array(output_quantiles), name)
    dataset = DATASETS[name]
    original = figures(pairs.prompt_tokens, pairs.output_tokens)
    return {
        "name": name,
        "upstream": dataset.upstream,
        "licence": dataset.licence,
        "max_prompt_tokens": dataset.max_prompt_tokens,
        "rows": len(pairs),
        "original": original,
        "errors": errors(original, pairs, *sketch.at(*_grid())),
        "prompt_levels": _plain(PROMPT_LEVELS),
        "prompt_quantiles": _plain(prompt_quantiles),
        "output_levels": _plain(OUTPUT_LEVELS),
        "output_quantiles": [_plain(quantiles) for quantiles in output_quantiles],
    }


def _quantiles(tokens: IntArray, levels: FloatArray) -> FloatArray:
    """Hazen's plotting positions give every pair, the longest too, the same weight: the mean survives long tails."""
    return np.round(np.quantile(tokens, levels, method="hazen"), 1)


def _plain(values: FloatArray) -> list[float]:
    """For JSON, whole numbers without their ``.0``."""
    return [int(value) if value.is_integer() else value for value in values.tolist()]


def _grid() -> tuple[FloatArray, FloatArray]:
    """Midpoints of a regular grid over the unit square, flattened."""
    u, v = ((np.arange(size) + 0.5) / size for size in GRID)
    return np.repeat(u, v.size), np.tile(v, u.size)


def figures(prompt_tokens: IntArray, output_tokens: IntArray) -> dict[str, float]:
    """Mean, p50, p95 and p99 of both lengths, and Spearman's rank correlation between them."""
    from scipy.stats import spearmanr

    result = {"spearman": round(float(spearmanr(prompt_tokens, output_tokens).statistic), 4)}
    for side, tokens in (("prompt", prompt_tokens), ("output", output_tokens)):
        p50, p95, p99 = np.quantile(tokens, [0.5, 0.95, 0.99])
        values = {"mean": tokens.mean(), "p50": p50, "p95": p95, "p99": p99}
        result |= {f"{side}_{name}": round(float(value), 2) for name, value in values.items()}
    return result


def errors(original: dict[str, float], pairs: LengthPairs, prompt: IntArray, output: IntArray) -> dict[str, float]:
    """Sketch against pairs: relative error of each figure, absolute error of Spearman's rho, KS distance of both
    lengths."""
    sketched = figures(prompt, output)
    result = {name: round(sketched[name] / original[name] - 1, 5) for name in original if name != "spearman"}
    result["spearman"] = round(sketched["spearman"] - original["spearman"], 4)
    result["prompt_ks"] = round(ks_distance(pairs.prompt_tokens, prompt), 5)
    result["output_ks"] = round(ks_distance(pairs.output_tokens, output), 5)
    return result


def ks_distance(left: IntArray, right: IntArray) -> float:
    """The largest distance between the two empirical distribution functions (Kolmogorov-Smirnov)."""
    top = int(max(left.max(), right.max())) + 1
    left_cdf, right_cdf = (np.cumsum(np.bincount(tokens, minlength=top)) / tokens.size for tokens in (left, right))
    return float(np.abs(left_cdf - right_cdf).max())


def to_json(document: dict[str, Any]) -> str:
    """One key a line, one bin a line: compact, and changes stay readable in a diff."""
    lines = []
    for key, value in document.items():
        text = json.dumps(value)
        if key == "output_quantiles":
            text = "[\n  " + ",\n  ".join(json.dumps(row) for row in value) + "\n ]"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(arguments: list[str] | None = None) -> None:
    """Write a sketch of each data set (or of --name) and print its errors."""
    parser = argparse.ArgumentParser(description="Build the embedded length sketches from the real pairs.")
    parser.add_argument("data_dir", type=Path, help="folder of the length files, or its parent")
    parser.add_argument("--name", choices=DATASETS, help="this sketch only")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "fineserve_traces" / "data")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in [options.name] if options.name else DATASETS:
        document = build(name, read_dataset(name, options.data_dir))
        text = to_json(document)
        (options.out / f"{name}.json").write_text(text, encoding="utf-8")
        print(f"{name}: {document['rows']:,} pairs in {len(text):,} bytes")
        for figure, error in document["errors"].items():
            real = f"{document['original'][figure]:g}" if figure in document["original"] else ""
            print(f"  {figure:12} {real:>9}  error {error:+.4f}")


if __name__ == "__main__":
    main()
