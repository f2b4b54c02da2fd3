"""The file of ``fineserve-run``: an experiment of the simulator, and a section ``runtime`` about the real engines.

    runtime:
      backend: cpu
      region_bytes: 67108864
      models:
        A: {path: models/a, kv_cache_dtype: fp8_e4m3, max_model_len: 1024}

Errors look as in the simulator: one line with file, line and key.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from fineserve_runtime.engines.api import EngineConfig, Paging
from fineserve_runtime.engines.model_files import kv_geometry, read_config
from fineserve_runtime.formats import check_format, longest_context, parser_names
from fineserve_runtime.jobs import Handover
from fineserve_runtime.memories import in_memory, paging
from fineserve_runtime.server.limits import HttpLimits
from fineserve_runtime.step_times import read_table
from fineserve_runtime.tracing import missing
from fineserve_sim.experiment.file.document import Document, parse_value, read_yaml
from fineserve_sim.experiment.file.errors import ConfigError, nearest
from fineserve_sim.experiment.file.messages import as_config_error
from fineserve_sim.experiment.file.plan import Experiment, build
from fineserve_sim.experiment.file.schema import Strict
from fineserve_sim.experiment.file.values import Count, Positive
from fineserve_sim.systems.spec import ContiguousSpec, MemorySpec, SystemSpec

_CPU_BLOCK_TOKENS = 32


class ModelFiles(Strict):
    """Where a model of ``models`` lies (relative to the file), and how its engine runs. ``dtype``, ``quantization``,
    ``kv_cache_dtype`` and ``tool_parser`` take vLLM's words. Its ``tp`` devices form ``stages``, which hold consecutive parts
    of its layers (pipeline parallelism). The devices of a stage split each layer. ``embeds``: it answers with vectors, not
    with text."""

    path: Annotated[str, Field(min_length=1)]
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    max_model_len: Count = 2048
    prefix_caching: bool = False
    stages: Count = 1
    tool_parser: str | None = None
    embeds: bool = False


class AddedModel(ModelFiles):
    """A model that is added to a running server: its files, and its entry in ``models``. ``device`` None: the
    one with the most free memory."""

    ttft_slo_s: Positive | None = None
    rate_per_s: Positive = 1.0
    device: Annotated[int, Field(ge=0)] | None = None


class RayCluster(Strict):
    """The Ray cluster to join, in Ray's words: ``HOST:PORT``, ``auto`` or ``local``."""

    ray: Annotated[str, Field(min_length=1)]


class ApiKey(Strict):
    """An API key in the environment variable ``env``. It may have ``requests`` under way at a time; ``priority``: it may say
    which of its requests go first."""

    name: Annotated[str, Field(min_length=1)]
    env: Annotated[str, Field(min_length=1)]
    requests: Count | None = None
    priority: bool = False


class TlsFiles(Strict):
    """Files in PEM, relative to the file."""

    certificate: Annotated[str, Field(min_length=1)]
    key: Annotated[str, Field(min_length=1)]


class RuntimeSection(Strict):
    """``region_bytes``: of each device, for KV (and weights, where ``weights_in_region``). ``mode``: engines in this process
    or one process each; by default the former for one CPU. ``cluster``: devices are actors of this Ray cluster; ``ray``: of
    the one that RAY_ADDRESS names or that runs here, else of a new one. ``step_times``: a table of measured steps (CSV: model,
    prefill_tokens, decodes, duration_s); without one a few steps are timed at the start. ``api_key_env``: the environment
    variable that holds the API key; ``api_keys``: several, with limits of their own; ``admin_key_env``: that of operators,
    without which there is no admin API. A model has at most ``queued_requests`` without a first token, none for longer than
    ``queued_s``. No request lasts longer than ``request_s``. An engine without a sign of life for ``silent_s`` is ended.
    SIGTERM gives ``drain_s``. ``handover``: when layers are dropped, requests take their KV along, or it is computed
    again. ``tracing``: a span of OpenTelemetry's a request. ``twin_s``: so long requests are kept for questions to the twin.
    ``twin_error``: the relative error of the simulator beyond which an alarm is told."""

    backend: Literal["cpu", "cuda"] = "cpu"
    mode: Literal["in_process", "processes"] | None = None
    cluster: Literal["ray"] | RayCluster | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, Field(strict=True, ge=0, le=65535)] = 8000
    api_key_env: str | None = None
    api_keys: tuple[ApiKey, ...] = ()
    admin_key_env: str | None = None
    tls: TlsFiles | None = None
    limits: HttpLimits = HttpLimits()
    region_bytes: Count
    region_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")] = "device"
    weights_in_region: bool = False
    poison_freed: bool = False
    models: dict[str, ModelFiles]
    step_times: str | None = None
    queued_requests: Count = 100
    queued_s: Positive = 300.0
    request_s: Positive = 1800.0
    silent_s: Positive = 60.0
    drain_s: Positive = 30.0
    decisions: str | None = None
    handover: Handover = "exchange"
    tracing: bool = False
    twin_s: Positive = 600.0
    twin_error: Positive = 0.15

    @property
    def ray_address(self) -> str | None:
        return self.cluster.ray if isinstance(self.cluster, RayCluster) else None


