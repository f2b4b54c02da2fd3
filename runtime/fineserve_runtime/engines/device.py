"""One device, or several that engines with ranks tie together: regions, engines, and what can be read of both.

A host (host.py) knows its device by this protocol alone: engines are sent commands and answer with messages, and figures
can be looked up at any time. `LocalDevice` is a device of this machine; ray_device.py has one behind a Ray actor.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fineserve_runtime.engines.api import EngineConfig, EngineStats, HostConfig, TinyModel
from fineserve_runtime.engines.figures import TableFigures
from fineserve_runtime.engines.links import Link, ProcessLink, Receive, ThreadLink
from fineserve_runtime.engines.loop import Build, Died, EngineCommand, Message
from fineserve_runtime.engines.model_files import eos_token_ids, kv_geometry, read_config
from fineserve_runtime.engines.pages import check_pages, pages_of
from fineserve_runtime.engines.process import BuildCore, build_slab_core, main
from fineserve_runtime.engines.ranks import end_rank
from fineserve_runtime.engines.region import CpuRegion, Region, RegionLock, RegionPaths
from fineserve_runtime.engines.settings import SlabSettings
from fineserve_runtime.engines.table import MAX_ENGINES, SlabTable, lock_holder
from fineserve_runtime.engines.vllm_engine import prepare_environment
from fineserve_sim.policy.interfaces import KVLedger
from fineserve_sim.policy.memory.geometry import KVGeometry, SlabPlan, plan_slabs

_LOG = logging.getLogger("fineserve.engines")


class EngineFacts(NamedTuple):
    """What never changes of an engine. ``model_dir`` is a folder of the device's machine; ``gpus`` are the devices of its
    ranks."""

    model_dir: Path
    eos_token_ids: tuple[int, ...]
    block_bytes: int
    gpus: tuple[int, ...]


class DeviceFacts(NamedTuple):
    """What never changes of a device. ``engines`` of the start; ``table_path``: the owner table, by which its machine can
    watch the region."""

    engines: tuple[EngineFacts, ...]
    slab_plan: SlabPlan
    table_path: Path
    found_stale_region: bool


class Device(Protocol):
    """Messages of engines go to the ``receive`` that the device was built with, in order for each engine."""

    @property
    def facts(self) -> DeviceFacts: ...

    def start(self, engines: Sequence[int]) -> None:
        """Begin to start these; each answers `Ready`, or `Died`."""
        ...

    @property
    def sound(self) -> bool:
        """As `api.EngineHost` says."""
        ...

    def clear(self, engine: int) -> tuple[int, ...]:
        """Sweep away a dead engine. Returns the engines to start in its place, which are all of the device when it is the
        device that died. Raises RuntimeError when it cannot be started again."""
        ...

    def add(self, engine: EngineConfig) -> tuple[int, EngineFacts]:
        """Take in one more engine, and begin with nothing. Raises ValueError for one that does not fit in here."""
        ...

    def forget(self, engine: int) -> None:
        """Nothing is left of a dead engine; its number may be given to another."""
        ...

    def holds_up(self, engine: int) -> bool: ...

    def end_hung(self, engines: Sequence[int], reason: str) -> None:
        """End one of these engines, which hang, as `api.EngineHost` says. An engine that goes answers `Died`."""
        ...

    def send(self, command: EngineCommand) -> None:
        """Does not block; a command to a dead engine is dropped."""
        ...

    def stats(self, engine: int, gpu: int | None = None) -> EngineStats:
        """The figures of its rank on ``gpu``, by default the first."""
        ...

    def free_kv_tokens(self, engine: int) -> int: ...

    def kv_capacity_tokens(self, engine: int) -> int: ...

    def ledger(self, gpu: int | None = None) -> KVLedger:
        """The bytes of the region on ``gpu``, by default the first."""
        ...

    def quit(self) -> None:
        """Before ``close``, from any thread: calls that wait for long raise RuntimeError."""
        ...

    def close(self) -> None: ...


OpenDevice = Callable[[HostConfig, Receive], Device]

SPARE_ENGINES = 16
"""So many engines may be there at a time beside the engines of the start."""


class _Engine(NamedTuple):
    """``tensors``: the slabs of its pages, where its memory is mapped page by page."""

    config: EngineConfig
    facts: EngineFacts
    tensors: int


class LocalDevice:
    """A device of this machine. Its engines are stepped in a thread of this process, or in a process each.

    Raises ValueError for a configuration that cannot work, RegionError when another host uses the region.
    """

    def __init__(self, config: HostConfig, receive: Receive, *, build: BuildCore = build_slab_core) -> None:
        if config.device == "cuda" and config.mode == "in_process":
            raise ValueError("engines on a GPU need mode 'processes': vLLM's GPU backend keeps one engine a process")
        prepare_environment()
        self._config = config
        self._deliver = receive
        self._build = build
        self._links: dict[int, Link] = {}
        engines = tuple(_engine_facts(engine, config) for engine in config.engines)
        plan = _slab_plan(config, engines)
        for engine, facts in zip(config.engines, engines, strict=True):
            _check_fits(config, plan.slab_bytes, engine, facts)
        self._memory = _create_memory(config, plan)
        first = self._memory[config.gpus[0]]
        self._shape = first.table.header
        stale = any(memory.lock.stale for memory in self._memory.values())
        self.facts = DeviceFacts(engines, plan, first.paths.table, stale)
        self._engines: dict[int, _Engine] = {}  # a new one when it changes: other threads read it
        self._figures: dict[int, TableFigures] = {}  # of those that were removed, too: others may be about to look
        for number, (engine, facts) in enumerate(zip(config.engines, engines, strict=True)):
            self._take_in(number, engine, facts)
        self._thread: ThreadLink | None = None
        self._hung = False
        self._closed = False

    def start(self, engines: Sequence[int]) -> None:
        if self._config.mode == "in_process":
            self._start_in_thread(engines)
            return
        for number in engines:
            process = ProcessLink(number, main, (self._build, *self._arguments(number)), self._receive)
            self._attach(number, process, process.process.pid or 0)

    def _start_in_thread(self, engines: Sequence[int]) -> None:
        """All in one thread: a new one, or, for an engine that died or was added, that of the others."""
        builds = {number: partial(self._build, *self._arguments(number)) for number in engines}
        if self._thread is None:
            self._thread = ThreadLink(builds, self._receive)
            builds = {}
        for number in engines:
            self._attach(number, self._thread, os.getpid())
        for number, build in builds.items():
            self._thread.send(Build(number, build))

    def add(self, engine: EngineConfig) -> tuple[int, EngineFacts]:
        header = self._shape
        facts = _engine_facts(engine, self._config)
        _check_fits(self._config, header.slab_bytes, engine, facts)
        number = next((each for each in range(header.engines) if each not in self._engines), None)
        if number is None:
            raise ValueError(f"{engine.name}: {header.engines} engines are as many as this device was started for")
        self._take_in(number, engine, facts)
        return number, facts

    def forget(self, engine: int) -> None:
        link = self._links.pop(engine, None)
        if isinstance(link, ProcessLink):
            link.close()
        self._engines = {number: each for number, each in self._engines.items() if number != engine}

    @property
    def sound(self) -> bool:
        stepped_here = self._config.mode == "in_process" and not self._closed
        return not self._hung and not (stepped_here and any(not link.lives for link in self._links.values()))

    def clear(self, engine: int) -> tuple[int, ...]:
        if not self.sound:
            raise RuntimeError("the thread of its engines hangs or is gone: restart the server")
        if self._config.mode == "processes":
            self._links[engine].close()
        return (engine,)

    def holds_up(self, engine: int) -> bool:
        return self._config.mode == "processes" and any(each.locked_by(engine) for each in self._memory_of(engine))

    def end_hung(self, engines: Sequence[int], reason: str) -> None:
        """The engine that holds a table's lock goes first: others may wait for it. A thread cannot be killed, so its engines
        count as dead, and keep their slabs: it may wake up and write."""
        holds = [engine for engine in engines if self.holds_up(engine)]
        link = self._links[(holds or list(engines))[0]]
        if isinstance(link, ProcessLink):
            link.kill()
            return
        self._hung = True
        for number in self._links:
            self._deliver(Died(number, reason))

    def send(self, command: EngineCommand) -> None:
        self._links[command.engine].send(command)

    def stats(self, engine: int, gpu: int | None = None) -> EngineStats:
        return self._figures[engine].stats(gpu)

    def free_kv_tokens(self, engine: int) -> int:
        return self._figures[engine].free_kv_tokens()

    def kv_capacity_tokens(self, engine: int) -> int:
        return self._figures[engine].kv_capacity_tokens()

    def ledger(self, gpu: int | None = None) -> KVLedger:
        gpu = self._config.gpus[0] if gpu is None else gpu
        header = self._shape
        total = self._config.region_bytes
        here = [self._figures[number] for number, each in self._engines.items() if gpu in each.facts.gpus]
        stats = [figures.stats(gpu) for figures in here]
        stranded = sum(each.stranded_bytes for each in stats)
        spare = sum(each.spare_bytes for each in stats)
        free = self._memory[gpu].table.free_slabs() * header.slab_bytes + spare
        lost = total - (header.slab_count - header.reserved_slabs) * header.slab_bytes
        return KVLedger(total, total - stranded - free - lost, stranded, free, lost)

    def quit(self) -> None:
        """No call waits for long."""

    def close(self) -> None:
        """Stop every engine and remove the regions. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for link in set(self._links.values()):
            link.close()
        for number in self._engines:
            self._end_ranks(number)
        for memory in self._memory.values():
            memory.close()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _take_in(self, number: int, engine: EngineConfig, facts: EngineFacts) -> None:
        tables = {gpu: self._memory[gpu].table for gpu in facts.gpus}
        tensors = _tensors(self._config, engine, facts)
        self._figures[number] = TableFigures(tables, number, engine, facts.block_bytes, tensors)
        self._engines = self._engines | {number: _Engine(engine, facts, tensors)}

    def _arguments(self, number: int) -> tuple[Any, ...]:
        """What ``build`` takes."""
        engine, facts, tensors = self._engines[number]
        region_bytes = self._shape.slab_count * self._shape.slab_bytes
        settings = self._settings(number)
        kv_bytes = region_bytes
        if settings.paging is not None:
            kv_bytes = pages_of(self._shape, tensors) * tensors * self._shape.slab_bytes
        return (engine, facts.model_dir, settings, kv_bytes, facts.eos_token_ids)

    def _settings(self, number: int) -> SlabSettings:
        config = self._config
        limit = self._engines[number].config.kv_limit_bytes
        ranks = [(str(memory.paths.table), str(memory.paths.bytes_file)) for memory in self._memory_of(number)]
        return SlabSettings(
            table=ranks[0][0],
            region=ranks[0][1],
            device=config.device,
            engine=number,
            block_bytes=self._engines[number].facts.block_bytes,
            limit_slabs=None if limit is None else limit // self._shape.slab_bytes,
            poison_freed=config.poison_freed,
            weights_in_region=config.weights_in_region,
            peers=tuple(ranks[1:]),
            swaps=self._engines[number].config.swaps,
            keeps=self._engines[number].config.keeps,
            borrows=self._engines[number].config.borrows,
            lookahead=self._engines[number].config.lookahead,
            paging=config.paging,
            tensors=self._engines[number].tensors,
            contiguous=config.contiguous,
        )

    def _memory_of(self, number: int) -> list[_Memory]:
        """The memory of each device of the engine's ranks, in their order."""
        return [self._memory[gpu] for gpu in self._engines[number].facts.gpus]

    def _attach(self, number: int, link: Link, pid: int) -> None:
        for memory in self._memory_of(number):
            memory.table.counters[number].set("pid", pid)
        self._links[number] = link

    def _receive(self, message: Message) -> None:
        """A dead engine's slabs are free before its death is told, unless a rank of it may still write into them. Ranks that
        read its weights end before."""
        if isinstance(message, Died):
            for borrower in self._borrowers(message.engine):
                self._end_ranks(borrower)
        if isinstance(message, Died) and self._end_ranks(message.engine):
            for memory in self._memory_of(message.engine):
                with memory.table.lock():
                    memory.table.reclaim(message.engine)
        self._deliver(message)

    def _borrowers(self, number: int) -> list[int]:
        """The engines that may have borrowed this one's weights."""
        lender = self._engines[number]
        if lender.config.keeps is None:
            return []
        return [
            other
            for other, each in self._engines.items()
            if each.config.borrows and each.config.name == lender.config.name
        ]

    def _end_ranks(self, number: int) -> bool:
        """Kill the ranks of an engine. False when one is still there; the log has a line then."""
        ended = True
        for memory in self._memory_of(number):
            row = memory.table.counters[number]
            pid = row.get("rank_pid")
            if pid and not end_rank(pid, row.get("pid")):
                ended = False
                _LOG.error(
                    "engine %s: rank process %d was killed and does not end; its memory stays taken",
                    self._engines[number].config.name,
                    pid,
                )
        return ended


