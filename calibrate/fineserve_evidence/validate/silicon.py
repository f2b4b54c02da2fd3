"""aiconfigurator's "silicon" points: means of closed-loop benchmark runs by model, TP, lengths and number of clients.

Its InferenceMAX rows ran as that project's scripts say (``recipes``). Its own gap runs state only the clients.

Where experts go over more GPUs than a TP group, attention is in data parallel; the clients of such a row are each rank's.

A ``Reading`` says the rest of an engine and version, never of a row. The readings of vLLM 0.12.0 and TensorRT-LLM 1.0.0rc3
were chosen on Qwen3-32B at TP 4 on H100 (``is_fitted``). They hold for every model, TP degree and GPU of the engine and
version. SGLang has the usual one: its batching, its memory and the client's ten requests follow from sources
(``SGLANG_BATCHING``). One version has two campaigns: TensorRT-LLM's runs of Llama-3.1-8B leave one request waiting at any time
(TTFT exceeds a prefill by a generation divided by the clients). Its runs of Qwen3-32B do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from fineserve_evidence.validate.cases import (
    Apart,
    Case,
    Change,
    ClosedLoop,
    Label,
    MeasuredSet,
    Sensitivity,
    Serving,
    with_load,
    with_serving,
)
from fineserve_evidence.validate.front_end import HTTP, SGLANG
from fineserve_evidence.validate.recipes import ROUNDS, SHORTEST, TOKEN_BUDGET, recipe_of
from fineserve_evidence.validate.rows import (
    STEPS_AHEAD,
    UnsupportedRow,
    cases_of,
    check_positive,
    gpu_named,
    host_of,
    model_named,
    precision_named,
    stem,
    stored,
    supported,
)
from fineserve_sim.catalog import (
    ModelSpec,
    PrecisionSpec,
    data_ranks,
    deployment,
    precision,
    with_experts,
    with_ranks,
)
from fineserve_sim.cluster.compose.memory import static_fraction

COLUMNS = (
    "backend", "model_path", "system", "precision", "mode", "isl", "osl", "gemm_quant_mode", "tp_size", "pp_size",
    "attention_dp_size", "silicon_ttft_ms", "silicon_tpot_ms", "concurrency", "source_kind",
)  # fmt: skip
LOAD, MEASURED = ("isl", "osl", "concurrency"), ("silicon_ttft_ms", "silicon_tpot_ms")
DEGREES = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
DEPLOYMENTS = {"vllm": "vllm-cudagraph", "trtllm": "trtllm-1.0", "sglang": "sglang-0.5"}
"""Host time by backend."""
GENERATIONS = {("vllm", "0.12.0"): "vllm-v1"}
"""Host time of versions that differ."""
SGLANG_BATCHING: dict[str, Literal["sglang", "sglang_mixed"]] = {"0.5.6.post2": "sglang_mixed"}
"""Versions whose runs mix decodes into batches of prompts. aiconfigurator's generator asks for it wherever one engine serves
prefill and decode (sglang.rule). Its template for 0.5.1 has a flag that SGLang does not know, so that those runs do not mix.
Its client sends ten requests a user after a warm-up (genai_perf_runner.py). Source: ai-dynamo/aiconfigurator."""


def read_silicon(frame: pd.DataFrame, path: Path) -> MeasuredSet:
    """Make a case of each row of aggregated serving of dense models. Other rows are counted as unsupported."""

    def case(placed: tuple[int, dict[Any, Any]]) -> Case:
        place, row = placed
        found = _case(row, stem(path), place)
        check_positive(frame.iloc[place : place + 1], (*LOAD, *MEASURED), path, may_miss=(*MEASURED, "concurrency"))
        return found

    records = enumerate(frame.to_dict("records"))
    return MeasuredSet(
        stem(path),
        *cases_of(records, case, lambda placed: (placed[1]["backend"], placed[1]["model_path"])),
        assumptions=(
            f"InferenceMAX rows: as its scripts say; usually {ROUNDS} requests a client, token budget {TOKEN_BUDGET}, a slot "
            f"for every client, lengths uniform in {SHORTEST}-1.0 of nominal",
            "gap runs: nominal lengths; the rest as their engine and version is read, below",
            "FP8 checkpoints: 8-bit KV on TensorRT-LLM, 16-bit elsewhere; block-scaled FP8 as per-tensor FP8",
            "gpt-oss on Hopper: MXFP4 by Marlin (VLLM_MXFP4_USE_MARLIN=1), as InferenceMAX's recipe has it",
            f"kernels of vLLM, whatever the backend; {HTTP}",
            "SGLang: its own batching and static memory; one process before it takes "
            f"{SGLANG.prompt_token_s * 1e6:g} us a prompt token and {SGLANG.token_s * 1e6:g} us a token out",
        ),
        sensitivities=(
            Sensitivity("5 requests a client", _five_rounds),
            Sensitivity("token budget 2048", with_serving(token_budget=2048)),
            Sensitivity("nominal lengths everywhere", with_load(ClosedLoop, shortest=1.0)),
            Sensitivity("FP8 checkpoints with 8-bit KV", _with_8bit_kv),
            Sensitivity("half of each prompt found in a prefix cache", _half_cached),
            Sensitivity("steps are scheduled one ahead", with_serving(steps_ahead=1)),
            Sensitivity("no queue before SGLang's engine", with_serving(front_end=None)),
            Sensitivity("SGLang's decodes join its prompts", _batched("sglang_mixed")),
            Sensitivity("SGLang's decodes wait for its prompts", _batched("sglang")),
        ),
        readings=of_campaigns(),
    )


def _five_rounds(case: Case) -> Case:
    return with_load(ClosedLoop, requests=5 * case.load.clients)(case) if isinstance(case.load, ClosedLoop) else case


def _batched(batching: Literal["sglang", "sglang_mixed"]) -> Change:
    """Mix decodes into SGLang's batches of prompts, or not; other engines stay as they are."""
    return lambda case: case if case.serving.batching == "vllm" else with_serving(batching=batching)(case)


