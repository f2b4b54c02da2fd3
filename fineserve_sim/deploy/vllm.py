"""Engines as command lines of vLLM: one script for each node."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from fineserve_sim.deploy.engines import Deployed, facts

SLICES = "# MIG_{board}_{slice}: the UUID of a slice {profile} of GPU {board}, as nvidia-smi -L prints it"


def arguments(engine: Deployed) -> list[str]:
    """What ``vllm serve`` gets, the checkpoint first."""
    settings = engine.settings
    options = {
        "--served-model-name": engine.model,
        "--port": engine.port,
        "--tensor-parallel-size": engine.tp,
        "--max-model-len": engine.max_model_len,
        "--max-num-seqs": settings.max_sequences,
        "--max-num-batched-tokens": settings.token_budget,
        "--block-size": settings.block_tokens,
        "--gpu-memory-utilization": engine.memory_share,
        "--kv-cache-memory-bytes": engine.kv_bytes,
    }
    if settings.kv_offloading is not None:
        options |= {"--kv-offloading-size": settings.kv_offloading.size_gib, "--kv-offloading-backend": "native"}
    known = facts()["vllm"]
    flags = [*known["precisions"][engine.precision.name]["arguments"], *(["--enforce-eager"] * engine.eager)]
    flags += known["whole_experts"] if engine.whole_experts else []
    return [engine.weights, *(str(part) for option in options.items() for part in option), *flags]


def environment(engine: Deployed) -> Mapping[str, str]:
    """The variables of the engine beside its GPUs."""
    percent = engine.sm_percent
    return {} if percent is None else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)}


def scripts(engines: Sequence[Deployed]) -> dict[str, str]:
    """Shell scripts by file name, one a node. Each starts its engines and ends when one of them does."""
    nodes = sorted({engine.node for engine in engines})
    return {f"node-{node}.sh": _script([each for each in engines if each.node == node]) for node in nodes}


def _script(engines: Sequence[Deployed]) -> str:
    lines = ["#!/usr/bin/env bash", "set -euo pipefail"]
    slices = sorted({device for each in engines for device in each.devices if device.slice is not None})
    lines += [SLICES.format(**each._asdict()) for each in slices]
    if any(engine.mode == "mps" for engine in engines):
        lines += ["nvidia-cuda-mps-control -d  # engines of one GPU run side by side"]
    lines += [_line(engine) for engine in engines]
    return "\n".join([*lines, "wait -n  # one has ended: so does this script, with the others", "kill 0", ""])


def _line(engine: Deployed) -> str:
    devices = ",".join(map(str, engine.devices))
    variables = [f'CUDA_VISIBLE_DEVICES="{devices}"', *(f"{name}={text}" for name, text in environment(engine).items())]
    return f"{' '.join(variables)} vllm serve {shlex.join(arguments(engine))} &"
