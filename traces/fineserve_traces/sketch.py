"""A compact statistical sketch of (prompt, output) length pairs: a joint distribution of quantiles.

Pairs sorted by prompt length are cut into B bins of equal probability. Stored are the quantiles of the prompt length,
over all pairs, and within each bin the quantiles of the output length. A draw takes two independent uniforms (u, v). u
goes through the inverse CDF of the prompt, and picks bin floor(u * B). v goes through the inverse CDF of the output in
that bin. Between levels the inverse CDF is linear; lengths are rounded and at least 1. So marginals and the dependence
of output on prompt (down to 1/B of the pairs) survive, the pairs themselves do not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from numpy.random import Generator

from fineserve_traces.drawn import NextLengths, after
from fineserve_traces.schema import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class LengthSketch:
    """prompt_levels (P,) and prompt_quantiles (P,); output_levels (Q,) and output_quantiles (B, Q), tokens; levels rise
    from 0 to 1. ``source`` says what was sketched and how well."""

    prompt_levels: FloatArray
    prompt_quantiles: FloatArray
    output_levels: FloatArray
    output_quantiles: FloatArray
    source: str

    def at(self, u: FloatArray, v: FloatArray) -> tuple[IntArray, IntArray]:
        """The pairs at probabilities ``u`` (prompt) and ``v`` (output given the prompt), each (n,) in [0, 1)."""
        prompt = np.interp(u, self.prompt_levels, self.prompt_quantiles)
        bins = np.minimum((u * len(self.output_quantiles)).astype(np.int64), len(self.output_quantiles) - 1)
        right = np.clip(np.searchsorted(self.output_levels, v, side="right"), 1, len(self.output_levels) - 1)
        low, high = self.output_levels[right - 1], self.output_levels[right]
        floor, ceiling = self.output_quantiles[bins, right - 1], self.output_quantiles[bins, right]
        output = floor + (ceiling - floor) * (v - low) / (high - low)
        return _tokens(prompt), _tokens(output)

    def sample(self, rng: Generator, n: int) -> tuple[IntArray, IntArray]:
        """``n`` independent (prompt_tokens, output_tokens), each int64 (n,)."""
        return self.at(rng.random(n), rng.random(n))

    def in_turn(self, rng: Generator, n: int) -> NextLengths:
        """As ``LengthSource.in_turn``."""
        given = after(rng, n, Generator.random)
        return lambda some: self.at(rng.random(some), given.random(some))


def _tokens(lengths: FloatArray) -> IntArray:
    return np.maximum(np.rint(lengths), 1).astype(np.int64)


def sketch_document(name: str) -> dict[str, Any]:
    """The embedded file of sketch ``name``: its quantiles, where the pairs come from, and the measured errors."""
    text = resources.files("fineserve_traces").joinpath(f"data/{name}.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def load_sketch(name: str) -> LengthSketch:
    """The embedded sketch ``name``; `fineserve_traces.lengths.DATASETS` lists the names."""
    return sketch_from_document(sketch_document(name))


def sketch_from_document(document: dict[str, Any]) -> LengthSketch:
    """The sketch in a document as `sketch_document` gives it."""
    errors = document["errors"]
    quality = f"KS distance {errors['prompt_ks']:.3f} (prompt), {errors['output_ks']:.3f} (output)"
    return LengthSketch(
        prompt_levels=np.array(document["prompt_levels"], dtype=np.float64),
        prompt_quantiles=np.array(document["prompt_quantiles"], dtype=np.float64),
        output_levels=np.array(document["output_levels"], dtype=np.float64),
        output_quantiles=np.array(document["output_quantiles"], dtype=np.float64),
        source=f"{document['name']}: embedded sketch of {document['rows']:,} real pairs, {quality}",
    )


def sharegpt_sketch() -> LengthSketch:
    """The sketch of ShareGPT's first turns, the default lengths."""
    return load_sketch("sharegpt_v3_first_turn")
