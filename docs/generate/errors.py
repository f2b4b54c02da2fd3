"""The errors against measured sets: all of them, and a row for each kind of set. The numbers are in ``docs/data``."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import NamedTuple

from fineserve_evidence.sharing.caps import CapErrors
from fineserve_evidence.validate.errors import ErrorRow

from docs.generate.markdown import table

DATA = Path(__file__).parents[1] / "data"
COLUMNS = [field.name for field in fields(ErrorRow)]
TEXT = {"set", "backend", "model", "precision", "phase"}
COUNTS = {"tp", "n"}
SET_COLUMNS = (
    "set", "engine", "model", "TP", "rows", "TTFT median", "p90", "bias", "TPOT median", "p90", "bias", "requests/s median"
)  # fmt: skip
CAP_COLUMNS = ("model", "TP", "phase", "", "rows", "median", "p90", "bias")
SHARE_COLUMNS = ("label", "requests", "measured", "scaled", "own")
PAIR_COLUMNS = ("source", "GPU", "mode", "engines", "workload", "beside", "metric", "error %", "fitted")


class Group(NamedTuple):
    """Sets that are reported in one row, and the limits of their median errors: TPOT, TTFT, requests a second."""

    name: str
    holds: Callable[[ErrorRow], bool]
    limits: tuple[float | None, float | None, float | None] = (None, None, None)


EXPERTS = re.compile(r"gpt-oss|MiniMax|-A\d+B|Kimi|DeepSeek|scout|Mixtral|GLM", re.IGNORECASE)


def experts(row: ErrorRow, name: str, backend: str = "vllm") -> bool:
    """Whether the row is of this mixture of experts under this engine."""
    return row.backend == backend and name in row.model


AUTHORS, VLLM, TRTLLM, STATIC = (0.08, 0.13, None), (0.08, 0.15, None), (0.08, 0.20, None), (0.12, 0.12, None)
H200, SGLANG = (0.07, 0.18, None), (0.08, 0.10, None)
MIXTURE = (0.12, 0.25, None)
LARGE_MIXTURE = (0.15, 0.30, None)
DENSE_GROUPS = (
    Group("8B in FP16, FP8 and AWQ, each share of the SMs: H100, vLLM 0.9.1",
          lambda row: row.set.startswith("fineserve_authors_h100_8b, ") and row.precision != "W4A8KV4", AUTHORS),
    Group("the same in QoQ, all SMs: OmniServe", lambda row: row.precision == "W4A8KV4", AUTHORS),
    Group("8B in FP16, FP8 and AWQ at TP 2, each share of the SMs",
          lambda row: row.set.startswith("fineserve_authors_h100_8b_tp2"), AUTHORS),
    Group("70B FP8 at TP 2, 4, 8: H100, vLLM",
          lambda row: row.set == "aic_silicon_hopper, h100-sxm" and row.backend == "vllm", VLLM),
    Group("70B FP8 at TP 1, 2, 4, 8: H200, vLLM",
          lambda row: "h200" in row.set and row.backend == "vllm" and "70B" in row.model, H200),
    Group("8B FP8 at TP 1, 2, 4, 8: H200, vLLM",
          lambda row: "h200" in row.set and row.backend == "vllm" and "8B" in row.model, H200),
    Group("8B at TP 1, 2, 4, 8: H100, TensorRT-LLM",
          lambda row: row.set == "aic_silicon_hopper, h100-sxm" and row.backend == "trtllm", TRTLLM),
    Group("70B FP8 at TP 1, 2, 4, 8: H200, TensorRT-LLM",
          lambda row: "h200" in row.set and row.backend == "trtllm", TRTLLM),
    Group("8B FP8 at TP 1, 2, 4, 8: H200, SGLang", lambda row: "h200" in row.set and row.backend == "sglang", SGLANG),
    Group("Qwen3-32B at TP 4: H100, vLLM and SGLang (readings chosen on these rows)",
          lambda row: row.set.startswith("aic_silicon_qwen3") and row.backend != "trtllm", VLLM),
    Group("Qwen3-32B at TP 4: H100, TensorRT-LLM (readings chosen on these rows)",
          lambda row: row.set.startswith("aic_silicon_qwen3") and row.backend == "trtllm", TRTLLM),
    Group("Llama-2 and CodeLlama: H100, vLLM 0.15.1 (BLIS)", lambda row: row.set.startswith("blis"), VLLM),
    Group("70B, single questions: H100, vLLM (LMBench)", lambda row: row.set.endswith("short_input"), VLLM),
    Group("70B, conversations: H100, vLLM (LMBench)", lambda row: row.set.endswith("sharegpt_output"), VLLM),
    Group("three 8B on one A100, below saturation (kvcached's benchmark)",
          lambda row: row.set.endswith("below saturation"), (0.20, 0.40, None)),
    Group("three 8B on one A100, above saturation (kvcached's benchmark)",
          lambda row: row.set.endswith("above saturation"), (0.25, None, 0.15)),
    Group("a 4B alone, and two of them on one A100-40GB (NVIDIA)",
          lambda row: row.set.startswith("nvidia_many_models"), (0.20, 0.40, 0.15)),
    Group("static batches of a 7B: A100, H100, H800, vLLM 0.5.1 (Aegaeon)",
          lambda row: row.set.startswith("aegaeon"), STATIC),
    Group("OPT-13B: A100, vLLM of 2023 (DistServe)", lambda row: row.set.startswith("distserve")),
)  # fmt: skip
EXPERT_GROUPS = (
    Group("gpt-oss-120b at TP 1, 2, 4, 8: H100 and H200, vLLM", lambda row: experts(row, "gpt-oss"), MIXTURE),
    Group("MiniMax-M2.5 at TP 4, 8: H100 and H200, vLLM", lambda row: experts(row, "MiniMax"), MIXTURE),
    Group("Qwen3-235B-A22B at TP 2, 4: H200, vLLM", lambda row: experts(row, "A22B"), LARGE_MIXTURE),
    Group("Kimi-K2.5 at TP 8: H200, vLLM", lambda row: experts(row, "Kimi"), LARGE_MIXTURE),
    Group("Llama 4 Scout at TP 4: H100, vLLM (LMBench)", lambda row: experts(row, "scout")),
    Group("mixtures of experts, SGLang", lambda row: row.backend == "sglang"),
    Group("mixtures of experts, TensorRT-LLM", lambda row: row.backend == "trtllm"),
)
APART = Group("mixtures of experts, prefill and decode apart", lambda row: row.set.endswith("prefill and decode apart"))


def _among(group: Group, mixture: bool) -> Group:
    """The group among mixtures of experts, or among dense models, whose engines do both prefill and decode."""
    return group._replace(
        holds=lambda row: bool(EXPERTS.search(row.model)) == mixture and not APART.holds(row) and group.holds(row)
    )


GROUPS = (
    *(_among(group, False) for group in DENSE_GROUPS),
    *(_among(group, True) for group in EXPERT_GROUPS),
    APART,
)


def rows() -> list[ErrorRow]:
    """The committed errors of every set."""
    return _rows("errors.csv")


def _rows(name: str) -> list[ErrorRow]:
    return [ErrorRow(**_typed(row)) for row in read(name)]  # type: ignore[arg-type]


def error_table(found: Iterable[ErrorRow]) -> str:
    """A row a set: errors in %, a dash where nothing was measured."""
    return table(SET_COLUMNS, map(_set_cells, found), right=SET_COLUMNS[3:])


def _model(row: ErrorRow) -> str:
    return f"{row.model.rsplit('/', 1)[-1]} {row.precision}"


def _set_cells(row: ErrorRow) -> tuple[object, ...]:
    ttft = (_percent(row.ttft_median_abs), _percent(row.ttft_p90_abs), _signed(row.ttft_bias))
    tpot = (_percent(row.tpot_median_abs), _percent(row.tpot_p90_abs), _signed(row.tpot_bias))
    return (row.set, row.backend, _model(row), row.tp, f"{row.n:,}", *ttft, *tpot, _percent(row.throughput_median_abs))


def summary() -> str:
    """A row a group: the lowest and highest median error over its sets in %, and which limits they break."""
    headers = ("measured", "sets", "rows", "TPOT", "TTFT", "requests/s", "beyond the limit")
    return table(headers, (_summed(group, [row for row in rows() if group.holds(row)]) for group in GROUPS))


def _summed(group: Group, found: Sequence[ErrorRow]) -> tuple[object, ...]:
    columns = [[getattr(row, f"{name}_median_abs") for row in found] for name in ("tpot", "ttft", "throughput")]
    beyond = [
        f"{name} of {sum(value > limit for value in column if value is not None)}"
        for name, column, limit in zip(("TPOT", "TTFT", "requests/s"), columns, group.limits, strict=True)
        if limit is not None and any(value > limit for value in column if value is not None)
    ]
    bounded = ", ".join(beyond) or ("none" if any(group.limits) else "no limit set")
    return (group.name, len(found), f"{sum(row.n for row in found):,}", *map(_range, columns), bounded)


def _range(values: Iterable[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    ends = list(dict.fromkeys(map(_percent, (known[0], known[-1])))) if known else ["-"]
    return " to ".join(ends)


def sharing() -> str:
    """Caps of SMs by model."""
    return cap_table([CapErrors(**_typed(row)) for row in read("caps.csv")])  # type: ignore[arg-type]


def cap_table(caps: Iterable[CapErrors]) -> str:
    """A row a model, TP degree and phase: errors in %."""
    cells = [
        (
            *(one.model, one.tp, one.phase, "held out" if one.held_out else "fitted", one.n),
            *(_percent(one.median_abs), _percent(one.p90_abs), _signed(one.bias)),
        )
        for one in caps
    ]
    return table(CAP_COLUMNS, cells, right=CAP_COLUMNS[4:])


def sharing_summary() -> str:
    """A row a way of sharing: median and largest absolute error over the published rows."""
    caps = [CapErrors(**_typed(row)) for row in read("caps.csv")]  # type: ignore[arg-type]
    found = []
    for name, mine in (
        ("thread caps, A100: fitted models", [cap for cap in caps if not cap.held_out]),
        ("thread caps, A100: models held out", [cap for cap in caps if cap.held_out and "8b" not in cap.model]),
        ("thread caps, H100: 8B, held out", [cap for cap in caps if "8b" in cap.model]),
    ):
        numbers = [cap.median_abs for cap in mine]
        found.append((name, sum(cap.n for cap in mine), _percent(median(numbers)), _percent(max(numbers))))
    for name, modes in (("time-slicing", ("timeslic", "hami")), ("MPS", ("mps",)), ("MIG", ("mig",))):
        errors = [abs(int(row["error %"])) for row in read("pairs.csv")
                  if row["mode"].startswith(modes) and row["error %"] != "-" and not row["fitted"]]  # fmt: skip
        found.append((f"{name}, pairs and more", len(errors), f"{median(errors):.0f}", f"{max(errors):.0f}"))
    return table(("sharing", "rows", "median error %", "largest"), found)


def shares() -> str:
    """The share of a GPU that two models keep, in % of one model's output with as many requests: a row a number of requests."""
    budget = ", budget 2048"
    kept: dict[str, dict[str, tuple[str, ...]]] = {}
    for row in read("shares.csv"):
        if row["label"].endswith(budget):
            numbers = (f"{100 * float(row[name]):.0f}" for name in SHARE_COLUMNS[2:])
            kept.setdefault(row["requests"], {})[row["label"].removesuffix(budget)] = (*numbers,)
    modes = list(dict.fromkeys(mode for found in kept.values() for mode in found))
    headers = ["requests on the GPU"]
    headers += [f"{mode}: {what}" for mode in modes for what in ("measured", "predicted", "by A100 tables")]
    cells = ((requests, *(number for mode in modes for number in found[mode])) for requests, found in kept.items())
    return table(headers, cells, right=headers)


def read(name: str) -> list[dict[str, str]]:
    """The rows of a file in ``docs/data``."""
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _typed(row: Mapping[str, str]) -> dict[str, object]:
    """Text, counts, yes or no, and numbers that may be missing."""
    kinds: dict[str, Callable[[str], object]] = dict.fromkeys(TEXT, str) | dict.fromkeys(COUNTS, int)
    kinds["held_out"] = lambda value: value == "True"
    return {name: kinds.get(name, _number)(value) for name, value in row.items()}


def _number(value: str) -> float | None:
    return float(value) if value else None


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"[:-1]


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"[:-1]
