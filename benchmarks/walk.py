"""How often does a reader of the composition turn back to a file that he already left?

    PYTHONPATH=CHECKOUT:CHECKOUT/traces python benchmarks/walk.py [--system NAME] [--warm] [--files]

Follows ``simulate`` until the first event of the clock and notes the file of each call into the simulator. Repeats are left
out: a reader reads a function once, at its first call, and comprehensions and lambdas with the function that has them.
Consecutive calls into one file are one *stay* there. A *return* is a stay in a file that was left before: stays less files.

The process has simulated nothing before; with ``--warm`` it knows all profiles. The events of the profiling sweep, simulations
before that of the scenario, are left out with what they call. ``--files`` prints the walk. Any checkout's code can run here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
from fineserve_traces import Trace

import fineserve_sim
from fineserve_sim.catalog import gpu, model, precision
from fineserve_sim.cluster import Gpu, Scenario, ServedModel, simulate
from fineserve_sim.systems import load_systems

ROOT = Path(fineserve_sim.__file__).parent
SYSTEMS = ("fineserve", "muxserve++", "prism", "static*")
MODELS = ("llama-3.1-8b", "qwen2.5-14b", "llama-3.2-1b", "llama-3.2-3b")


class _FirstEvent(Exception):
    """The run begins."""


def scenario_of(system: str, gpus: int = 4) -> Scenario:
    """Some models on several GPUs under a system, with a request each."""
    names = tuple(f"model-{number}" for number in range(len(MODELS)))
    served = tuple(
        ServedModel(name, model(catalogued), precision("bf16"), 1, 1.0, 2.0, 512, 128)
        for name, catalogued in zip(names, MODELS, strict=True)
    )
    trace = Trace(
        arrival_s=np.arange(len(names), dtype=float),
        model=np.arange(len(names), dtype=np.int32),
        prompt_tokens=np.full(len(names), 512),
        output_tokens=np.full(len(names), 128),
        models=names,
        source="walk",
    )
    return Scenario(load_systems()[system], served, tuple(Gpu(id, 0, gpu("h100-sxm")) for id in range(gpus)), trace)


def walk(run: Callable[[], object]) -> list[str]:
    """The files of the simulator in the order of first calls of their functions, until the first event; a file a stay."""
    calls: list[str] = []
    seen: set[CodeType] = set()
    sweeps = 0  # simulations of the profiling sweep that are under way

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal sweeps
        code = frame.f_code
        if code.co_name == "_mean_resident_tokens" and event in ("call", "return"):
            sweeps += 1 if event == "call" else -1
        if event != "call" or code in seen or code.co_name.startswith("<"):
            return
        if code.co_name == "step" and code.co_filename.endswith("clock.py"):
            if not sweeps:
                raise _FirstEvent
        elif not _under_event(frame, sweeps):
            seen.add(code)
            if Path(code.co_filename).is_relative_to(ROOT):
                calls.append(str(Path(code.co_filename).relative_to(ROOT)))

    sys.setprofile(note)
    try:
        run()
    except _FirstEvent:
        pass
    finally:
        sys.setprofile(None)
    return [file for file, _ in groupby(calls)]


def _under_event(frame: FrameType | None, sweeps: int) -> bool:
    """Whether an event of a sweep led here."""
    while sweeps and frame is not None:
        if frame.f_code.co_name == "to_the_end":
            return True
        frame = frame.f_back
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description="Returns to files that were left, from simulate to its first event.")
    parser.add_argument("--system", default=SYSTEMS[0], choices=SYSTEMS)
    parser.add_argument("--files", action="store_true", help="print the files in turn")
    parser.add_argument("--warm", action="store_true", help="simulate once before, so that all profiles are known")
    asked = parser.parse_args()
    scenario = scenario_of(asked.system)
    if asked.warm:
        simulate(scenario)
    stays = walk(lambda: simulate(scenario))
    files = len(set(stays))
    if asked.files:
        print("\n".join(stays))
    print(f"{asked.system}: {len(stays)} stays in {files} files, {len(stays) - files} returns")


if __name__ == "__main__":
    main()
