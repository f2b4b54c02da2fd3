"""Slabs of engines with ranks, without vLLM: the same on all of their devices, whoever is beside them there."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fineserve_runtime.engines import device, ranks
from fineserve_runtime.engines.api import EngineConfig, HostConfig, TinyModel
from fineserve_runtime.engines.lease import SlabLease
from fineserve_runtime.engines.loop import Died, Message
from fineserve_runtime.engines.model_files import kv_geometry
from fineserve_runtime.engines.ranks import RankRegions, RankTables, end_rank
from fineserve_runtime.engines.region import CpuRegion
from fineserve_runtime.engines.settings import SlabSettings
from fineserve_runtime.engines.table import SlabTable

SLAB_BYTES, BLOCK_BYTES, SLABS = 120, 40, 12
BOTH, LEFT, RIGHT = range(3)
DEVICES = {BOTH: ("left", "right"), LEFT: ("left",), RIGHT: ("right",)}


class Tied:
    """Two devices with an engine each, and one of both."""

    def __init__(self, folder: Path) -> None:
        self.tables = {}
        for name in ("left", "right"):
            self.tables[name] = SlabTable.create(folder / f"{name}.table", SLABS, SLAB_BYTES, 3)
            CpuRegion.create(folder / f"{name}.bytes", SLABS * SLAB_BYTES)
        self.regions = {name: CpuRegion(folder / f"{name}.bytes") for name in self.tables}
        self.leases = [self.lease(folder, engine) for engine in (BOTH, LEFT, RIGHT)]

    def lease(self, folder: Path, engine: int) -> SlabLease:
        files = [(str(folder / f"{name}.table"), str(folder / f"{name}.bytes")) for name in DEVICES[engine]]
        settings = SlabSettings(*files[0], "cpu", engine, BLOCK_BYTES, poison_freed=True, peers=tuple(files[1:]))
        regions = [self.regions[name] for name in DEVICES[engine]]
        return settings.open_lease(regions[0] if len(regions) == 1 else RankRegions(regions))

    def slabs(self, name: str, engine: int) -> set[int]:
        return {slab for slab in range(SLABS) if self.tables[name].owner_of(slab) == engine}


@pytest.mark.parametrize("seed", range(5))
def test_ranks_hold_the_same_slabs_and_nobody_elses(seed: int, tmp_path: Path) -> None:
    """``alloc`` grants what ``free_blocks`` promised, no slab of a device has two owners, and blocks with bytes of others on
    any device are named."""
    tied, rng = Tied(tmp_path), random.Random(seed)
    held: list[list[int]] = [[], [], []]
    granted = 0
    for _ in range(400):
        engine = rng.choice((BOTH, BOTH, LEFT, RIGHT))
        lease = tied.leases[engine]
        if held[engine] and rng.random() < 0.5:
            rng.shuffle(held[engine])
            count = rng.randrange(1, len(held[engine]) + 1)
            lease.free(held[engine][:count])
            del held[engine][:count]
        else:
            wanted = rng.randrange(1, 10)
            with lease.exclusive():
                promised = lease.free_blocks()
                ids = lease.alloc(wanted)
            assert (ids is not None) == (wanted <= promised)
            held[engine] += ids or []
            granted += bool(ids)
            _all_poison_is_named(tied, engine, ids or [], lease.take_stale())
        assert tied.slabs("left", BOTH) == tied.slabs("right", BOTH)
        assert not tied.slabs("left", RIGHT) and not tied.slabs("right", LEFT)
        lease.check()
    assert granted > 100
    for engine, blocks in enumerate(held):
        tied.leases[engine].free(blocks)
    assert [table.free_slabs() for table in tied.tables.values()] == [SLABS - 1] * 2


def _all_poison_is_named(tied: Tied, engine: int, ids: list[int], stale: list[int]) -> None:
    """A worker zeroes what is named; here, too."""
    for name in DEVICES[engine]:
        bytes_ = tied.regions[name].array.reshape(-1, BLOCK_BYTES)
        bytes_[stale] = 0
        assert not bytes_[ids].any()
        bytes_[ids] = 0  # as good as written by the engine


def test_who_starves_on_two_devices_waits_for_neither_for_ever(tmp_path: Path) -> None:
    tied = Tied(tmp_path)
    both, left, right = tied.leases
    with left.exclusive():
        left.starve()
    with both.exclusive():
        both.starve()
    with right.exclusive():
        right.starve()
    assert [lease.may_start() for lease in tied.leases] == [False, True, False]
    left.thrive()
    assert [lease.may_start() for lease in tied.leases] == [True, False, False]
    both.thrive()
    assert [lease.may_start() for lease in tied.leases] == [False, True, True]


def test_regions_of_two_shapes_are_refused(tmp_path: Path) -> None:
    tables = [SlabTable.create(tmp_path / str(slabs), slabs, SLAB_BYTES, 1) for slabs in (4, 5)]
    with pytest.raises(ValueError, match="ranks need regions of one shape"):
        RankTables(tables, (0, 1))


def test_a_stopped_rank_is_ended_too_and_neither_one_that_is_gone_nor_a_stranger() -> None:
    waits = [sys.executable, "-c", "input()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, start_new_session=True) as rank:
        end_rank(rank.pid, engine_pid=os.getpid() + 1)  # its number is another process's now
        assert rank.poll() is None
        os.kill(rank.pid, signal.SIGSTOP)
        end_rank(rank.pid, engine_pid=rank.pid)
        assert rank.wait(300) == -signal.SIGKILL
        end_rank(rank.pid, engine_pid=rank.pid)


def test_a_rank_that_does_not_end_is_not_waited_for_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that a driver holds in the kernel: SIGKILL does nothing to it."""
    monkeypatch.setattr(ranks, "GONE_S", 0.0)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda file, number: None)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as rank:
        assert not end_rank(rank.pid, engine_pid=rank.pid)
        rank.kill()