class _Memory(NamedTuple):
    """The region of one device."""

    paths: RegionPaths
    lock: RegionLock
    region: Region
    table: SlabTable

    def locked_by(self, engine: int) -> bool:
        holder = lock_holder(self.paths.table)
        row = self.table.counters[engine]
        return holder is not None and holder in (row.get("pid"), row.get("rank_pid"))

    def close(self) -> None:
        self.table.close()
        self.region.close()
        self.lock.release()


def model_folder(engine: EngineConfig, cache_dir: Path) -> Path:
    """The model's folder; a tiny model is made there first."""
    if isinstance(engine.model, TinyModel):
        from fineserve_runtime.engines.tiny_model import tiny_model

        return tiny_model(engine.model, cache_dir)
    return engine.model


def _engine_facts(engine: EngineConfig, host: HostConfig) -> EngineFacts:
    gpus = host.gpus_of(engine)
    if len(gpus) > 1 and (host.mode == "in_process" or host.device == "cuda"):
        raise ValueError(
            f"{engine.name}: engines of several devices need mode 'processes', and are served on CPUs alone"
        )
    if host.paging is not None and (len(gpus) > 1 or host.device == "cuda"):
        raise ValueError(f"{engine.name}: KV memory is mapped page by page for engines on one CPU alone")
    folder = model_folder(engine, host.cache_dir)
    return EngineFacts(folder, eos_token_ids(folder, read_config(folder)), _geometry(engine, folder).block_bytes, gpus)