def _half_cached(case: Case) -> Case:
    """Half of every prompt is found in a prefix cache: only the rest is computed."""
    if not isinstance(case.load, ClosedLoop):
        return case
    return with_load(ClosedLoop, prompt_tokens=max(1, int(case.load.prompt_tokens * 0.5)))(case)


def _with_8bit_kv(case: Case) -> Case:
    """FP8 checkpoints keep their KV in 8 bits, too."""
    return with_serving(precision=precision("W8A8KV8"))(case) if case.serving.precision.name == "W8A8" else case


def _quantised(row: dict[Any, Any]) -> str:
    """The row's quantisation; where it records none, what the checkpoint's name ends on."""
    for column in ("gemm_quant_mode", "precision"):
        if isinstance(row[column], str):
            return str(row[column])
    return next((name for name in ("fp8", "awq") if str(row["model_path"]).lower().endswith(f"-{name}")), "")


def _precision(backend: str, quantised: str) -> PrecisionSpec:
    """TensorRT-LLM takes the 8-bit KV that NVIDIA's FP8 checkpoints name; vLLM and SGLang keep 16 bits unless told."""
    return precision_named("fp8_kv8" if backend == "trtllm" and quantised.startswith("fp8") else quantised)


def _as_run(row: dict[Any, Any]) -> dict[Any, Any]:
    """The row with the degrees that InferenceMAX ran.

    Its runs give attention and experts the same GPUs of one node. Some rows multiply a degree that counts for both: TP 8 with
    experts over 8 is TP 64 with 8 x 8. TP 4 with experts over 4 is four ranks of TP 4 with experts over 16; such rows have
    the times of rows that say TP 4.
    """
    if row["mode"] != "agg" or not str(row["source_kind"]).startswith("inferencemax"):
        return row
    tp, ranks, split, whole = (row.get(name, 0) for name in DEGREES)
    if split == whole and split > 1 and tp * ranks == split * whole:
        tp, ranks = (whole, 1.0) if ranks == 1 else (1.0, whole)
        return row | {"tp_size": tp, "attention_dp_size": ranks, "moe_tp_size": 1.0}
    if tp == ranks > 1 and whole == tp * ranks:
        return row | {"attention_dp_size": 1.0, "moe_ep_size": tp}
    return row


def _spread(served: ModelSpec, row: dict[Any, Any]) -> ModelSpec:
    """The model with its experts split or spread as the row says, over all ranks of attention in data parallel. Raises
    UnsupportedRow for both, and for other groups."""
    experts, tp, split, whole = served.experts, row["tp_size"], row.get("moe_tp_size"), row.get("moe_ep_size")
    ranks = row["attention_dp_size"] if row["attention_dp_size"] > 1 else 1  # empty where a run does not know it
    if experts is None and ranks > 1:
        raise UnsupportedRow("attention in data parallel without experts")
    if experts is None or split is None or whole is None or not split > 0:
        return with_ranks(served, int(ranks)) if ranks > 1 else served
    ranks = ranks if ranks > 1 else int(split * whole / tp)
    if split * whole != tp * ranks:
        raise UnsupportedRow(f"experts over {split * whole:g} GPUs, attention over {tp * ranks:g}")
    if split > 1 and whole > 1:
        raise UnsupportedRow("experts both split and spread")
    spread = with_experts(served, "whole") if whole > 1 else served
    return with_ranks(spread, int(ranks)) if ranks > 1 else spread


