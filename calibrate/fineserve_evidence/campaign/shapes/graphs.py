"""CUDA graphs of two shapes over one set of weights: a whole stack of layers, and its first half.

All weights are views of one run of memory, in plain torch. The layers have the form of a Llama's in 16 bits, with random
weights. Each computes a prompt, of several lengths. On a CPU there are no graphs, and the same calls are made anew each time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fineserve_calibrate.probes.engines import ProbedModel

from fineserve_evidence.campaign.shapes.second import used_bytes
from fineserve_evidence.campaign.trial_runs import SPREAD, shapes

if TYPE_CHECKING:
    import torch

LENGTHS = (1, 32, 256)
"""Tokens of the prompts, a graph each."""
WARM_UP = 3

Layer = Mapping[str, "torch.Tensor"]
Replay = Callable[[], "torch.Tensor"]


def both_shapes(model: ProbedModel, device: str) -> dict[str, float]:
    """Measure seconds and bytes of capturing both shapes, and check their numbers.

    A number of a check is 1 where results are as they should be, bit by bit, and 0 where they are not. ``graphs_error`` is the
    largest difference from plain launches, over the largest result.
    """
    import torch

    run, whole = weights(model.config, device)
    half = whole[: len(whole) // 2]
    prompts = [torch.randn(tokens, model.config["hidden_size"], device=device).to(run.dtype) for tokens in LENGTHS]
    found, replays = dict[str, float](), dict[str, list[Replay]]()
    plain = [compute(whole, prompt, model.config).clone() for prompt in prompts]  # what all share is there from now on
    for shape, layers in (("whole", whole), ("half", half)):
        calls = [_call(layers, prompt, model.config) for prompt in prompts]
        replays[shape], cost = captured(calls, device)
        found |= {f"{shape}_{name}": value for name, value in cost.items()}
    results = _results(replays["whole"])
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(results, plain, strict=True)]
    dropped = run[len(run) // len(whole) * len(half) :]
    return found | {"graphs_error": max(errors)} | checks(replays["whole"], replays["half"], dropped)


def weights(config: Mapping[str, Any], device: str) -> tuple[torch.Tensor, list[Layer]]:
    """Draw a run of random weights, and cut it into layers of views."""
    import torch

    parts = shapes(dict(config))
    layer_elements = sum(map(math.prod, parts.values()))
    run = torch.empty(config["num_hidden_layers"] * layer_elements, dtype=torch.bfloat16, device=device)
    run.normal_(std=SPREAD)
    layers: list[Layer] = []
    for piece in run.split(layer_elements):
        flat = piece.split([math.prod(shape) for shape in parts.values()])
        layers.append({name: one.view(shape) for one, (name, shape) in zip(flat, parts.items(), strict=True)})
    return run, layers


def compute(layers: Sequence[Layer], x: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """Compute a prompt of one row a token."""
    from torch.nn import functional as f

    width = config["head_dim"]

    def heads(values: torch.Tensor) -> torch.Tensor:
        return values.view(1, len(values), -1, width).transpose(1, 2)

    for layer in layers:
        rest = f.rms_norm(x, x.shape[-1:], 1 + layer["input_layernorm.weight"])
        query, key, value = (heads(f.linear(rest, layer[f"self_attn.{name}_proj.weight"])) for name in "qkv")
        mixed = f.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + f.linear(mixed.transpose(1, 2).reshape(len(x), -1), layer["self_attn.o_proj.weight"])
        rest = f.rms_norm(x, x.shape[-1:], 1 + layer["post_attention_layernorm.weight"])
        gate, up = (f.linear(rest, layer[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + f.linear(f.silu(gate) * up, layer["mlp.down_proj.weight"])
    return x


def _call(layers: Sequence[Layer], prompt: torch.Tensor, config: Mapping[str, Any]) -> Replay:
    return lambda: compute(layers, prompt, config)


def captured(calls: Sequence[Replay], device: str) -> tuple[list[Replay], dict[str, float]]:
    """Capture a graph of each call. Return their replays, with seconds and bytes of all; no cost on a CPU."""
    import torch

    if device == "cpu":
        return list(calls), {}
    for call in WARM_UP * list(calls):
        call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, begun_s, replays = used_bytes(), time.perf_counter(), []
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()
        replays.append(_replay(graph, result))
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begun_s
    for replay in replays:  # a graph takes some of its memory at its first launch
        replay()
    torch.cuda.synchronize()
    return replays, {"capture_s": seconds, "bytes": float(used_bytes() - before)}


def _replay(graph: Any, result: torch.Tensor) -> Replay:
    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


def checks(whole: Sequence[Replay], half: Sequence[Replay], dropped: torch.Tensor) -> dict[str, float]:
    """Check each shape again, after the other, with the dropped weights poisoned, and with them back."""
    wholes, halves = _results(whole), _results(half)
    found = {"half_again": _same(half, halves), "whole_after_half": _same(whole, wholes)}
    found |= {"whole_again": _same(whole, wholes), "half_after_whole": _same(half, halves)}
    kept = dropped.clone()
    dropped.fill_(math.nan)
    found["half_beside_poison"] = _same(half, halves)
    found["whole_sees_poison"] = float(all(bool(result.isnan().all()) for result in _results(whole)))
    dropped.copy_(kept)
    return found | {"whole_restored": _same(whole, wholes), "half_after_restore": _same(half, halves)}


def _results(replays: Sequence[Replay]) -> list[torch.Tensor]:
    return [replay().clone() for replay in replays]


def _same(replays: Sequence[Replay], expected: Sequence[torch.Tensor]) -> float:
    found = _results(replays)
    return float(all(bool((a == b).all()) for a, b in zip(found, expected, strict=True)))