@pytest.mark.parametrize("ends", [True, False])
def test_slabs_into_which_a_rank_may_write_stay_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    told: list[Message] = []
    config = HostConfig((EngineConfig("A", tmp_path),), 64 * 2**20, region_dir=tmp_path, cache_dir=tmp_path)
    monkeypatch.setattr(device, "end_rank", lambda pid, engine_pid: ends)
    host = device.LocalDevice(config, told.append)
    try:
        table = host._memory[0].table
        table.take(0, 2)
        table.counters[0].set("rank_pid", 7)
        host._receive(Died(0, "killed"))
        assert [table.owned_slabs(0), len(told)] == [0 if ends else 2, 1]
        lines = [] if ends else ["engine A: rank process 7 was killed and does not end; its memory stays taken"]
        assert caplog.messages == lines
    finally:
        host.close()


CONFIG = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}


@pytest.mark.parametrize(
    ("ranks", "stages", "layers", "kv_heads"), [(1, 1, 4, 2), (2, 1, 4, 1), (2, 2, 2, 2), (4, 2, 2, 1), (4, 1, 4, 1)]
)
def test_a_rank_has_its_part_of_a_block(ranks: int, stages: int, layers: int, kv_heads: int) -> None:
    geometry = kv_geometry(CONFIG, EngineConfig("A", TinyModel(), gpus=tuple(range(ranks)), stages=stages))
    assert (geometry.layers, geometry.kv_heads) == (layers, kv_heads)


@pytest.mark.parametrize(
    ("changes", "stages", "problem"),
    [
        ({"num_hidden_layers": 5}, 2, "its 5 layers do not divide into 2 equal parts"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}, 1, "its 3 attention heads do not divide"),
    ],
)
def test_what_does_not_divide_is_refused(changes: dict[str, int], stages: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        kv_geometry(CONFIG | changes, EngineConfig("A", TinyModel(), gpus=(0, 1), stages=stages))
