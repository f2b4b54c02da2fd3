"""Processes of the trials: ``python3 -m fineserve_calibrate.campaign.trial_runs demo|files|overhead ...``.

``overhead``: the period of a decode step of one engine over the slab, and of a stock engine with the same arguments, one
after the other, each in a process of its own, as a GPU has them.
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from fineserve_calibrate.campaign.trial_files import CPU_PLAY, GPU_PLAY, MIB, write_model, write_play
from fineserve_calibrate.probes.engines import Composition, EngineProcess
from fineserve_calibrate.probes.models import LLAMA_8B, TINY, ProbedModel

REQUESTS = 40
BATCHES = {"cpu": (1, 8), "cuda": (1, 32)}
CONTEXT, STEPS, START_LIMIT_S, RUN_LIMIT_S = 128, 60, 300.0, 120.0


def demo(backend: str) -> None:
    """The demo's two tiny models behind the real server on this device, and its own client."""
    from tempfile import TemporaryDirectory

    from fineserve_runtime.demo import make_demo, serve_demo

    with TemporaryDirectory() as folder:
        file = make_demo(Path(folder), 0)
        file.write_text(file.read_text(encoding="utf-8").replace("backend: cpu", f"backend: {backend}"), "utf-8")
        serve_demo(file, REQUESTS)


def files(folder: Path, model: ProbedModel, gpu: str) -> None:
    """What ``fineserve-run replay`` plays."""
    write_model(folder / model.name, model)
    write_play(folder, model, None if gpu == "cpu" else gpu)


def overhead(folder: Path, model: ProbedModel, backend: str) -> dict[str, float]:
    """Microseconds of a decode step by engine and batch, and what the slab adds."""
    write_model(folder / model.name, model)
    slab, stock = slab_steps(folder / model.name, backend), stock_steps(folder / model.name, model, backend)
    found = {}
    for batch in BATCHES[backend]:
        found[f"stock_us_{batch}"], found[f"slab_us_{batch}"] = 1e6 * stock[batch], 1e6 * slab[batch]
        found[f"added_us_{batch}"] = 1e6 * (slab[batch] - stock[batch])
    return found


def engine_config(model: Path, backend: str) -> Any:
    """The runtime's configuration of the engine that both sides run."""
    from fineserve_runtime.engines.api import EngineConfig

    play = CPU_PLAY if backend == "cpu" else GPU_PLAY
    config = EngineConfig("only", model, block_tokens=play.block_tokens, max_sequences=play.max_sequences)
    return replace(config, max_model_len=play.max_model_len, max_batched_tokens=play.token_budget)


def slab_steps(model: Path, backend: str) -> dict[int, float]:
    """Median seconds from one step's end to the next, by decoding sequences, over the slab."""
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
    """The same of vLLM's own engine with the same arguments."""
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
    """Run one; ``overhead`` prints JSON."""
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
