"""GPUStack's performance lab: whole runs of benchmark clients against vLLM, SGLang and TensorRT-LLM on A100, H100 and H200.

Source: docs/performance-lab of gpustack/gpustack @ 47277d7. A row is a run on a page about one model. ``vllm bench serve``
sends all requests at once, or so many at a time; the row is judged by its duration. ``guidellm`` sends them at a rate, at most
512 at a time; the row is judged by the mean latency. Pages name the checkpoint in the command, or ("Quantization") in the
section.

Settings that a command leaves out have the version's default. vLLM's defaults differ by release, 0.11 to 0.24. SGLang 0.5
prefills in chunks of 8,192 tokens and bounds a batch by its memory. TensorRT-LLM 1 takes 8,192 tokens and 2,048 sequences a
step, and nine tenths of the memory that its weights leave. ShareGPT's lengths are drawn from their sketch and scaled to the
row's tokens; other lengths are the row's means.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from fineserve_traces.sketch import load_sketch

from fineserve_evidence.validate.cases import (
    BLOCK_TOKENS,
    SEED,
    BenchmarkRun,
    Case,
    Ints,
    Label,
    MeasuredSet,
    Sensitivity,
    Serving,
    with_load,
    with_serving,
)
from fineserve_evidence.validate.front_end import HTTP
from fineserve_evidence.validate.predict import block_bytes, kv_bytes
from fineserve_evidence.validate.rows import UnsupportedRow, cases_of, check_positive, host_of, supported
from fineserve_sim.catalog import (
    CatalogError,
    GpuSpec,
    ModelSpec,
    PrecisionSpec,
    data_ranks,
    deployment,
    gpu,
    graph_bytes,
    model,
    precision,
    with_experts,
    with_ranks,
)
from fineserve_sim.cluster.compose.memory import static_fraction

Built = tuple[ModelSpec, PrecisionSpec, int, GpuSpec]
"""What an engine serves: model, precision, TP degree and GPU."""
DURATION, LATENCY, CLIENTS = "Benchmark duration (s)", "Mean Latency(s)", "Maximum request concurrency"
REQUESTS, PROMPTS, OUTPUTS = "Successful requests", "Total input tokens", "Total generated tokens"
FIRST = "Mean TTFT (ms)"
TEXTS = ("file", "hardware", "engine_versions", "section", "profile", "case", "block", "command_before")
COLUMNS = (*TEXTS, REQUESTS, DURATION, PROMPTS, OUTPUTS, CLIENTS, LATENCY, FIRST)
GPUS = {"H100": "h100-sxm", "H200": "h200-sxm", "A100": "a100-80gb"}
SLOWER_CARD = ("qwen3-14b/h100.md", "qwen3-32b/h100.md")
"""Pages that say H100 SXM, on which vLLM, SGLang and TensorRT-LLM alike decode 32B at 1.5 TB/s: taken for the H100 PCIe."""
MODELS = {"glm-4.x": "glm-4.6"}
"""Pages whose folder is not the model's name."""
OPTIMIZED_IS_FP8 = ("qwen3.5-35b-a3b/h200.md", "qwen3.5-35b-a3b/h200-latency.md")
"""Pages that recommend an FP8 checkpoint, which "Optimized" runs then have."""
COMMANDS = {"vllm serve": "vllm", "sglang.launch_server": "sglang", "trtllm-serve": "trtllm"}
"""Engines by the command that starts them."""
OTHERS_TOKENS = 8192
"""Token budget of a step: ``--chunked-prefill-size`` of SGLang on these GPUs, ``--max_num_tokens`` of TensorRT-LLM."""
OTHERS_SEQUENCES = 2048
"""``--max_batch_size`` of TensorRT-LLM, and the least bound that SGLang sets itself. No row has as many requests."""
TRTLLM_PART = 0.9
"""``free_gpu_memory_fraction`` of TensorRT-LLM."""
UNPREDICTED = {
    r"--(speculative-config|speculative-algorithm)": "how many drafted tokens were accepted is not recorded",
    r"--pp-size": "a pipeline",
}
"""Flags of runs that cannot be predicted, each with the reason."""
ONLY_FP8 = ("glm-5.2",)
"""Models that fit into no row's GPUs in 16 bits; their FP8 checkpoints are in blocks."""
FLASHINFER = (0, 11)
"""The version that samples by FlashInfer; later ones on these pages sort."""
LARGE_BYTES = 70 * 2**30
MOST_AT_A_TIME = 512
"""Requests that guidellm has in flight at most, by default."""
TEMPLATES = {"qwen3": 8, "glm": 5, "deepseek": 3, "gpt-oss": 6}
"""Tokens that a model's chat template puts around a prompt, by the start of its name. ``vllm bench serve`` sends chats and
counts the prompts alone; guidellm counts what the server does. What gpt-oss' requests share is left out."""
RANDOM = re.compile("(Throughput|Long Context|Generation Heavy) Profile|in / .* out")
"""Sections of guidellm's pages whose prompts are random and alike; their ``profile`` is another's."""
ALIKE = "Balanced"
"""The profile with prompts of 8K tokens, alike, of all sections of a page but ShareGPT's."""
BURST_PER_S = 1000.0
SLOW = ("qwen3.5-9b/h100.md", "Long Context", "Generation Heavy")
"""The rate of guidellm's runs that name none is the pages' ``request_rate``: 1,000; 1 in these sections of this page."""


