"""Parts of the trials: ``python3 -m fineserve_evidence.campaign.trial_runs demo|files|overhead ...``.

``files`` writes a model with random weights, a trace, and the experiment's file. ``overhead`` times a decode step of one engine
over the slab, and of a stock engine with the same arguments, one after the other. Each has a process of its own, as on a GPU.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from fineserve_calibrate.probes.engines import LLAMA_8B, TINY, Composition, EngineProcess, ProbedModel

from fineserve_sim.catalog import activation_bytes, graph_bytes, model_from_hf_config, precision, weight_bytes
from fineserve_sim.catalog import gpu as catalog_gpu

MIB, GIB = 2**20, 2**30
SPREAD = 0.02
"""Standard deviation of weights."""


@dataclass(frozen=True, slots=True)
class Play:
    """The load of a replay on a kind of device.

    Two models of one shape share ``region_bytes`` of KV memory, little enough to run out in bursts. Rates are both models'
    together.
    """

    block_tokens: int
    max_sequences: int
    token_budget: int
    max_model_len: int
    region_bytes: int
    prompt_tokens: float
    output_tokens: float
    rate_per_s: float
    seconds: float
    slo_s: float


GPU_PLAY = Play(16, 64, 2048, 2048, 4 * GIB, 400.0, 120.0, 12.0, 40.0, 1.0)
CPU_PLAY = Play(32, 16, 256, 1024, 6 * MIB, 120.0, 50.0, 8.0, 8.0, 0.5)

FILE = """\
# Made by fineserve-calibrate campaign: two models of one shape over one KV region.
fineserve: 1
title: Two models on one device, on real engines and in the simulator
cluster: {{count: 1, gpu: {gpu}}}
engine: {{block_tokens: {play.block_tokens}, max_sequences: {play.max_sequences}, token_budget: {play.token_budget},
         context_bytes: 0, memory_utilization: {utilization!r}}}
models:
  - {{id: A, model: {{config: {model}/config.json}}, precision: W16A16}}
  - {{id: B, model: {{config: {model}/config.json}}, precision: W16A16}}
workload: {{trace: trace.csv}}
slo: {{ttft_s: {play.slo_s}}}
systems: [fineserve]
seeds: 1
runtime:
  backend: {backend}
  mode: processes
  region_bytes: {play.region_bytes}
  region_name: campaign
  models:
    A: {{path: {model}, max_model_len: {play.max_model_len}}}
    B: {{path: {model}, max_model_len: {play.max_model_len}}}
"""
CPU_GIB = 4
CPU_GPU = """{{name: cpu, memory_gib: {gib}, memory_bytes_per_s: 1.0e+10, bf16_flops_per_s: 1.0e+11, pcie_bytes_per_s: 1.0e+9,
         efficiency: roofline-scaled, source: "not used: steps are measured"}}"""


def write_play(folder: Path, model: ProbedModel, gpu: str | None) -> Path:
    """Write trace and file into ``folder``, beside the model's folder. Return the file. ``gpu`` is None for the CPU."""
    play, memory_bytes = (GPU_PLAY, catalog_gpu(gpu).memory_bytes) if gpu else (CPU_PLAY, CPU_GIB * GIB)
    (folder / "trace.csv").write_text(draw_trace(play), encoding="utf-8")
    text = FILE.format(
        gpu=gpu or CPU_GPU.format(gib=CPU_GIB),
        play=play,
        model=model.name,
        backend="cuda" if gpu else "cpu",
        utilization=utilization(folder / model.name, model, play, memory_bytes),
    )
    file = folder / "replay.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def utilization(folder: Path, model: ProbedModel, play: Play, memory_bytes: int) -> float:
    """Compute the part of the device's memory that both engines use. Their KV memory is the region less its first slab."""
    spec, format_, config = model_from_hf_config(folder), precision("W16A16"), model.config
    sequences = min(play.max_sequences, play.token_budget)
    fixed = weight_bytes(spec, format_, 1) + activation_bytes(spec, 1, play.token_budget, sequences)
    fixed += graph_bytes(spec, 1)
    block = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * play.block_tokens
    return float((2 * fixed + play.region_bytes - block + 0.5) / memory_bytes)


