"""Whether the pieces of a file fit together. Each check raises ConfigError at the line that is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from fineserve_sim.cluster.compose.place import why_no_ranks
from fineserve_sim.cluster.scenario import wrong_fault
from fineserve_sim.experiment.file import schema
from fineserve_sim.experiment.file.axes import check_sweep
from fineserve_sim.experiment.file.degrees import least_degree
from fineserve_sim.experiment.file.document import Document, KeyPath
from fineserve_sim.experiment.file.errors import nearest
from fineserve_sim.experiment.file.hardware_checks import check_hardware, check_pins
from fineserve_sim.experiment.file.output_checks import check_claim, check_figure
from fineserve_sim.experiment.file.resolve import Setup
from fineserve_sim.systems import Sharing, SystemSpec
from fineserve_sim.systems.spec import ClairvoyantSpec, FcfsSpec, KvprPlacementSpec, PrivatePoolsSpec

LOADS = ("share", "rate_per_s", "phases", "clients")
"""What may say how many requests a model gets."""


def check(document: Document, file: schema.ExperimentFile, setup: Setup) -> None:
    """All checks, in the order of the file."""
    check_hardware(document, setup)
    check_pins(document, file, setup)
    _check_systems(document, file, setup)
    _check_offloading(document, file, setup)
    _check_ranks(document, file, setup)
    _unique(document, "models", [model.id for model in file.models])
    _unique(document, "sweeps", [sweep.name for sweep in file.sweeps])
    _unique(document, "claims", [claim.id for claim in file.claims])
    _unique(document, "figures", [figure.name for figure in file.figures])
    _check_workload(document, file)
    _check_loads(document, file)
    _check_clients(document, file, setup)
    _check_lengths(document, file, setup)
    _check_slo(document, file, setup)
    _check_faults(document, file, setup)
    for index, sweep in enumerate(file.sweeps):
        check_sweep(document, ("sweeps", index), sweep, setup)
    for index, figure in enumerate(file.figures):
        check_figure(document, ("figures", index), figure, file, setup)
    for index, claim in enumerate(file.claims):
        check_claim(document, ("claims", index), claim, file, setup)


def _check_systems(document: Document, file: schema.ExperimentFile, setup: Setup) -> None:
    """Check that each system can serve the models of the file, and that shares of SMs name these models."""
    ids = [model.id for model in file.models]
    _check_shares(document, ("cluster", "sharing"), [gpu.sharing for gpu in setup.gpus], ids)
    for index, item in enumerate(file.systems):
        system = setup.systems[item if isinstance(item, str) else item.name]
        if system.dispatch is not None and system.roles is None and len(ids) > 1:
            raise document.error(("systems", index), f"{system.name} serves one model; models has {len(ids)}")
        _check_shares(document, ("systems", index, "sharing"), [system.sharing], ids)


def _check_shares(document: Document, path: KeyPath, sharings: Sequence[Sharing | None], ids: Sequence[str]) -> None:
    for sharing in sharings:
        for name in sharing.percent if sharing is not None and isinstance(sharing.percent, dict) else ():
            if name not in ids:
                raise document.error(path, f'unknown model "{name}"; {nearest(name, ids)}')


def _check_offloading(document: Document, file: schema.ExperimentFile, setup: Setup) -> None:
    """Some system keeps prefixes on its GPUs, for a cache in host memory is below that, and engines are vLLM's."""
    path: KeyPath = ("engine", "kv_offloading")
    if file.engine.kv_offloading is None:
        return
    if file.engine.batching != "vllm":
        raise document.error(path, f"is vLLM's; leave it out with batching {file.engine.batching}")
    named = [setup.systems[item if isinstance(item, str) else item.name] for item in file.systems]
    if not any(isinstance(system.memory, PrivatePoolsSpec) and system.memory.prefix_cache for system in named):
        problem = "no system keeps prefixes on its GPUs; give one memory: {policy: private, prefix_cache: true}"
        raise document.error(path, problem)


def _check_ranks(document: Document, file: schema.ExperimentFile, setup: Setup) -> None:
    """Every system of the file can have the data-parallel ranks of its models."""
    for index, model in enumerate(file.models):
        for item in file.systems if model.ranks > 1 else ():
            system = setup.systems[item if isinstance(item, str) else item.name]
            if problem := why_no_ranks(system, setup.engine):
                raise document.error(("models", index, "dp"), problem)


def _check_faults(document: Document, file: schema.ExperimentFile, setup: Setup) -> None:
    """What fails is there, in each system; which instances serve, the simulation knows."""
    for item in file.systems:
        system = setup.systems[item if isinstance(item, str) else item.name]
        instances = len(setup.gpus) // least_degree(setup, setup.models[0])
        if wrong := wrong_fault(setup.faults, system, instances, len(setup.gpus)):
            raise document.error(("faults", wrong[0]), wrong[1])