@dataclass(frozen=True, slots=True)
class RuntimeFile:
    """A loaded file. ``folder`` is where its relative paths start."""

    document: Document
    section: RuntimeSection
    experiment: Experiment
    folder: Path

    def error(self, key: str, problem: str) -> ConfigError:
        """A mistake under ``runtime``, at its line."""
        return self.document.error(("runtime", *key.split(".")), problem)


def load_file(
    path: Path,
    overrides: Sequence[tuple[str, str]] = (),
    changes: Sequence[tuple[str, Any, str]] = (),
    *,
    serving: bool = True,
) -> RuntimeFile:
    """``overrides`` come from ``--set``; ``changes`` are keys that other options replace, each with what to call it. Without
    ``serving`` models need no tokenizer: requests come as tokens.

    Raises ConfigError for the first mistake.
    """
    document = read_yaml(path)
    for key, text in overrides:
        place = f"--set {key}={text}"
        document.set(key, parse_value(text, place), place)
    for key, value, place in changes:
        document.set(key, value, place)
    if "runtime" not in document.data:
        raise document.error(
            ("runtime",), "missing; fineserve-run needs to know where the models are (docs/runtime.md)"
        )
    section = _section(document)
    plain = Document({key: value for key, value in document.data.items() if key != "runtime"}, document.places)
    experiment = build(plain, path.stem, path.resolve().parent)
    file = RuntimeFile(document, section, experiment, experiment.setup.folder)
    _check(file, serving)
    return file


def _section(document: Document) -> RuntimeSection:
    try:
        return RuntimeSection.model_validate(document.data["runtime"])
    except ValidationError as problem:
        details = sorted(problem.errors(), key=lambda detail: detail["type"] != "unknown_key")
        raise as_config_error(document, ("runtime",), details[0]) from None


def _check(file: RuntimeFile, serving: bool) -> None:
    ids = [model.id for model in file.experiment.setup.models]
    section = file.section
    for name in section.models:
        if name not in ids:
            raise file.error(f"models.{name}", f"unknown model; {nearest(name, ids)}")
    for index, model in enumerate(file.experiment.setup.models):
        if model.id not in section.models:
            raise file.error("models", f"no files are given for model {model.id}")
        try:
            found = check_model(section.models[model.id], file.folder, tokenizer=serving)
        except ModelProblem as problem:
            raise file.error(".".join(("models", model.id, *problem.keys)), problem.said) from None
        if (said := _ranks_problem(section, model.id, model.entry.tp, found)) is not None:
            raise file.document.error(("models", index, "tp"), said)
    _check_engines(file)
    if section.backend == "cuda" and section.mode == "in_process":
        raise file.error("mode", "GPU engines need a process each; leave mode out")
    _check_access(file)
    if section.tracing and (lacks := missing()) is not None:
        raise file.error("tracing", f"{lacks} is not installed; pip install 'fineserve[tracing]'")
    for name in file.experiment.setup.systems:
        _check_system(file, name)


def _ranks_problem(section: RuntimeSection, name: str, tp: int | Literal["auto"], found: dict[str, Any]) -> str | None:
    """The reason why a model cannot have ``tp`` devices, or None. ``found`` is its config.json."""
    stages = section.models[name].stages
    if tp == "auto":
        return "auto is for the simulator; say on how many devices the model is served"
    if tp % stages:
        return f"{tp} devices do not divide into the {stages} stages of runtime.models.{name}"
    return _on_devices_problem(section, name, tp, stages, found)


def _on_devices_problem(
    section: RuntimeSection, name: str, devices: int, stages: int, found: dict[str, Any]
) -> str | None:
    """The reason why an engine of the model cannot span so many devices, or None."""
    if devices == 1:
        return None
    if section.backend == "cuda" or section.cluster is not None or section.mode == "in_process":
        return (
            "a model on several devices is served by backend cpu, mode processes, without a cluster (docs/runtime.md)"
        )
    engine = EngineConfig(name, Path(), gpus=tuple(range(devices)), stages=stages)
    try:
        kv_geometry(found, engine)
    except ValueError as problem:
        return str(problem)
    return None