def draw_trace(play: Play) -> str:
    """Draw rows ``arrival_s,model,...`` of two models whose rates swing against one another, with bursts of both."""
    rng, rows = np.random.default_rng(7), list[tuple[float, str, int, int]]()
    for name, phase in (("A", 0.0), ("B", 0.5)):
        now = 0.0
        while now < play.seconds:
            swing = 1 + 0.8 * np.sin(2 * np.pi * (2.5 * now / play.seconds + phase))
            burst = 4.0 if now % (play.seconds / 3) > 0.9 * play.seconds / 3 else 1.0
            now += rng.exponential(2 / (play.rate_per_s * swing * burst))
            prompt = int(np.clip(play.prompt_tokens * rng.lognormal(0.0, 0.6), 16, play.max_model_len // 2))
            output = int(np.clip(play.output_tokens * rng.lognormal(0.0, 0.6), 8, play.max_model_len // 4))
            rows.append((now, name, prompt, output))
    lines = [f"{now:.4f},{name},{prompt},{output}" for now, name, prompt, output in sorted(rows)]
    return "\n".join(["arrival_s,model,prompt_tokens,output_tokens", *lines, ""])


# --- random weights ------------------------------------------------------------------------------------------------------


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """List the shape of each weight of a layer of a Llama, by the end of its name."""
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    return {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def write_model(folder: Path, model: ProbedModel) -> None:
    """Write config.json and safetensors of random BF16 weights, a file a layer.

    All layers have the same numbers. Drawing them once makes 16 GB a matter of seconds.
    """
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = dict(model.config)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator, files = torch.Generator().manual_seed(1), dict[str, str]()

    def drawn(shape: tuple[int, ...]) -> Any:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return (SPREAD * torch.randn(shape, generator=generator)).to(torch.bfloat16)

    layer = {name: drawn(shape) for name, shape in shapes(config).items()}
    ends = (config["vocab_size"], config["hidden_size"])
    outside = {"model.embed_tokens.weight": ends, "model.norm.weight": ends[1:], "lm_head.weight": ends}

    def groups() -> Iterator[tuple[str, dict[str, Any]]]:
        yield "ends", {name: drawn(shape) for name, shape in outside.items()}
        for number in range(config["num_hidden_layers"]):
            yield f"layer-{number}", {f"model.layers.{number}.{name}": tensor for name, tensor in layer.items()}

    for group, tensors in groups():
        save_file(tensors, folder / f"model-{group}.safetensors", metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, f"model-{group}.safetensors")
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


REQUESTS = 40
BATCHES = {"cpu": (1, 8), "cuda": (1, 32)}
CONTEXT, STEPS, START_LIMIT_S, RUN_LIMIT_S = 128, 60, 300.0, 120.0


def demo(backend: str) -> None:
    """Serve the demo's two tiny models behind the real server on this device, and run its client."""
    from tempfile import TemporaryDirectory

    from fineserve_runtime.demo import make_demo, serve_demo

    with TemporaryDirectory() as folder:
        file = make_demo(Path(folder), 0)
        file.write_text(file.read_text(encoding="utf-8").replace("backend: cpu", f"backend: {backend}"), "utf-8")
        serve_demo(file, REQUESTS)


def files(folder: Path, model: ProbedModel, gpu: str) -> None:
    """Write the files of ``fineserve-run replay``."""
    write_model(folder / model.name, model)
    write_play(folder, model, None if gpu == "cpu" else gpu)


def overhead(folder: Path, model: ProbedModel, backend: str) -> dict[str, float]:
    """Time a decode step by engine and batch, in microseconds, and what the slab adds."""
    write_model(folder / model.name, model)
    slab, stock = slab_steps(folder / model.name, backend), stock_steps(folder / model.name, model, backend)
    found = {}
    for batch in BATCHES[backend]:
        found[f"stock_us_{batch}"], found[f"slab_us_{batch}"] = 1e6 * stock[batch], 1e6 * slab[batch]
        found[f"added_us_{batch}"] = 1e6 * (slab[batch] - stock[batch])
    return found


def engine_config(model: Path, backend: str) -> Any:
    """Make the runtime's configuration of the engine that both sides run."""
    from fineserve_runtime.engines.api import EngineConfig

    play = CPU_PLAY if backend == "cpu" else GPU_PLAY
    config = EngineConfig("only", model, block_tokens=play.block_tokens, max_sequences=play.max_sequences)
    return replace(config, max_model_len=play.max_model_len, max_batched_tokens=play.token_budget)


def slab_steps(model: Path, backend: str) -> dict[int, float]:
    """Measure the median seconds from one step's end to the next over the slab, by decoding sequences."""
    from fineserve_runtime.engines.api import HostConfig, Sampling, StepReport, Submission
    from fineserve_runtime.engines.host import start_host

    ends: dict[int, list[float]] = {}
    done = threading.Event()

    class Listener:
        def on_step(self, report: StepReport) -> None:
            if not report.prefill_tokens:
                ends.setdefault(report.decodes, []).append(report.ended_s)
            if not report.state.running:
                done.set()

        def on_died(self, engine: int, reason: str, lost: tuple[int, ...], crashed: bool = False) -> None:
            done.set()

    region_bytes = 256 * MIB if backend == "cpu" else GPU_PLAY.region_bytes
    device: Any = backend
    config = HostConfig((engine_config(model, backend),), region_bytes, "processes", device, region_name="overhead")
    host = start_host(config, Listener())
    try:
        handle = host.engines[0]
        for batch in BATCHES[backend]:
            done.clear()
            for number in range(batch):
                sampling = Sampling(max_tokens=STEPS + 1, ignore_eos=True)
                handle.submit(Submission(1000 * batch + number, tuple(range(10, 10 + CONTEXT)), sampling))
            if not done.wait(RUN_LIMIT_S) or not handle.alive:
                raise RuntimeError(f"the engine over the slab did not finish {batch} requests")
    finally:
        host.close()
    return {batch: median(_gaps(ends[batch])) for batch in BATCHES[backend]}


def _gaps(ends: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(ends)]


def stock_steps(folder: Path, model: ProbedModel, backend: str) -> dict[int, float]:
    """Measure the same on vLLM's own engine with the same arguments."""
    from fineserve_runtime.engines.vllm_engine import engine_arguments

    config: Any = engine_config(folder, backend)
    region_bytes = 256 * MIB if backend == "cpu" else GPU_PLAY.region_bytes
    arguments = engine_arguments(config, folder, "cpu" if backend == "cpu" else "cuda", region_bytes)
    given = {name: value for name, value in arguments.items() if name not in ("model", "skip_tokenizer_init")}
    environment = {"OMP_NUM_THREADS": "1"} | ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if backend == "cpu" else {})
    engine = EngineProcess({"config": dict(model.config), "arguments": given, "environment": environment})
    try:
        engine.started()
        found = {}
        for batch in BATCHES[backend]:
            engine.ask(Composition(batch, CONTEXT + STEPS // 2, 0), STEPS)
            found[batch] = median(seconds for _, seconds in engine.steps())
        return found
    finally:
        engine.close()


def main() -> None:
    """Run one part. ``overhead`` prints JSON."""
    what, *rest = sys.argv[1:]
    if what == "demo":
        demo(rest[0])
        return
    model = next(known for known in (TINY, LLAMA_8B) if known.name == rest[1])
    if what == "files":
        files(Path(rest[0]), model, rest[2])
    else:
        print(json.dumps(overhead(Path(rest[0]), model, "cpu" if rest[2] == "cpu" else "cuda")))


if __name__ == "__main__":
    main()
