"""Readings of what the closed loops of aiconfigurator's own runs do not record, by engine and version.

A reading is one for an engine and version, never for a row. Those of vLLM 0.12.0, SGLang 0.5.1 and TensorRT-LLM 1.0.0rc3
were chosen on Qwen3-32B at TP 4 on H100 (``is_fitted``), that of SGLang 0.5.6 on its own rows at TP 4; they hold for every
model, TP degree and GPU of the engine and version. One version has two campaigns: TensorRT-LLM's runs of Llama-3.1-8B leave
one request waiting at any time (TTFT exceeds a prefill by a generation divided by the clients), those of Qwen3-32B do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fineserve_calibrate.validate.cases import Case, ClosedLoop, Sensitivity

GENERATOR_MARGIN = 1500
"""Of aiconfigurator's generator, beside the clients and the input: it writes ``max_num_tokens`` so."""
START_GAP_S = 0.05


@dataclass(frozen=True, slots=True)
class Reading:
    """``token_budget`` of a step (None: clients + input + ``GENERATOR_MARGIN``), requests a client, slots fewer than clients,
    and the seconds between two clients' starts."""

    name: str
    token_budget: int | None
    rounds: int = 10
    fewer_slots: int = 0
    start_gap_s: float = 0.0

    def budget(self, clients: int, prompt_tokens: int) -> int:
        """Tokens of a step."""
        return self.token_budget or clients + prompt_tokens + GENERATOR_MARGIN

    def of(self, case: Case) -> Case:
        """A case of a closed loop, read so."""
        load = case.load
        if not isinstance(load, ClosedLoop):
            return case
        running = max(1, load.clients - self.fewer_slots)
        read = replace(load, requests=self.rounds * load.clients, max_running=running, start_gap_s=self.start_gap_s)
        budget = self.budget(load.clients, load.prompt_tokens)
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
    ("sglang", "0.5.1.post1"): BURST,
    ("sglang", "0.5.6.post2"): FIVE,
    ("trtllm", "1.0.0rc3"): GENERATOR,
}
"""By engine and version; ``USUAL`` where none was chosen, and the generator's budget for TensorRT-LLM."""
OWN_CAMPAIGN = {("trtllm", "1.0.0rc3", "llama-3.1-8b"): FEWER_SLOTS}
FITTED_ON = ("qwen3-32b", 4, "h100-sxm")


def reading_of(backend: str, version: str, model: str) -> Reading:
    """The reading of an engine's runs."""
    usual = GENERATOR if backend == "trtllm" else USUAL
    return OWN_CAMPAIGN.get((backend, version, model)) or CHOSEN.get((backend, version), usual)


def is_fitted(backend: str, version: str, model: str, tp: int, gpu: str) -> bool:
    """Whether a row had a say in its reading."""
    if (backend, version) == ("sglang", "0.5.6.post2"):
        return tp == FITTED_ON[1]
    return (backend, version) in CHOSEN and (model, tp, gpu) == FITTED_ON


def of_campaigns() -> tuple[Sensitivity, ...]:
    """Every reading as a change of the cases that have one."""
    return tuple(Sensitivity(reading.name, _changed(reading)) for reading in READINGS)


def _changed(reading: Reading) -> Callable[[Case], Case]:
    return lambda case: reading.of(case) if case.reading else case
