"""vLLM engines in processes of their own, and the models that they run.

A point that needs an engine starts it, and the pool keeps it for the next point. Each engine has a process. So an engine that
fails takes nothing with it, and two engines are two processes as in a deployment. ``engine_worker`` is the process's side.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, ClassVar

from fineserve_calibrate.probes.schema import ProbeError, Unavailable
from fineserve_sim.catalog import CatalogError, model_from_hf_config

Config = Mapping[str, Any]

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_8B = {
    **_LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
}
_TINY = {
    **_LLAMA,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "vocab_size": 1024,
}
QUANTIZATION: Mapping[str, dict[str, Any]] = {
    "bfloat16": {},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "int4_wo": {
        **{"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
        "modules_to_not_convert": ["lm_head"],
    },
}


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """A model by its Hugging Face configuration, without weights."""

    name: str
    config: Config

    def quantized(self, dtype: str) -> dict[str, Any]:
        """Make the configuration of a checkpoint in ``dtype``: bfloat16, fp8 or int4_wo (AWQ)."""
        quantization = QUANTIZATION[dtype]
        return {**self.config, **({"quantization_config": quantization} if quantization else {})}


LLAMA_8B = ProbedModel("llama-3.1-8b", _8B)
TINY = ProbedModel("tiny-llama", _TINY)
ONE_LAYER = ProbedModel("one-layer", {**_TINY, "num_hidden_layers": 1, "max_position_embeddings": 131072})
"""A model so small that a step is the host's work."""


def model_from(path: Path) -> ProbedModel:
    """Read the model of a folder with a ``config.json``, or of such a file. The folder names it.

    Raises ProbeError for an unreadable file, or an architecture that the simulator lacks.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        spec = model_from_hf_config(file)
    except CatalogError as error:
        raise ProbeError(f"--model {error}") from None
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    config.pop("quantization_config", None)  # the probes choose the dtype
    return replace(TINY, name=spec.name, config={"torch_dtype": "bfloat16", **config})


STEPS_LIMIT_S = 180.0
GIB = 2**30
KEPT = 2


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The setting of an engine. ``place`` tells engines apart that are otherwise the same."""

    model: str
    dtype: str
    kv_dtype: str
    mode: str
    place: int = 0
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Composition:
    """A step to run on an engine. ``context`` is the cached tokens of each decode."""

    decodes: int
    context: int
    prefill_tokens: int
    cached_tokens: int = 0


def worker_settings(spec: EngineSpec, model: ProbedModel, on_cpu: bool) -> dict[str, Any]:
    """Make the argument of ``engine_worker``: configuration, vLLM arguments and environment."""
    small = on_cpu or model.config["hidden_size"] < 1024
    longest: int = model.config["max_position_embeddings"]
    arguments: dict[str, Any] = {"kv_cache_memory_bytes": (1 if small else 16) * GIB}
    if on_cpu:
        arguments |= {"max_num_seqs": 80, "max_num_batched_tokens": 2304, "max_model_len": min(longest, 4096)}
    else:  # room for a second engine: vLLM compares this fraction with what is free
        arguments |= {"gpu_memory_utilization": 0.45, "max_num_seqs": 256, "max_num_batched_tokens": 16384}
        arguments |= {"max_model_len": min(longest, 16384)}
    return settings_with(arguments, spec, model, on_cpu)


def settings_with(arguments: dict[str, Any], spec: EngineSpec, model: ProbedModel, on_cpu: bool) -> dict[str, Any]:
    """Complete the vLLM arguments of a worker: those that every probed engine has."""
    given = {
        "enforce_eager": spec.mode == "eager",
        "enable_prefix_caching": True,
        "kv_cache_dtype": "fp8" if spec.kv_dtype == "fp8" else "auto",
        **({"block_size": 32} if on_cpu else {}),
    }
    environment = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"} if on_cpu else {}
    config = model.quantized(spec.dtype)
    return {"config": config, "arguments": given | arguments, "environment": environment | dict(spec.environment)}


