"""Build the sketch of the public Arena trace: requests per model and minute, and the joint quantiles of lengths.

    python traces/build_arena_sketch.py DATA_DIR [--out FOLDER]

DATA_DIR holds arena_27models.csv.gz (or traces/arena_27models.csv.gz). The result depends on the file alone: no random number
is drawn. Errors of the lengths compare the real pairs with the sketch on a regular grid, as in build_sharegpt_sketch.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from build_sharegpt_sketch import OUTPUT_LEVELS, PROMPT_LEVELS, _grid, _plain, _quantiles, errors, figures, to_json
from fineserve_traces import LengthPairs, LengthSketch, Trace, read_trace

NAME = "arena_27models"
UPSTREAM = "github.com/Multi-LLM/prism-research benchmark/multi-model/real_trace.pkl @ 595ec1f170e7"
"""The same file as fair_bench/real_trace.pkl of Ying1123/VTC-artifact, where it comes from."""

PAIRS_PER_BIN = 100  # the set is small: fewer bins than for the others would lose the dependence of output on prompt
MINUTES = 10


def build(trace: Trace) -> dict[str, Any]:
    """The sketch as a JSON document, errors included."""
    pairs = LengthPairs(trace.prompt_tokens, trace.output_tokens, NAME)
    order = np.argsort(pairs.prompt_tokens, kind="stable")
    bins = max(1, len(pairs) // PAIRS_PER_BIN)
    output_quantiles = [_quantiles(part, OUTPUT_LEVELS) for part in np.array_split(pairs.output_tokens[order], bins)]
    prompt_quantiles = _quantiles(pairs.prompt_tokens, PROMPT_LEVELS)
    sketch = LengthSketch(PROMPT_LEVELS, prompt_quantiles, OUTPUT_LEVELS, np.array(output_quantiles), NAME)
    original = figures(pairs.prompt_tokens, pairs.output_tokens)
    return {
        "name": NAME,
        "file": f"{NAME}.csv.gz",
        "upstream": UPSTREAM,
        "licence": "Apache-2.0",
        "rows": len(pairs),
        "models": list(trace.models),
        "requests_per_minute": _requests_per_minute(trace),
        "original": original,
        "errors": errors(original, pairs, *sketch.at(*_grid())),
        "prompt_levels": _plain(PROMPT_LEVELS),
        "prompt_quantiles": _plain(prompt_quantiles),
        "output_levels": _plain(OUTPUT_LEVELS),
        "output_quantiles": [_plain(quantiles) for quantiles in output_quantiles],
    }


def _requests_per_minute(trace: Trace) -> list[list[int]]:
    """For each model, its requests in each of the ten minutes. The very last one arrives at the end of the tenth."""
    minute = np.minimum(trace.arrival_s // 60, MINUTES - 1).astype(np.int64)
    return [np.bincount(minute[trace.model == index], minlength=MINUTES).tolist() for index in range(len(trace.models))]


def main(arguments: list[str] | None = None) -> None:
    """Write the sketch and print its errors."""
    parser = argparse.ArgumentParser(description="Build the sketch of the public Arena trace.")
    parser.add_argument("data_dir", type=Path, help="folder of the trace, or its parent")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "fineserve_traces" / "data")
    options = parser.parse_args(arguments)
    places = [options.data_dir / "traces" / f"{NAME}.csv.gz", options.data_dir / f"{NAME}.csv.gz"]
    document = build(read_trace(next((place for place in places if place.is_file()), places[0])))
    text = to_json(document)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{NAME}.json").write_text(text, encoding="utf-8")
    print(f"{NAME}: {document['rows']:,} requests in {len(text):,} bytes")
    for figure, error in document["errors"].items():
        print(f"  {figure:12} error {error:+.4f}")


if __name__ == "__main__":
    main()
