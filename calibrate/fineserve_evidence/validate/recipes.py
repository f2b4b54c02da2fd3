"""The settings of InferenceX's (InferenceMAX's) runs, which its results leave out.

A script of its repository starts the server and the client of each configuration. ``RECIPES`` has what these scripts set apart
from the usual: 8,192 tokens a step, a slot for every client, ten requests a client, lengths uniform in 0.8-1.0 of the nominal
ones, 16-bit KV. Settings are a script's, so they hold for all lengths and numbers of clients.

Source: benchmarks/single_node of SemiAnalysisAI/InferenceX (Apache-2.0), the scripts as of February to May 2026; runs that the
repository no longer has (Llama-3.1-70B) are read as usual.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fineserve_evidence.validate.cases import Case, ClosedLoop
from fineserve_evidence.validate.front_end import FrontEnd
from fineserve_sim.catalog import precision

SHORTEST = 0.8
ROUNDS = 10
TOKEN_BUDGET = 8192
WITH_8BIT_KV = {"W8A8": "W8A8KV8"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a script sets for a model on some GPUs; for all GPUs where ``gpus`` is empty.

    ``margin_tokens``: a step holds at least all clients, the prompt and so many tokens. ``memory_utilization`` None is the
    engine's default. ``slots`` None is the number of clients. ``stream_interval`` counts the tokens that the server hands out
    at once.
    """

    backend: str
    models: tuple[str, ...]
    gpus: tuple[str, ...] = ()
    token_budget: int = TOKEN_BUDGET
    margin_tokens: int | None = None
    memory_utilization: float | None = None
    slots: int | None = None
    rounds: int = ROUNDS
    kv_8bit: bool = False
    stream_interval: int = 1

    def of(self, case: Case) -> Case:
        """Apply the settings to a case of a closed loop."""
        load, serving = case.load, case.serving
        if not isinstance(load, ClosedLoop):
            return case
        margin = self.margin_tokens
        budget = 0 if margin is None else serving.max_sequences + load.prompt_tokens + margin
        kept = WITH_8BIT_KV.get(serving.precision.name) if self.kv_8bit else None
        serving = replace(
            serving,
            token_budget=max(self.token_budget, budget),
            max_sequences=self.slots or serving.max_sequences,
            memory_utilization=self.memory_utilization or serving.memory_utilization,
            precision=precision(kept) if kept else serving.precision,
            front_end=serving.front_end and _streaming(serving.front_end, self.stream_interval),
        )
        return replace(
            case, serving=serving, load=replace(load, requests=self.rounds * load.clients, shortest=SHORTEST)
        )


def _streaming(front_end: FrontEnd, interval: int) -> FrontEnd:
    return front_end._replace(token_s=front_end.token_s / interval)


HOPPER, BLACKWELL = ("h100-sxm", "h200-sxm"), ("b200",)
DEEPSEEK = ("deepseek-r1", "deepseek-v3")
RECIPES = (
    Recipe("vllm", ("minimax-m2.5",), ("h100-sxm",), slots=256),
    Recipe("vllm", ("minimax-m2.5",), memory_utilization=0.95, slots=1024),
    Recipe("vllm", ("kimi-k2.5",), HOPPER, memory_utilization=0.95),
    Recipe("vllm", ("kimi-k2.5",), BLACKWELL, memory_utilization=0.97, slots=1024),
    Recipe("vllm", ("gpt-oss-120b",), BLACKWELL, slots=512),
    Recipe("sglang", DEEPSEEK, HOPPER, 32768, memory_utilization=0.82, stream_interval=10),
    Recipe("sglang", DEEPSEEK, BLACKWELL, 32768, memory_utilization=0.82, kv_8bit=True, stream_interval=30),
    Recipe("sglang", ("glm-5",), HOPPER, memory_utilization=0.85, rounds=5),
    Recipe("sglang", ("glm-5",), BLACKWELL, 32768, memory_utilization=0.85, kv_8bit=True, stream_interval=30),
    Recipe("sglang", ("qwen3.5-397b-a17b",), HOPPER, 16384, memory_utilization=0.8, kv_8bit=True, stream_interval=50),
    Recipe(
        "sglang", ("qwen3.5-397b-a17b",), BLACKWELL, 32768, memory_utilization=0.82, kv_8bit=True, stream_interval=30
    ),
    Recipe("trtllm", DEEPSEEK, margin_tokens=64),
    Recipe("trtllm", ("gpt-oss-120b",), token_budget=20000),
)


def recipe_of(backend: str, model: str, gpu: str) -> Recipe:
    """Find the settings of a configuration; the usual ones where no script differs."""
    fits = (one for one in RECIPES if one.backend == backend and model in one.models and gpu in (one.gpus or (gpu,)))
    return next(fits, Recipe(backend, (model,)))
