"""Two tiny models in two precisions, the file that serves them, and a client that tries them."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

from fineserve_runtime.config import load_file
from fineserve_runtime.engines.api import TinyModel
from fineserve_runtime.serve import run_server

MODELS = {"tiny-bf16": TinyModel(seed=1), "tiny-fp8": TinyModel(seed=2)}
"""The first keeps its KV cache in BF16, the second in FP8 where the CPU can, else in BF16 with half as many heads."""

FILE = """\
# What fineserve-run demo serves. The GPU stands for a CPU of a few GB/s: placement wants to know one.
fineserve: 1
title: Two tiny models in two precisions on one device

cluster:
  count: 1
  gpu: {{name: laptop-cpu, memory_gib: 4, memory_bytes_per_s: 1.0e+10, bf16_flops_per_s: 1.0e+11, fp8_flops_per_s: 1.0e+11,
         pcie_bytes_per_s: 1.0e+9, efficiency: roofline-scaled, source: assumed}}
engine: {{block_tokens: 32, max_sequences: 16, token_budget: 256, context_bytes: 0}}

models:
  - {{id: tiny-bf16, model: {{config: {bf16}/config.json}}, precision: W16A16, rate_per_s: 4, ttft_slo_s: 5.0}}
  - {{id: tiny-fp8, model: {{config: {fp8}/config.json}}, precision: W16A16, rate_per_s: 4, ttft_slo_s: 5.0}}

workload: {{lengths: {{prompt_tokens: 96, output_tokens: 48}}, requests: 100}}
slo: {{ttft_s: 5.0}}
systems: [fineserve, "static*"]
seeds: 1

runtime:
  backend: cpu
  port: {port}
  region_bytes: 16777216
  decisions: decisions.jsonl
  models:
    tiny-bf16: {{path: {bf16}, max_model_len: 1024}}
    tiny-fp8: {{path: {fp8}, kv_cache_dtype: {kv_dtype}, max_model_len: 1024}}
"""

ON_OFF = """\
# FineServe's Fig. 4 in small, for fineserve-run replay: both models are active, then one alone. A static split of the KV memory
# against the slab.
fineserve: 1
title: Two tiny models on and off, static and dynamic KV memory

cluster:
  count: 1
  gpu: {{name: laptop-cpu, memory_gib: 4, memory_bytes_per_s: 1.0e+10, bf16_flops_per_s: 1.0e+11, fp8_flops_per_s: 1.0e+11,
         pcie_bytes_per_s: 1.0e+9, efficiency: roofline-scaled, source: assumed}}
engine: {{block_tokens: 32, max_sequences: 32, token_budget: 256, context_bytes: 0}}

models:
  - id: A
    model: {{config: {bf16}/config.json}}
    precision: W16A16
    phases: [{{duration_s: 5, rate_per_s: 4}}, {{duration_s: 10, rate_per_s: 0}}]
  - id: B
    model: {{config: {fp8}/config.json}}
    precision: W16A16
    phases: [{{duration_s: 5, rate_per_s: 4}}, {{duration_s: 10, rate_per_s: 24}}]

workload: {{lengths: {{prompt_tokens: 160, output_tokens: 190}}}}
slo: {{ttft_s: 0.4}}
systems:
  - base: fineserve
    name: static
    placement: {{policy: pinned, groups: {{A: [[0]], B: [[0]]}}}}
    memory: {{policy: private, split: equal}}
  - base: fineserve
    name: dynamic
    placement: {{policy: pinned, groups: {{A: [[0]], B: [[0]]}}}}
seeds: 5

runtime:
  region_bytes: 4194304
  models:
    A: {{path: {bf16}, max_model_len: 512}}
    B: {{path: {fp8}, max_model_len: 512}}
"""


def make_demo(folder: Path, port: int) -> Path:
    """Make models and files in ``folder``; models that are there stay. Raises ValueError where torch is not installed."""
    try:
        from fineserve_runtime.engines.tiny_model import narrow_kv, tiny_model
    except ImportError as problem:
        raise ValueError(f"the demo needs vLLM and torch ({problem}); install them as docs/runtime.md says") from None
    folder.mkdir(parents=True, exist_ok=True)
    narrow, kv_dtype = narrow_kv(MODELS["tiny-fp8"])
    bf16, fp8 = (tiny_model(spec, folder).name for spec in (MODELS["tiny-bf16"], narrow))
    return write_files(folder, bf16, fp8, port, kv_dtype)


def write_files(folder: Path, bf16: str, fp8: str, port: int, kv_dtype: str = "fp8_e4m3") -> Path:
    """demo.yaml, whose path is returned, and on_off.yaml, over two model folders in ``folder``; ``kv_dtype`` of the second."""
    (folder / "on_off.yaml").write_text(ON_OFF.format(bf16=bf16, fp8=fp8), encoding="utf-8")
    file = folder / "demo.yaml"
    file.write_text(FILE.format(bf16=bf16, fp8=fp8, port=port, kv_dtype=kv_dtype), encoding="utf-8")
    return file


def serve_demo(file: Path, requests: int | None) -> None:
    """Serve until Ctrl-C; with ``requests``, until that many were answered. Raises RuntimeError when one failed."""
    failures: list[str] = []

    def ready(url: str) -> None:
        print(_greeting(url), flush=True)
        if requests is not None:
            threading.Thread(target=_try, args=(url, requests, failures)).start()

    run_server(load_file(file), None, ready=ready)
    if failures:
        raise RuntimeError(f"{len(failures)} of {requests} requests failed, the first with: {failures[0]}")


def _greeting(url: str) -> str:
    body = json.dumps({"model": "tiny-fp8", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32})
    return (
        f"Two models at {url}/v1. Try:\n  curl {url}/v1/models\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"
        f"  fineserve-run top {url}"
    )


def _try(url: str, requests: int, failures: list[str]) -> None:
    """Ask both models, eight requests at a time, print what it took, and stop the server."""
    names = list(MODELS)

    def ask(number: int) -> float:
        begun_s = time.monotonic()
        body = {"model": names[number % 2], "prompt": f"Request {number}: " * (1 + number % 8), "max_tokens": 32}
        request = Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=120) as answer:
                json.load(answer)
        except OSError as problem:
            failures.append(str(problem))
        return time.monotonic() - begun_s

    begun_s = time.monotonic()
    try:
        with ThreadPoolExecutor(8) as pool:
            latencies_s = sorted(pool.map(ask, range(requests)))
        took_s = time.monotonic() - begun_s
        middle_s = latencies_s[len(latencies_s) // 2]
        print(f"{requests} requests in {took_s:.2f} s, {len(failures)} failed, median latency {middle_s:.3f} s")
        sys.stdout.flush()
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
