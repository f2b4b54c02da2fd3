"""Builds a device's region and its engines, and passes messages between them and the listener."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fineserve_runtime.engines.api import EngineConfig, EngineHandle, EngineListener, HostConfig, TinyModel
from fineserve_runtime.engines.handle import Handle
from fineserve_runtime.engines.links import Link, ProcessLink, ThreadLink
from fineserve_runtime.engines.loop import Message, Ready, Reply, Stepped
from fineserve_runtime.engines.model_files import eos_token_ids, kv_geometry, read_config
from fineserve_runtime.engines.process import build_slab_core, main
from fineserve_runtime.engines.region import CpuRegion, Region, RegionLock, RegionPaths
from fineserve_runtime.engines.settings import SlabSettings
from fineserve_runtime.engines.table import SlabTable
from fineserve_runtime.engines.vllm_engine import prepare_environment
from fineserve_sim.policy.geometry import SlabPlan, plan_slabs
from fineserve_sim.policy.interfaces import KVLedger

START_TIMEOUT_S = 300.0


def start_host(config: HostConfig, listener: EngineListener) -> Host:
    """Build everything and wait until each engine is ready.

    Raises ValueError for a configuration that cannot work, RegionError when another host uses the region, RuntimeError when
    an engine does not start. Nothing is left behind then.
    """
    if config.device == "cuda" and config.mode == "in_process":
        raise ValueError("engines on a GPU need mode 'processes': vLLM's GPU backend keeps one engine a process")
    host = Host(config, listener)
    try:
        host.start()
    except BaseException:
        host.close()
        raise
    return host


class Host:
    """An `api.EngineHost`."""

    def __init__(self, config: HostConfig, listener: EngineListener) -> None:
        prepare_environment()
        self.config = config
        self._listener = listener
        folders = [model_folder(engine, config.cache_dir) for engine in config.engines]
        geometries = [
            kv_geometry(read_config(folder), engine) for folder, engine in zip(folders, config.engines, strict=True)
        ]
        self._plan = plan_slabs([geometry.block_bytes for geometry in geometries], multiple=config.slab_multiple)
        self._paths = RegionPaths(config.region_dir, config.region_name)
        self._closed = False
        self._links: dict[int, Link] = {}
        self._lock = RegionLock(self._paths)
        self.found_stale_region = self._lock.stale
        try:
            self._region, self._table = _create_region(config, self._paths, self._plan)
        except BaseException:
            self._lock.release()
            raise
        self._handles = {
            number: Handle(
                number, engine, folder, eos_token_ids(folder, read_config(folder)), geometry.block_bytes, self._table
            )
            for number, (engine, folder, geometry) in enumerate(zip(config.engines, folders, geometries, strict=True))
        }

    @property
    def engines(self) -> dict[int, EngineHandle]:
        return dict(self._handles)

    @property
    def slab_plan(self) -> SlabPlan:
        return self._plan

    @property
    def table_path(self) -> Path:
        """The owner table: anybody on the machine can watch the region there (table.py)."""
        return self._paths.table

    def start(self) -> None:
        self._check_capacity()  # saves the time to load what cannot work
        if self.config.mode == "in_process":
            build = {number: self._builder(number) for number in self._handles}
            link = ThreadLink(build, self._receive)
            for number in self._handles:
                self._attach(number, link, os.getpid())
        else:
            for number in self._handles:  # all processes start at the same time
                self._start_process(number)
        for handle in self._handles.values():
            self._await_ready(handle)
        self._check_capacity()

    def ledger(self) -> KVLedger:
        header = self._table.header
        total = self.config.region_bytes
        stranded = sum(handle.stats().stranded_bytes for handle in self._handles.values())
        free = self._table.free_slabs() * header.slab_bytes
        lost = total - (header.slab_count - header.reserved_slabs) * header.slab_bytes
        return KVLedger(total, total - stranded - free - lost, stranded, free, lost)

    def restart(self, engine: int) -> None:
        old = self._handles[engine]
        if self.config.mode != "processes" or old.alive:
            raise RuntimeError(f"{old.config.name} cannot be restarted: only a dead engine in its own process can")
        self._links[engine].close()
        old.revive()
        self._start_process(engine)
        self._await_ready(old)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for link in set(self._links.values()):
            link.close()
        self._table.close()
        self._region.close()
        self._lock.release()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _settings(self, number: int) -> SlabSettings:
        config, handle = self.config, self._handles[number]
        limit = handle.config.kv_limit_bytes
        return SlabSettings(
            table=str(self._paths.table),
            region=str(self._paths.bytes_file),
            device=config.device,
            engine=number,
            block_bytes=handle.block_bytes,
            limit_slabs=None if limit is None else limit // self._plan.slab_bytes,
            poison_freed=config.poison_freed,
            weights_in_region=config.weights_in_region,
        )

    def _arguments(self, number: int) -> tuple[Any, ...]:
        handle = self._handles[number]
        return (
            handle.config,
            handle.model_dir,
            self._settings(number),
            self._table.header.slab_count * self._plan.slab_bytes,
            handle.eos_token_ids,
        )

    def _builder(self, number: int) -> Callable[[], Any]:
        return partial(build_slab_core, *self._arguments(number))

    def _start_process(self, number: int) -> None:
        link = ProcessLink(number, main, self._arguments(number), self._receive)
        self._attach(number, link, link.process.pid or 0)

    def _attach(self, number: int, link: Link, pid: int) -> None:
        self._table.counters[number].set("pid", pid)
        self._links[number] = link
        self._handles[number].link = link

    def _await_ready(self, handle: Handle) -> None:
        if not handle.ready.wait(START_TIMEOUT_S):
            raise RuntimeError(f"{handle.config.name} was not ready after {START_TIMEOUT_S:.0f} s")
        if handle.death is not None:
            raise RuntimeError(f"{handle.config.name} did not start: {handle.death}")

    def _check_capacity(self) -> None:
        """Raise ValueError unless each engine could hold one sequence of full length, were it alone."""
        for handle in self._handles.values():
            if handle.kv_capacity_tokens < handle.config.max_model_len:
                raise ValueError(
                    f"{handle.config.name}: its KV memory holds {handle.kv_capacity_tokens} tokens, max_model_len is "
                    f"{handle.config.max_model_len}; enlarge region_bytes or its limit, or lower max_model_len"
                )

    def _receive(self, message: Message) -> None:
        if isinstance(message, Stepped):
            self._handles[message.report.engine].on_stepped(message)
            self._listener.on_step(message.report)
        elif isinstance(message, Ready):
            self._handles[message.engine].on_ready(message.state)
        elif isinstance(message, Reply):
            self._handles[message.engine].on_reply(message)
        else:
            self._on_died(message.engine, message.reason)

    def _on_died(self, number: int, reason: str) -> None:
        handle = self._handles[number]
        if not handle.alive:
            return
        was_ready = handle.ready.is_set()
        with self._table.lock():
            self._table.reclaim(number)
        lost = handle.on_died(reason)
        if was_ready:
            self._listener.on_died(number, reason, lost)


def model_folder(engine: EngineConfig, cache_dir: Path) -> Path:
    """The model's folder; a tiny model is made there first."""
    if isinstance(engine.model, TinyModel):
        from fineserve_runtime.engines.tiny_model import tiny_model

        return tiny_model(engine.model, cache_dir)
    return engine.model


def _create_region(config: HostConfig, paths: RegionPaths, plan: SlabPlan) -> tuple[Region, SlabTable]:
    slab_count = config.region_bytes // plan.slab_bytes
    region_bytes = slab_count * plan.slab_bytes
    if config.device == "cpu":
        _check_space(config.region_dir, region_bytes)
    table = SlabTable.create(paths.table, slab_count, plan.slab_bytes, len(config.engines))
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
            "lower it, or set region_dir to a larger shared-memory folder"
        )