@dataclass
class EngineProcess:
    """A running engine. Raises Unavailable when it does not start, does not answer, or cannot run a step."""

    worker: ClassVar[str] = "fineserve_calibrate.probes.engine_worker"
    start_limit_s: ClassVar[float] = 420.0
    settings: dict[str, Any]
    import_s: float = 0.0
    start_s: float = 0.0
    _buffer: bytes = b""
    _log: IO[str] = field(init=False)

    def __post_init__(self) -> None:
        command = [sys.executable, "-m", self.worker, json.dumps(self.settings)]
        environment = os.environ | self.settings["environment"]
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment
        )

    def started(self) -> None:
        """Wait until vLLM is imported, then start the engine."""
        self.import_s = self.answer(self.start_limit_s)["import_s"]
        self.tell({"start": True})
        self.start_s = self.answer(self.start_limit_s)["start_s"]

    def ask(self, wanted: Composition, count: int, hold_s: float = 0.0) -> None:
        """Begin ``count`` steps of a composition, and go on with them for ``hold_s``."""
        asked = {"decodes": wanted.decodes, "context": wanted.context, "prefill_tokens": wanted.prefill_tokens}
        self.tell(asked | {"cached_tokens": wanted.cached_tokens, "count": count, "hold_s": hold_s})

    def tell(self, asked: dict[str, Any]) -> None:
        """Send the process one line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Unavailable(f"the engine's process ended: {self._last_words()}") from None

    def steps(self) -> list[tuple[float, float]]:
        """Get (end on the machine's monotonic clock, seconds) of each step asked for."""
        return [(end, seconds) for end, seconds in self.answer(STEPS_LIMIT_S)["steps"]]

    def close(self) -> None:
        """End the process and wait until it has given back its memory."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # what was not read any more
                self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def answer(self, limit_s: float) -> dict[str, Any]:
        """Read the process's next line. Kill the process when none comes within ``limit_s``."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([pipe], [], [], limit_s)
            piece = os.read(pipe, 1 << 16) if ready else b""
            if not piece:
                why = f"the engine's process ended: {self._last_words()}" if ready else f"no answer in {limit_s:g} s"
                self._process.kill()
                raise Unavailable(why)
            self._buffer += piece
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Unavailable(f"vLLM: {answer['error'].splitlines()[0][:200]}")
        return answer

    def log(self) -> str:
        """Read what the process and its libraries have printed."""
        self._log.seek(0)
        return self._log.read()

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.log().splitlines() if line.strip()]
        return lines[-1][:200] if lines else "without a word"


class EnginePool:
    """The engines that ran last, at most ``KEPT``. An engine that waits takes memory, but no time."""

    def __init__(self, models: dict[str, ProbedModel], on_cpu: bool) -> None:
        self._models, self._on_cpu = models, on_cpu
        self._running: dict[EngineSpec, EngineProcess] = {}  # the last used at the end
        self._failed: dict[EngineSpec, str] = {}

    def get(self, *specs: EngineSpec) -> list[EngineProcess]:
        """Get the engines of these specs. Raises Unavailable when one does not start, now or earlier."""
        for spec in specs:
            if spec in self._failed:
                raise Unavailable(self._failed[spec])
        for spec in specs:  # one after the other: an engine looks at the memory that is free
            self._running[spec] = self._running.pop(spec) if spec in self._running else self._started(spec, specs)
        for spec in list(self._running)[:-KEPT]:
            self.discard(spec)
        return [self._running[spec] for spec in specs]

    def longest(self, spec: EngineSpec) -> int:
        """Tell the tokens that a sequence of this engine may have."""
        arguments = worker_settings(spec, self._models[spec.model], self._on_cpu)["arguments"]
        tokens: int = arguments["max_model_len"]
        return tokens

    def _started(self, spec: EngineSpec, wanted: tuple[EngineSpec, ...]) -> EngineProcess:
        """A new engine; where there is no room for it beside engines that only wait, these end."""
        try:
            return self._start(spec)
        except Unavailable as reason:
            waiting = [other for other in self._running if other not in wanted]
            for other in waiting:
                self.discard(other)
            if not waiting:
                self._failed[spec] = str(reason)
                raise
        return self._started(spec, wanted)

    def _start(self, spec: EngineSpec) -> EngineProcess:
        process = EngineProcess(worker_settings(spec, self._models[spec.model], self._on_cpu))
        try:
            process.started()
        except Unavailable:
            process.close()
            raise
        return process

    def discard(self, spec: EngineSpec) -> None:
        """End an engine. The next point that needs it starts it anew."""
        if spec in self._running:
            self._running.pop(spec).close()

    def close(self) -> None:
        """End every engine."""
        for spec in list(self._running):
            self.discard(spec)