def read_gpustack(frame: pd.DataFrame, path: Path) -> MeasuredSet:
    """Make a case of each run on an NVIDIA GPU. Other GPUs are left out, and counted."""
    check_positive(frame, (REQUESTS, DURATION, PROMPTS, OUTPUTS), path)
    check_positive(frame, (CLIENTS, LATENCY), path, may_miss=(CLIENTS, LATENCY))
    rows = _with_baselines([_texted(row) for row in frame.to_dict("records")])
    copied = _copied(rows)
    mine = [row for row in rows if _chip(row)]

    def case(row: dict[Any, Any]) -> Case:
        if _figures(row) in copied and row is not copied[_figures(row)]:
            raise UnsupportedRow(f"the figures of {copied[_figures(row)]['file']}")
        return _case(row)

    cases, unsupported = cases_of(mine, case, lambda row: (_engine(row), str(row["file"])))
    others = len(rows) - len(mine)
    return MeasuredSet(
        "gpustack",
        cases,
        unsupported,
        assumptions=(
            f"{others} rows of other GPUs are left out",
            "a setting that the command does not name has the default of `vllm serve`; vLLM steps one ahead from 0.14 on",
            "memory as these versions took it: CUDA graphs beside the KV memory; 0.11 samples by FlashInfer",
            "lengths of ShareGPT: its first turns, scaled to the row's tokens; else the row's means; chat templates added",
            "SGLang's decodes wait for its prompts; TensorRT-LLM cuts prompts into chunks, which is not its default",
            f"{HTTP}; a burst passes one by one, but for gpt-oss",
            "H100 pages of Qwen3-14B and 32B: an H100 PCIe, whose bandwidth their decodes have under all three engines",
        ),
        sensitivities=(
            Sensitivity("the GPU that the pages of Qwen3-14B and 32B name", _as_named),
            Sensitivity("no burst queues before the engine", with_load(BenchmarkRun, burst_queues=False)),
            Sensitivity("token budget 2048", with_serving(token_budget=2048)),
        ),
    )


def _texted(row: dict[Any, Any]) -> dict[Any, Any]:
    """The row with empty texts for what the page does not say."""
    return row | {name: row[name] if isinstance(row[name], str) else "" for name in TEXTS}


def _with_baselines(rows: list[dict[Any, Any]]) -> list[dict[Any, Any]]:
    """Give each case's baseline the command of its page's first one. The last command before it may be an optimised one."""
    first: dict[str, str] = {}
    for row in rows:
        if _is_baseline(row):
            first.setdefault(str(row["file"]), str(row["command_before"]))
    return [row | ({"command_before": first[row["file"]]} if _is_baseline(row) else {}) for row in rows]


def _is_baseline(row: dict[Any, Any]) -> bool:
    return "Other Benchmark Cases" in str(row["section"]) and str(row["block"]).startswith("Baseline")


def _as_named(case: Case) -> Case:
    return with_serving(gpu=gpu("h100-sxm"))(case) if case.serving.gpu.name == "h100-pcie" else case


def _engine(row: dict[Any, Any]) -> str:
    """The engine of a run, by its command; where that is flags alone, by the section and by flags that only SGLang has."""
    command = str(row["command_before"])
    if named := next((engine for start, engine in COMMANDS.items() if start in command), None):
        return named
    of_sglang = "SGLang" in str(row["section"]) or re.search(r"--(tp-size|context-length)\b", command)
    return "sglang" if of_sglang else "vllm"


def _chip(row: dict[Any, Any]) -> str | None:
    chip = next((chip for name, chip in GPUS.items() if name in str(row["hardware"])), None)
    return "h100-pcie" if row["file"] in SLOWER_CARD else chip


def _figures(row: dict[Any, Any]) -> tuple[object, ...]:
    return tuple(row[name] for name in (DURATION, REQUESTS, PROMPTS, OUTPUTS, FIRST))


