"""How much longer does a step take when another engine of the process had one in between?

    python benchmarks/runtime_turns.py MODEL_FOLDER [--blocks N] [--steps N] [--decodes N ...]

Two stock engines of one model, in one process, decode. Blocks in which the first steps alone alternate with blocks in which the
other one has a step between any two of its own; only the first's steps are timed, in processor seconds of its thread, so that
other work on the machine counts as little as can be. Prints JSON: for each number of decodes the median step alone, the
share that a turn of another adds (median over pairs of blocks) and the middle half of the pairs. The share over all is
what a file says as ``sharing: {in_turn: SHARE}``. Needs vLLM on the CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from fineserve_runtime.engines.api import EngineConfig
from fineserve_runtime.engines.vllm_engine import build_core, engine_arguments, prepare_environment

PROMPT_TOKENS = 64
LONGEST = 1024


class Decoder:
    """An engine that decodes. No block is as long as its sequences."""

    def __init__(self, model: Path, decodes: int) -> None:
        config = EngineConfig("probe", model, max_model_len=LONGEST, max_sequences=16, max_batched_tokens=256)
        self._core = build_core(engine_arguments(config, model, "cpu", 64 * 2**20))
        self._ids = count()
        self.set_decodes(decodes)

    def set_decodes(self, decodes: int) -> None:
        """Fresh sequences, their prompts computed."""
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        self._core.abort_requests(list(self._core.scheduler.requests))
        for _ in range(decodes):
            number = next(self._ids)
            request = EngineCoreRequest(
                request_id=str(number),
                prompt_token_ids=[2 + (number + place) % 500 for place in range(PROMPT_TOKENS)],
                mm_features=None,
                sampling_params=SamplingParams(max_tokens=LONGEST - PROMPT_TOKENS, temperature=0, ignore_eos=True),
                pooling_params=None,
                arrival_time=float(number),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
            self._core.add_request(*self._core.preprocess_add_request(request))
        for _ in range(2 + decodes * PROMPT_TOKENS // 256):
            self._core.step_fn()

    def step_s(self) -> float:
        """Processor seconds of one step."""
        begun_s = time.thread_time()
        self._core.step_fn()
        return time.thread_time() - begun_s


def probe(model: Path, decodes: list[int], blocks: int, steps: int) -> list[dict[str, Any]]:
    first, other = Decoder(model, 1), Decoder(model, 1)
    found = []
    for number in decodes:
        pairs = []
        for _ in range(blocks):
            first.set_decodes(number)
            other.set_decodes(number)
            pairs.append((_block(first, None, steps), _block(first, other, steps)))
        added = [turns / alone - 1 for alone, turns in pairs]
        low, median, high = np.quantile(added, [0.25, 0.5, 0.75]).tolist()
        alone_ms = 1e3 * float(np.median([alone for alone, _ in pairs]))
        found.append({"decodes": number, "alone_ms": alone_ms, "share": median, "middle_half": [low, high]})
    return found


def _block(first: Decoder, other: Decoder | None, steps: int) -> float:
    """The median step of the first."""
    took_s = []
    for _ in range(steps):
        took_s.append(first.step_s())
        if other is not None:
            other.step_s()
    return float(np.median(took_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--decodes", type=int, nargs="+", default=[1, 4, 12])
    options = parser.parse_args()
    prepare_environment()
    rows = probe(options.model, options.decodes, options.blocks, options.steps)
    print(json.dumps({"rows": rows, "share": float(np.median([row["share"] for row in rows]))}, indent=1))


if __name__ == "__main__":
    main()