def _serving(row: dict[Any, Any]) -> Serving:
    """The engine that the row's degrees describe; the caller puts the degrees of one role there."""
    if row["pp_size"] > 1:
        raise UnsupportedRow("pipeline")
    if row["backend"] not in DEPLOYMENTS:
        raise UnsupportedRow(f"backend {row['backend']}")
    if not row["tp_size"] > 0:
        raise UnsupportedRow("TP degree or number of clients not recorded")
    served = _spread(model_named(row["model_path"]), row)
    precision = stored(served, _precision(row["backend"], _quantised(row)))
    version = str(row.get("backend_version", ""))
    ahead = host_of(release(version)) if row["backend"] == "vllm" else None
    host = deployment(ahead or GENERATIONS.get((row["backend"], version), DEPLOYMENTS[row["backend"]]))
    gpu, tp = gpu_named(row["system"]), int(row["tp_size"])
    bare = Serving(served, precision, tp, gpu, host, TOKEN_BUDGET, TOKEN_BUDGET, api=HTTP)
    bare = replace(bare, steps_ahead=STEPS_AHEAD) if ahead else bare
    bare = _with_sglang(bare, version) if row["backend"] == "sglang" else bare
    return replace(bare, mean_tokens=int(row["isl"] + row["osl"] / 2))


def _case(row: dict[Any, Any], name: str, place: int) -> Case:
    row = _as_run(row)
    if row["mode"] != "agg":
        return _apart(row, name)
    bare = _serving(row)
    if not row["concurrency"] > 0:
        raise UnsupportedRow("TP degree or number of clients not recorded")
    served, tp, gpu, version = bare.model, bare.tp, bare.gpu, str(row.get("backend_version", ""))
    inferencemax = str(row["source_kind"]).startswith("inferencemax")
    clients = int(row["concurrency"]) * (1 if inferencemax else data_ranks(served))
    engine = (row["backend"], version)
    read = not inferencemax and is_fitted(*engine, served.name, tp, gpu.name)
    fitted = read or (place % 2 == 0 and (row["backend"], served.name, gpu.name) == SLOWER_ALONE_ON)
    name = f"{name}, {gpu.name}{', reading chosen on these rows' if fitted else ''}"
    label = Label(name, row["backend"], row["model_path"], bare.precision.name, tp)
    serving = supported(replace(bare, max_sequences=clients))
    load = ClosedLoop(clients, ROUNDS * clients, int(row["isl"]), int(row["osl"]), max_running=clients)
    ttft_s, tpot_s = (np.array([row[column] / 1e3]) for column in MEASURED)
    case = Case(label, serving, load, ttft_s, tpot_s, campaign=" ".join((row["backend"], version, served.name)))
    if not inferencemax:
        return reading_of(*engine, served.name).of(case)
    case = recipe_of(row["backend"], served.name, gpu.name).of(case)
    return replace(case, serving=supported(case.serving))


def _apart(row: dict[Any, Any], name: str) -> Case:
    """Prefill and decode on different engines, each on a node of its own. Where the clients are not recorded, there are as many
    as requests that decode."""
    workers = [row.get(f"{role}_num_workers", 0) for role in ("prefill", "decode")]
    if not all(count > 0 for count in workers):
        raise UnsupportedRow("prefill and decode apart, number of engines not recorded")
    prefill, decode = (
        _serving(row | {degree: row[f"{role}_{degree}"] for degree in (*DEGREES, "pp_size")})
        for role in ("prefill", "decode")
    )
    clients = row["concurrency"]
    if not clients > 0:
        clients = row["decode_batch_size"] * workers[1] * data_ranks(decode.model)
    clients = int(clients)
    name = f"{name}, {prefill.gpu.name}, prefill and decode apart"
    label = Label(name, row["backend"], row["model_path"], prefill.precision.name, decode.tp * data_ranks(decode.model))
    load = ClosedLoop(clients, ROUNDS * clients, int(row["isl"]), int(row["osl"]))
    ttft_s, tpot_s = (np.array([row[column] / 1e3]) for column in MEASURED)
    case = Case(label, replace(prefill, max_sequences=clients), load, ttft_s, tpot_s)
    if str(row["source_kind"]).startswith("inferencemax"):
        case = recipe_of(row["backend"], prefill.model.name, prefill.gpu.name).of(case)
    serving = supported(replace(case.serving, front_end=None, batching="vllm", memory_utilization=0.9))
    there = supported(replace(decode, max_sequences=clients, front_end=None, batching="vllm", memory_utilization=0.9))
    return replace(case, serving=serving, apart=Apart(int(workers[0]), int(workers[1]), there))