def _copied(rows: Iterable[dict[Any, Any]]) -> dict[tuple[object, ...], dict[Any, Any]]:
    """Runs whose figures a page about another GPU has, too, to the last digit: the first page's row by the figures."""
    found: dict[tuple[object, ...], dict[Any, Any]] = {}
    chips: dict[tuple[object, ...], set[str]] = {}
    for row in rows:
        found.setdefault(_figures(row), row)
        chips.setdefault(_figures(row), set()).add(str(row["hardware"]))
    return {figures: row for figures, row in found.items() if len(chips[figures]) > 1}


def _case(row: dict[Any, Any]) -> Case:
    page, command = str(row["file"]), f"{row['command_before']} {row['case']}"
    for flag, reason in UNPREDICTED.items():
        if re.search(flag, command):
            raise UnsupportedRow(reason)
    folder = page.split("/", maxsplit=1)[0]
    served, engine, load = _model(MODELS.get(folder, folder)), _engine(row), _load(row)
    device, format_ = gpu(str(_chip(row))), _precision(row, command, served)
    served, tp = _grouped(served, command)
    serving = replace(
        SERVINGS[engine](row, command, (served, format_, tp, device)),
        api=HTTP,
        mean_tokens=int(load.prompt_tokens.mean() + load.output_tokens.mean() / 2),
    )
    label = Label(_title(row), engine, served.name, format_.name, tp)
    longest = int((load.prompt_tokens + load.output_tokens).max())
    if longest > kv_bytes(supported(serving)) // block_bytes(serving) * BLOCK_TOKENS:
        raise UnsupportedRow(f"a request does not fit into the KV memory of {device.name}")
    nothing = np.array([np.nan])
    measured_s = float(row[LATENCY] if load.whole == "latency" else row[DURATION])
    return Case(label, serving, load, nothing, nothing, whole_s=measured_s)


def _grouped(served: ModelSpec, command: str) -> tuple[ModelSpec, int]:
    """The model with its experts split or spread as the command says, and the TP degree of its attention. SGLang divides a TP
    group into ranks of attention in data parallel. Raises UnsupportedRow where experts are both split and spread."""
    gpus = int(_flag(command, "-tp", "--tp", "--tensor-parallel-size", "--tp-size", "--tp_size") or 1)
    if served.experts is None:
        return served, gpus
    every = gpus if re.search(r"--enable-expert-parallel|--moe-a2a-backend[ =]deepep", command) else 1
    over = int(_flag(command, "--ep-size", "--ep_size", "--ep") or every)
    ranks = int(_flag(command, "--dp-size", "--dp") or 1)
    if over not in (1, gpus):
        raise UnsupportedRow("experts both split and spread")
    spread = with_experts(served, "whole") if over > 1 else served
    return with_ranks(spread, ranks), gpus // ranks


def _vllm(row: dict[Any, Any], command: str, built: Built) -> Serving:
    served, _, tp, device = built
    asked = float(_flag(command, "--gpu-memory-utilization") or 0.9)
    graphs = graph_bytes(served, tp) / device.memory_bytes
    return Serving(
        *built, deployment(_host(row, command)), *_limits(command, device), memory_utilization=asked + graphs
    )


def _sglang(row: dict[Any, Any], command: str, built: Built) -> Serving:
    """Ranks of attention in data parallel divide chunks and running requests among them."""
    served, _, tp, device = built
    ranks = data_ranks(served)
    chunk = int(_flag(command, "--chunked-prefill-size") or OTHERS_TOKENS)
    most = int(_flag(command, "--max-running-requests") or OTHERS_SEQUENCES)
    asked = _flag(command, "--mem-fraction-static")
    return Serving(
        *(*built, deployment("sglang-0.5"), chunk // ranks, most // ranks),
        memory_utilization=float(asked) if asked else static_fraction(device.memory_bytes, chunk, tp * ranks, ranks),
        batching="sglang",
    )


def _trtllm(row: dict[Any, Any], command: str, built: Built) -> Serving:
    budget = int(_flag(command, "--max_num_tokens") or OTHERS_TOKENS)
    whole = Serving(*built, deployment("trtllm-1.0"), budget, min(budget, OTHERS_SEQUENCES), memory_utilization=1.0)
    left = kv_bytes(whole) / whole.gpu.memory_bytes
    return replace(whole, memory_utilization=1 - (1 - TRTLLM_PART) * left)


SERVINGS = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}
"""How an engine runs a row, from the row, its command and what it serves."""


def _model(name: str) -> ModelSpec:
    try:
        return model(name)
    except CatalogError:
        raise UnsupportedRow("model not in the catalog") from None


def _flag(command: str, *names: str) -> str | None:
    """The last value of a flag: a comment behind the command says more than the command."""
    values = re.findall(rf"(?:^|\s)(?:{'|'.join(names)})[ =](\S+)", command)
    return values[-1] if values else None