def _pipelines_problem(file: RuntimeFile, system: SystemSpec) -> str | None:
    """The reason why a system cannot make pipelines of its instances, or None."""
    if system.execution is None:
        return None
    (model,), section = file.experiment.setup.models, file.section
    if model.entry.tp != 1 or section.models[model.id].stages != 1:
        return "its pipelines are made of instances on one device each (tp: 1, stages: 1)"
    found = read_config(file.folder / section.models[model.id].path)
    return _on_devices_problem(section, model.id, system.execution.stages, system.execution.stages, found)


def _copies_problem(file: RuntimeFile, system: SystemSpec) -> str | None:
    """The reason why a system cannot copy KV between engines or to host memory, or None."""
    if system.migration is None and system.memory.policy != "swap":
        return None
    if file.section.backend == "cuda" or file.section.cluster is not None:
        return "KV is copied between engines of this machine's CPUs alone (docs/runtime.md)"
    if any(files.stages > 1 for files in file.section.models.values()):
        return "KV is not copied out of pipelines (stages: 1)"
    return None


def _drops_problem(file: RuntimeFile, system: SystemSpec) -> str | None:
    """The reason why the instances of a system cannot drop layers, or None."""
    if system.drop is None:
        return None
    setup, section = file.experiment.setup, file.section
    (model,) = setup.models
    if len(setup.gpus) != 2 or model.entry.tp != 1 or section.models[model.id].stages != 1:
        return "real engines drop layers in pairs: two devices, tp: 1, stages: 1"
    found = read_config(file.folder / section.models[model.id].path)
    return _on_devices_problem(section, model.id, 2, 2, found)


def _memory_problem(file: RuntimeFile, system: SystemSpec) -> str | None:
    """The reason why a system cannot have KV memory other than a slab, or None."""
    memory = system.memory
    if isinstance(memory, ContiguousSpec):
        cached = [name for name, files in file.section.models.items() if files.prefix_caching]
        return f"memory contiguous keeps no prefixes; leave prefix_caching of {cached[0]} out" if cached else None
    pages = paging(memory)
    said = None if pages is None else _paging_problem(file, system, pages)
    return said or _rows_problem(file, memory)


def _paging_problem(file: RuntimeFile, system: SystemSpec, pages: Paging) -> str | None:
    """The reason why memory cannot be mapped page by page, or None."""
    name = f"memory {system.memory.policy}"
    if file.section.backend == "cuda":
        return f"{name} is served by backend cpu; with cuda take kv_slab or private"
    if pages.slab_bytes % PAGESIZE:
        return f"{name}: {pages.slab_bytes} bytes are no multiple of the {PAGESIZE} of the system's pages"
    if system.execution is not None or any(model.entry.tp != 1 for model in file.experiment.setup.models):
        return f"{name} is served for models on one device each (tp: 1, no pipelines)"
    return None


def _rows_problem(file: RuntimeFile, memory: MemorySpec) -> str | None:
    """The reason why one of the models cannot have the memory's chunks, or None."""
    for name, files in file.section.models.items():
        tokens = file.experiment.setup.engine.block_tokens
        engine = EngineConfig(name, Path(), files.dtype, None, files.kv_cache_dtype, tokens)
        try:
            in_memory(engine, memory, file.folder / files.path)
        except ValueError as problem:
            return str(problem)
    return None


def _check_access(file: RuntimeFile) -> None:
    """Keys are there, each for one holder alone, and the files of TLS."""
    section, known = file.section, dict[str, str]()
    variables = {f"api_keys.{number}.env": key.env for number, key in enumerate(section.api_keys)}
    for name in ("api_key_env", "admin_key_env"):
        if getattr(section, name) is not None:
            variables[name] = getattr(section, name)
    for key, variable in variables.items():
        if not os.environ.get(variable):
            raise file.error(key, f"the environment variable {variable} is empty or not set")
        if (other := known.setdefault(os.environ[variable], key)) != key:
            raise file.error(key, f"the same secret as that of {other}; give each a key of its own")
    names = [key.name for key in section.api_keys]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise file.error(f"api_keys.{number}.name", f'a second key called "{name}"; its limit is counted by name')
    if section.tls is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                file.folder / section.tls.certificate, file.folder / section.tls.key
            )
        except (OSError, ValueError) as problem:  # ssl.SSLError is an OSError
            raise file.error("tls", f"certificate or key cannot be used: {problem}") from None