def _geometry(engine: EngineConfig, folder: Path) -> KVGeometry:
    return kv_geometry(read_config(folder), engine)


def _slab_plan(config: HostConfig, engines: Sequence[EngineFacts]) -> SlabPlan:
    """Slabs that hold the blocks of all engines, or whole sequences of them; or the physical pages."""
    if config.paging is not None:
        return SlabPlan(config.paging.slab_bytes, (config.paging.slab_bytes,))
    if not config.contiguous:
        return plan_slabs([facts.block_bytes for facts in engines], multiple=config.slab_multiple)
    longest = zip(map(_longest_blocks, config.engines), engines, strict=True)
    return plan_slabs([blocks * facts.block_bytes for blocks, facts in longest], multiple=config.slab_multiple)


def _longest_blocks(engine: EngineConfig) -> int:
    """Blocks of the longest sequence."""
    return -(-engine.max_model_len // engine.block_tokens)


def _tensors(config: HostConfig, engine: EngineConfig, facts: EngineFacts) -> int:
    """The slabs that the engine takes at a time: of a page one for K and V of each layer."""
    return 1 if config.paging is None else 2 * _geometry(engine, facts.model_dir).layers


def _check_fits(config: HostConfig, slab_bytes: int, engine: EngineConfig, facts: EngineFacts) -> None:
    """Raises ValueError for an engine whose blocks do not fit into the slabs, or pages, of the device."""
    block_bytes, tensors = facts.block_bytes, _tensors(config, engine, facts)
    sequence_bytes = _longest_blocks(engine) * block_bytes
    if config.contiguous and slab_bytes % sequence_bytes:
        raise ValueError(
            f"{engine.name}: {sequence_bytes} bytes for a whole sequence do not divide slabs of {slab_bytes}; give the "
            "models of a device one max_model_len, or a device each"
        )
    unit_bytes = tensors * slab_bytes
    if unit_bytes % block_bytes and unit_bytes < 2 * block_bytes:
        what, larger = ("slabs", "slab_multiple") if config.paging is None else (f"{tensors} pages", "page_bytes")
        raise ValueError(
            f"{engine.name}: its KV blocks of {block_bytes} bytes do not fit in {what} of {slab_bytes}; "
            f"a larger memory.{larger} of the system makes larger ones"
        )


def _create_memory(config: HostConfig, plan: SlabPlan) -> dict[int, _Memory]:
    """A region for each device, all of one shape. Nothing is left behind where one of them cannot be."""
    with ExitStack() as undo:
        memory = {}
        for gpu in config.gpus:
            paths = RegionPaths(config.region_dir, f"{config.region_name}{gpu}")
            lock = RegionLock(paths)
            undo.callback(lock.release)
            memory[gpu] = _Memory(paths, lock, *_create_region(config, paths, plan))
        undo.pop_all()
    return memory


def _create_region(config: HostConfig, paths: RegionPaths, plan: SlabPlan) -> tuple[Region, SlabTable]:
    slab_count = config.region_bytes // plan.slab_bytes
    reserved = 1
    if config.paging is not None:
        reserved = 0  # null blocks lie in page 0 of each engine, which is no slab
        check_pages(slab_count)
    elif config.contiguous and config.device == "cpu":
        slab_count += 1  # null blocks need no room for a sequence; of a file, what is never written is not there
    region_bytes = slab_count * plan.slab_bytes
    if config.device == "cpu":
        _check_space(config.region_dir, region_bytes * len(config.gpus))
    engines = min(MAX_ENGINES, len(config.engines) + SPARE_ENGINES)
    table = SlabTable.create(paths.table, slab_count, plan.slab_bytes, engines, reserved)
    if config.device == "cuda":
        from fineserve_runtime.engines.torch_region import CudaRegion

        return CudaRegion.create(paths.bytes_file, region_bytes), table
    return CpuRegion.create(paths.bytes_file, region_bytes), table


def _check_space(folder: Path, size_bytes: int) -> None:
    """Pages of a shared file are taken when first written, and a process that finds none left is killed: look before."""
    there = os.statvfs(folder)
    if there.f_bavail * there.f_frsize < size_bytes:
        raise ValueError(
            f"region_bytes is {size_bytes}, but {folder} has room for {there.f_bavail * there.f_frsize}; "
            "lower it, or enlarge the shared memory there"
        )