def _unique(document: Document, part: str, names: list[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise document.error((part, index), f'"{name}" is here a second time; give it another name')


def _check_workload(document: Document, file: schema.ExperimentFile) -> None:
    """Requests come from a trace, from phases, or from a length source and a number of requests."""
    work, path = file.workload, ("workload",)
    phases = any(model.phases for model in file.models)
    many = isinstance(work.arrivals, schema.ManyModels)
    if work.trace is not None:
        for key in ("lengths", "data_dir"):
            if getattr(work, key) is not None:
                raise document.error((*path, key), "not with a trace, which has its own lengths")
        if work.conversations is not None:
            raise document.error((*path, "conversations"), "not with a trace, which has its own prompts")
        if not isinstance(work.arrivals, schema.Replay | None):
            raise document.error((*path, "arrivals"), "not with a trace, which is replayed; leave it out")
        return
    if work.lengths is None:
        raise document.error((*path, "lengths"), "missing; give lengths, or a trace")
    if isinstance(work.arrivals, schema.Replay):
        raise document.error((*path, "arrivals"), "replay needs workload.trace")
    if work.assign is not None:
        raise document.error((*path, "assign"), "only with a trace")
    if work.data_dir is not None and not isinstance(work.lengths, str):
        raise document.error((*path, "data_dir"), "only with a named length source")
    if many and work.requests is not None:
        raise document.error((*path, "requests"), "not with these arrivals, whose duration sets the number of requests")
    if phases:
        _check_phased(document, file)
    elif not many and work.requests is None:
        raise document.error((*path, "requests"), "missing; say how many requests a run measures")


def _check_phased(document: Document, file: schema.ExperimentFile) -> None:
    if file.workload.requests is not None or file.workload.warmup_requests:
        raise document.error(
            ("workload", "requests"), "not with phases, whose durations and rates set the number of requests"
        )
    if not isinstance(file.workload.arrivals, schema.Poisson | None):
        raise document.error(
            ("workload", "arrivals"), "phases are Poisson arrivals with a rate for each stretch of time"
        )


def _check_clients(document: Document, file: schema.ExperimentFile, setup: Setup) -> None:
    """Where one model has clients, all have, and nothing else says when requests come."""
    work, waiting = file.workload, [model.clients is not None for model in file.models]
    for index, model in enumerate(file.models):
        if model.think_s is not None and model.clients is None:
            raise document.error(("models", index, "think_s"), "only with clients")
    if not any(waiting):
        return
    if not all(waiting):
        index = waiting.index(False)
        raise document.error(
            ("models", index), f"model {file.models[index].id} has no clients; all models have, or none"
        )
    for key in ("arrivals", "conversations"):
        if getattr(work, key) is not None:
            raise document.error(("workload", key), "not with clients, which send when they have their answers")
    for index, item in enumerate(file.systems):
        system = setup.systems[item if isinstance(item, str) else item.name]
        if isinstance(system.scheduler, ClairvoyantSpec):
            problem = f"{system.name} needs to know all arrivals, which clients make as they are answered"
            raise document.error(("systems", index), problem)


def _check_loads(document: Document, file: schema.ExperimentFile) -> None:
    """Every model has exactly one kind of load, and a load is given where models share one."""
    replayed = file.workload.trace is not None
    by_share = file.workload.assign == "share"
    many = isinstance(file.workload.arrivals, schema.ManyModels)
    for index, model in enumerate(file.models):
        given = [key for key in LOADS if getattr(model, key) is not None]
        allowed = (["share"] if by_share else []) if replayed or many else [*LOADS]
        if replayed and not by_share and given == ["clients"]:
            continue  # the requests of the trace, at the pace of their answers
        for key in given:
            if key not in allowed:
                problem = (
                    "not with a trace, whose arrivals say it all"
                    if replayed
                    else "not with arrivals of many models, whose order in the file sets their rates"
                )
                raise document.error(("models", index, key), problem)
        if allowed and len(given) != 1:
            problem = f"needs exactly one of {', '.join(allowed)}; it has {' and '.join(given) or 'none'}"
            raise document.error(("models", index), f"model {model.id} {problem}")
    shares = any(model.share is not None for model in file.models)
    if shares and not file.loads and not replayed:
        raise document.error(
            (), "missing loads: models with a share need at least one, such as loads: {A: {rate_per_s: 1}}"
        )
    if file.loads and not shares and not replayed:
        raise document.error(("loads",), "no model has a share of these loads")


def _check_lengths(document: Document, file: schema.ExperimentFile, setup: Setup) -> None:
    lengths = file.workload.lengths
    if not isinstance(lengths, schema.FixedLengths):
        return
    for model in setup.models:
        tokens, most = lengths.prompt_tokens + lengths.output_tokens, model.spec.max_context_tokens
        if tokens > most:
            raise document.error(
                ("workload", "lengths"),
                f"{tokens} tokens a request; model {model.id} ({model.spec.name}) takes at most {most}",
            )


def _check_slo(document: Document, file: schema.ExperimentFile, setup: Setup) -> None:
    slo = file.slo
    own = all(model.ttft_slo_s is not None for model in file.models)
    if slo.ttft_s is not None and slo.ttft is not None:
        raise document.error(("slo",), "ttft_s and ttft are both given; choose one")
    if slo.ttft_s is None and slo.ttft is None and not own:
        raise document.error(("slo",), "needs ttft_s, or ttft with a reference, or a ttft_slo_s for every model")
    if slo.tpot_s is not None and slo.tpot is not None:
        raise document.error(("slo",), "tpot_s and tpot are both given; choose one")
    for key, limit in (("ttft", slo.ttft), ("tpot", slo.tpot)):
        if limit is not None:
            _check_reference(document, ("slo", key, "reference", "system"), limit.reference.system, setup)


def _check_reference(document: Document, path: KeyPath, systems: list[str], setup: Setup) -> None:
    for name in systems:
        if name not in setup.systems:
            raise document.error(path, f'unknown system "{name}"; {nearest(name, setup.systems)}')
        if not _slo_free(setup.systems[name]):
            raise document.error(
                path, f"{name} itself decides by SLOs; a reference needs the fcfs scheduler, not kvpr placement"
            )


def _slo_free(system: SystemSpec) -> bool:
    """Whether the system runs meaningfully before any SLO is known."""
    return isinstance(system.scheduler, FcfsSpec) and not isinstance(system.placement, KvprPlacementSpec)