def release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version; none where it is not recorded."""
    numbers = version.split(".")[:2]
    return tuple(map(int, numbers)) if all(number.isdigit() for number in numbers) else ()


def _with_sglang(serving: Serving, version: str) -> Serving:
    """Batch, divide memory and hand out tokens as SGLang does by default."""
    return replace(
        serving,
        batching=SGLANG_BATCHING.get(version, "sglang"),
        memory_utilization=static_fraction(serving.gpu.memory_bytes, TOKEN_BUDGET, serving.tp),
        front_end=SGLANG,
        api=HTTP._replace(prompt_token_s=0.0),  # the front end tokenises
    )


GENERATOR_MARGIN = 1500
"""aiconfigurator's generator writes ``max_num_tokens`` as the clients, the input and this margin."""
START_GAP_S = 0.05


@dataclass(frozen=True, slots=True)
class Reading:
    """The settings of a closed loop that a set does not record.

    ``token_budget`` None means clients + input + ``GENERATOR_MARGIN``. ``rounds`` counts requests a client, ``fewer_slots`` the
    clients without a slot. ``start_gap_s`` lies between the starts of two clients.
    """

    name: str
    token_budget: int | None
    rounds: int = 10
    fewer_slots: int = 0
    start_gap_s: float = 0.0

    def budget(self, clients: int, prompt_tokens: int) -> int:
        """Compute the token budget of a step."""
        return self.token_budget or clients + prompt_tokens + GENERATOR_MARGIN

    def of(self, case: Case) -> Case:
        """Apply the reading to a case of a closed loop."""
        load = case.load
        if not isinstance(load, ClosedLoop):
            return case
        clients = load.clients // data_ranks(case.serving.model)  # of an engine
        running = max(1, clients - self.fewer_slots)
        read = replace(load, requests=self.rounds * load.clients, max_running=running, start_gap_s=self.start_gap_s)
        budget = self.budget(clients, load.prompt_tokens)
        return replace(case, load=read, serving=replace(case.serving, token_budget=budget), reading=self.name)


GENERATOR = Reading("the generator's budget", None)
FEWER_SLOTS = Reading("the generator's budget, one slot less than clients", None, fewer_slots=1)
BURST = Reading("budget 8192, one request a client", 8192, rounds=1)
FIVE = Reading("budget 8192, five requests a client", 8192, rounds=5)
USUAL = Reading("budget 8192", 8192)
READINGS = (
    USUAL,
    Reading("budget 2048", 2048),
    Reading("budget 16384", 16384),
    GENERATOR,
    FEWER_SLOTS,
    FIVE,
    BURST,
    Reading("budget 8192, clients start one after another", 8192, start_gap_s=START_GAP_S),
)

CHOSEN: dict[tuple[str, str], Reading] = {
    ("vllm", "0.12.0"): GENERATOR,
    ("trtllm", "1.0.0rc3"): GENERATOR,
}
"""Readings by engine and version. Other versions have ``USUAL``, TensorRT-LLM the generator's budget."""
OWN_CAMPAIGN = {("trtllm", "1.0.0rc3", "llama-3.1-8b"): FEWER_SLOTS}
FITTED_ON = ("qwen3-32b", 4, "h100-sxm")
SLOWER_ALONE_ON = ("vllm", "llama-3.1-70b", "h200-sxm")
"""The rows on which ``latency.tables.curves.SLOWER_ALONE`` was fitted: the first of the file, the third and so on."""


def reading_of(backend: str, version: str, model: str) -> Reading:
    """Find the reading of an engine's runs."""
    usual = GENERATOR if backend == "trtllm" else USUAL
    return OWN_CAMPAIGN.get((backend, version, model)) or CHOSEN.get((backend, version), usual)


def is_fitted(backend: str, version: str, model: str, tp: int, gpu: str) -> bool:
    """Say whether a row had a say in its reading, or in SGLang's host time."""
    return (backend == "sglang" or (backend, version) in CHOSEN) and (model, tp, gpu) == FITTED_ON


def of_campaigns() -> tuple[Sensitivity, ...]:
    """Make every reading a change of the cases that have one."""
    return tuple(Sensitivity(reading.name, _changed(reading)) for reading in READINGS)


def _changed(reading: Reading) -> Callable[[Case], Case]:
    return lambda case: reading.of(case) if case.reading else case