_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


class ModelProblem(ValueError):
    """A model that cannot be served; ``keys``: where in its entry, if that is known."""

    def __init__(self, said: str, *keys: str) -> None:
        self.said = said
        self.keys = keys
        super().__init__(": ".join((*keys, said)))


def check_model(files: ModelFiles, folder: Path, *, tokenizer: bool = True) -> dict[str, Any]:
    """The config.json of the model's folder, which lies in ``folder``. Raises ModelProblem unless all is there that vLLM
    needs, in a format that it gets right, and as long as it is to be; a tokenizer where text is served."""
    config = folder / files.path / "config.json"
    try:
        found: dict[str, Any] = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ModelProblem(f"{config} cannot be read; expected a model folder", "path") from None
    try:
        check_format(found, files.dtype, files.kv_cache_dtype, files.quantization)
    except ValueError as problem:
        raise ModelProblem(str(problem)) from None
    for what, patterns in (("weights", _WEIGHTS), *([("tokenizer", _TOKENIZERS)] if tokenizer else [])):
        if not any(next(config.parent.glob(pattern), None) for pattern in patterns):
            raise ModelProblem(f"{config.parent} has no {what}; expected one of {', '.join(patterns)}", "path")
    parsers = parser_names()
    if files.tool_parser is not None and parsers and files.tool_parser not in parsers:
        raise ModelProblem(f"unknown parser; {nearest(files.tool_parser, parsers)}", "tool_parser")
    longest = longest_context(found)
    if longest is not None and files.max_model_len > longest:
        said = f"{files.max_model_len} is more than the {longest} tokens that {config} allows"
        raise ModelProblem(said, "max_model_len")
    return found


def _check_engines(file: RuntimeFile) -> None:
    """What vLLM or the warm-up would find out when engines start."""
    section, tokens = file.section, file.experiment.setup.engine.block_tokens
    if file.experiment.setup.engine.kv_offloading is not None:
        raise file.document.error(("engine", "kv_offloading"), "simulated only; real engines keep no KV in host memory")
    for index, model in enumerate(file.experiment.setup.models):
        if model.spec.speculation is not None:
            raise file.document.error(
                ("models", index, "speculative"), "simulated only; real engines have no draft models"
            )
        if model.entry.ranks > 1:
            raise file.document.error(("models", index, "dp"), "simulated only; real engines step apart; leave it out")
    if section.backend == "cpu" and tokens % _CPU_BLOCK_TOKENS:
        said = f"{tokens}: vLLM's CPU backend takes multiples of {_CPU_BLOCK_TOKENS} tokens"
        raise file.document.error(("engine", "block_tokens"), said)
    if section.step_times is not None:
        try:
            measured = read_table(file.folder / section.step_times)
        except ValueError as problem:
            raise file.error("step_times", str(problem)) from None
        for name in measured:
            if name not in section.models:
                raise file.error("step_times", f"unknown model {name}; {nearest(name, section.models)}")


def _check_system(file: RuntimeFile, name: str) -> None:
    """Raises ConfigError for a system of the file (not the built-in ones) that real engines cannot play."""
    own = [item if isinstance(item, str) else item.name for item in file.experiment.file.systems]
    if name not in own:
        return
    system = file.experiment.setup.systems[name]
    place = ("systems", own.index(name))
    for axis in ("scaling", "roles"):
        if getattr(system, axis) is not None:
            raise file.document.error(place, f"{name}: real engines have no {axis} axis yet (docs/runtime.md)")
    if (said := _pipelines_problem(file, system)) is not None:
        raise file.document.error(place, f"{name}: {said}")
    if (
        said := _memory_problem(file, system) or _copies_problem(file, system) or _drops_problem(file, system)
    ) is not None:
        raise file.document.error(place, f"{name}: {said}")
    if system.drop is not None and not file.section.weights_in_region:
        problem = f"{name} drops layers: set it to true, so that their memory becomes KV"
        raise file.error("weights_in_region", problem)
    if system.scheduler.policy == "clairvoyant":
        raise file.document.error(place, f"{name}: a bound, not a scheduler; real engines do not know what comes")
    if system.residency is not None and any(model.entry.tp != 1 for model in file.experiment.setup.models):
        raise file.document.error(
            place, f"{name} moves models, which real engines do with models on one device (tp: 1)"
        )
    if system.residency is not None and not file.section.weights_in_region:
        problem = f"{name} evicts models: set it to true, so that evicted weights leave their memory to KV"
        raise file.error("weights_in_region", problem)