def _limits(command: str, device: GpuSpec) -> tuple[int, int]:
    """Token budget and sequences of a step: as the command says, else as ``EngineArgs.get_batch_defaults`` of vLLM 0.11 to
    0.24 does, which doubles both in throughput mode."""
    large = device.memory_bytes >= LARGE_BYTES and not device.name.startswith("a100")
    budget, sequences = (8192, 1024) if large else (2048, 256)
    twice = 2 if _flag(command, "--performance-mode") == "throughput" else 1
    asked = (_flag(command, "--max-num-batched-tokens"), _flag(command, "--max-num-seqs"))
    budget = int(asked[0]) if asked[0] else twice * budget
    return budget, min(budget, int(asked[1]) if asked[1] else twice * sequences)


def _host(row: dict[Any, Any], command: str) -> str:
    found = re.search(r"vLLM:? v(\d+)\.(\d+)", str(row["engine_versions"]))
    if found is None:
        raise UnsupportedRow("version not recorded")
    version = int(found[1]), int(found[2])
    asked = "--async-scheduling" in command
    if version == FLASHINFER:
        return "vllm-0.11-async" if asked else "vllm-0.11"
    return host_of(version, ahead=asked) or "vllm-v1"


def _precision(row: dict[Any, Any], command: str, served: ModelSpec) -> PrecisionSpec:
    optimized = row["file"] in OPTIMIZED_IS_FP8 and str(row["block"]).startswith("Optimized")
    if "-AWQ" in command:
        return precision("awq")
    marked = "-FP8" in command or "Quantization" in str(row["section"]) or served.name in ONLY_FP8
    if not (marked or optimized):
        return precision(served.checkpoint)
    if (_flag(command, "--kv-cache-dtype") or "").startswith("fp8"):
        return precision("fp8")
    return precision("fp8-block" if served.name.startswith(("qwen", *ONLY_FP8)) else "fp8-kv16")


def _load(row: dict[Any, Any]) -> BenchmarkRun:
    n, prompts, outputs = (int(row[name]) for name in (REQUESTS, PROMPTS, OUTPUTS))
    section, guided = str(row["section"]), not np.isnan(row[LATENCY])
    if not guided:
        prompts += n * next((tokens for name, tokens in TEMPLATES.items() if str(row["file"]).startswith(name)), 0)
    alike = row["profile"] == ALIKE and "ShareGPT" not in section
    if alike or str(row["case"]).startswith("random") or RANDOM.search(section):
        lengths = np.full(n, round(prompts / n)), np.full(n, max(1, round(outputs / n)))
    else:
        lengths = _first_turns(n, guided, (prompts, outputs))
    if not guided:
        clients = n if np.isnan(row[CLIENTS]) else int(row[CLIENTS])
        harmony = str(row["file"]).startswith("gpt-oss")
        return BenchmarkRun(*lengths, min(clients, n), 0.0, "duration", burst_queues=not harmony)
    return BenchmarkRun(*lengths, min(MOST_AT_A_TIME, n), 1 / _rate(row), "latency")


def _rate(row: dict[Any, Any]) -> float:
    """Requests a second that guidellm sends: by the section, else by the profile, else by the page."""
    stated = re.search(r"Rate (\d+)", str(row["section"])) or re.search(r"(\d+)RPS", str(row["profile"]))
    slow = row["file"] == SLOW[0] and any(name in str(row["section"]) for name in SLOW[1:])
    return float(stated[1]) if stated else 1.0 if slow else BURST_PER_S


def _first_turns(n: int, guided: bool, totals: tuple[int, int]) -> tuple[Ints, Ints]:
    """Lengths of n requests of ShareGPT with so many tokens in all.

    ``vllm bench serve`` takes the first two turns of each piece of a conversation that are not too long. Half of the pieces
    are taken to begin with an answer, which the tokens of the rows bear out. guidellm takes question and answer.
    """
    rng = np.random.default_rng(SEED)
    prompt, output = load_sketch("sharegpt_v3_first_turn").sample(rng, 2 * n)
    if not guided:
        kept = (np.minimum(prompt, output) >= 4) & (prompt <= 1024) & (prompt + output <= 2048)
        swapped = rng.random(2 * n) < 0.5
        prompt, output = np.where(swapped, output, prompt)[kept], np.where(swapped, prompt, output)[kept]
    found = [_scaled(own[:n], total) for own, total in zip((prompt, output), totals, strict=True)]
    return found[0], found[1]


def _scaled(lengths: Ints, total: int) -> Ints:
    scaled: Ints = np.maximum(1, np.rint(lengths * (total / lengths.sum()))).astype(np.int64)
    return scaled


def _title(row: dict[Any, Any]) -> str:
    section = str(row["section"]).rsplit("Experiment Results / ", 1)[-1]
    parts = (str(row["file"]).removesuffix(".md"), section, str(row["case"]), str(row["block"]).split(" ")[0])
    return ", ".join(part for part in parts if part and part not in ("Benchmark",))
