"""Owner table and leases without vLLM: several engines on one region, as threads or processes would use them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from fineserve_runtime.engines.backing import SlabBacking
from fineserve_runtime.engines.lease import POISON, SlabLease
from fineserve_runtime.engines.region import CpuRegion, RegionLock, RegionPaths
from fineserve_runtime.engines.table import RegionError, SlabTable, lock_holder
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fineserve_sim.policy.memory.geometry import plan_slabs
from fineserve_sim.policy.memory.slab import KVSlabManager

KEYS = (40, 60, 24)  # least common multiple 120


class Shared:
    """A table, its region and a lease an engine."""

    def __init__(self, folder: Path, slabs: int, keys: tuple[int, ...] = KEYS, **options: object) -> None:
        plan = plan_slabs(keys)
        self.slab_bytes = plan.slab_bytes
        self.table = SlabTable.create(folder / "table", slabs, plan.slab_bytes, len(keys))
        self.region = CpuRegion.create(folder / "bytes", slabs * plan.slab_bytes)
        self.leases = [self.lease(folder, engine, key, **options) for engine, key in enumerate(keys)]

    def lease(self, folder: Path, engine: int, key: int, **options: object) -> SlabLease:
        poison = bool(options.pop("poison_freed", False))
        backing = SlabBacking(SlabTable(folder / "table"), self.region, engine, **options)  # type: ignore[arg-type]
        return SlabLease(backing, engine, key, poison_freed=poison)


class Leases(RuleBasedStateMachine):
    """Blocks of three engines never overlap, ``alloc`` grants just what ``free_blocks`` promised, drained slabs come back,
    and no block is handed out with bytes of another engine unless ``take_stale`` names it."""

    @initialize(slabs=st.integers(2, 12), poison=st.booleans())
    def setup(self, slabs: int, poison: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.shared = Shared(Path(self.folder.name), slabs, poison_freed=poison)
        self.held: list[list[int]] = [[] for _ in KEYS]

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    @rule(engine=st.integers(0, 2), blocks=st.integers(1, 14))
    def alloc(self, engine: int, blocks: int) -> None:
        lease, key = self.shared.leases[engine], KEYS[engine]
        with lease.exclusive():
            promised = lease.free_blocks()
            ids = lease.alloc(blocks)
            assert (ids is not None) == (blocks <= promised)
            assert lease.free_blocks() == promised - (blocks if ids else 0)
            stale = lease.take_stale()
        for block in stale:
            self.shared.region.fill(block * key, key, 0)
        for block in ids or ():
            bytes_of_block = self.shared.region.array[block * key : (block + 1) * key]
            assert set(bytes_of_block.tolist()) <= {0, engine + 1}, "another engine's bytes"
            self.shared.region.fill(block * key, key, engine + 1)
        self.held[engine] += ids or []

    @rule(engine=st.integers(0, 2), data=st.data())
    def free(self, engine: int, data: st.DataObject) -> None:
        if self.held[engine]:
            ids = data.draw(st.lists(st.sampled_from(self.held[engine]), unique=True))
            self.shared.leases[engine].free(ids)
            self.held[engine] = [block for block in self.held[engine] if block not in ids]

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "shared"):
            return
        taken: set[int] = set()
        for engine, key in enumerate(KEYS):
            self.shared.leases[engine].check()
            for block in self.held[engine]:
                place = set(range(block * key, (block + 1) * key))
                assert not taken & place, "two engines share bytes"
                assert min(place) >= self.shared.slab_bytes, "slab 0 is for null blocks"
                taken |= place
        leased = sum(lease.leased_slabs for lease in self.shared.leases)
        assert leased + self.shared.table.free_slabs() + 1 == self.shared.table.header.slab_count


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=40, stateful_step_count=40)


def test_outside_the_lock_free_blocks_are_those_of_the_last_look(tmp_path: Path) -> None:
    shared = Shared(tmp_path, 10)
    first, second, _ = shared.leases
    all_free = first.free_blocks()
    with second.exclusive():
        ids = second.alloc(4)
    assert ids is not None
    assert first.free_blocks() == all_free, "nobody looked"
    first.look()
    looked = first.free_blocks()
    assert looked < all_free
    second.free(ids)
    with first.exclusive():
        assert first.free_blocks() == all_free


def test_one_engine_alone_gets_the_blocks_of_the_core(tmp_path: Path) -> None:
    """With nobody else, lease and return change nothing: same ids as one manager that owns all."""
    lease = Shared(tmp_path, 6, keys=(40, 60)).leases[0]
    core = KVSlabManager(6 * 120, {0: 40, 1: 60}, reserved_slabs=1)
    mine: list[int] = []
    for blocks in (2, 5, 1, 4):
        with lease.exclusive():
            ids = lease.alloc(blocks)
        assert ids == core.alloc(0, blocks)
        mine += ids or []
    lease.free(mine[1:6])
    core.free(0, mine[1:6])
    with lease.exclusive():
        assert lease.alloc(7) == core.alloc(0, 7)
        assert lease.alloc(99) is None
        assert core.alloc(0, 99) is None


def test_limit_bounds_the_lease(tmp_path: Path) -> None:
    lease = Shared(tmp_path, 9, limit_slabs=2).leases[0]
    with lease.exclusive():
        assert lease.free_blocks() == lease.capacity_blocks == 6
        assert lease.alloc(7) is None
        assert len(lease.alloc(6) or []) == 6


def test_own_slab_comes_back_clean_another_ones_does_not(tmp_path: Path) -> None:
    shared = Shared(tmp_path, 2)
    first, second = shared.leases[0], shared.leases[1]
    for lease, stale in ((first, []), (first, []), (second, [2, 3]), (second, []), (first, [3, 4, 5])):
        with lease.exclusive():
            ids = lease.alloc(lease.free_blocks())
            assert ids
            assert lease.take_stale() == stale
        lease.free(ids)


def test_a_block_freed_before_it_was_zeroed_stays_stale(tmp_path: Path) -> None:
    shared = Shared(tmp_path, 2)
    first, second = shared.leases[0], shared.leases[1]
    with second.exclusive():
        second.free(second.alloc(1) or [])
    with first.exclusive():
        ids = first.alloc(2) or []
        first.free(ids)  # preempted in the same step: the slab is back before anybody zeroed it
        assert first.take_stale() == []
        assert first.alloc(1) == [3]
        assert first.take_stale() == [3]


def test_blocks_that_are_only_kept_are_zeroed_by_no_step(tmp_path: Path) -> None:
    """A step in flight that zeroed them would wipe out KV that is written into them before it runs."""
    shared = Shared(tmp_path, 3)
    first, second = shared.leases[0], shared.leases[1]
    with second.exclusive():
        second.free(second.alloc(4) or [])
    with first.exclusive():
        kept = first.alloc(2) or []
        first.set_aside(kept)
        assert first.alloc(1) == [5]
        assert first.take_stale() == [5], "what is read by the step"
        first.free(kept)
        assert first.alloc(2) == kept
        first.write_blocks(kept[:1], [bytes(40)])
        assert first.take_stale() == kept[1:]


def test_poison(tmp_path: Path) -> None:
    shared = Shared(tmp_path, 2, poison_freed=True)
    lease = shared.leases[0]
    with lease.exclusive():
        lease.free(lease.alloc(1) or [])
        assert shared.region.array.view("uint8")[120:240].tolist() == [POISON] * 120
        lease.alloc(1)
        assert lease.take_stale() == [3]


def test_reclaim_frees_what_the_dead_engine_held(tmp_path: Path) -> None:
    shared = Shared(tmp_path, 5)
    with shared.leases[0].exclusive():
        shared.leases[0].alloc(7)
        shared.leases[0].starve()
    with shared.table.lock():
        assert shared.table.reclaim(0) == 3
    assert shared.table.free_slabs() == 4
    assert shared.leases[1].may_start(), "its ticket went with it"
    again = shared.lease(tmp_path, 0, 40)
    with again.exclusive():
        again.alloc(1)
        assert again.take_stale() == [3], "nobody knows what the dead engine left"


def test_only_the_engine_that_starves_longest_starts_sequences(tmp_path: Path) -> None:
    first, second, third = Shared(tmp_path, 5).leases
    with second.exclusive():
        second.starve()
    with first.exclusive():
        first.starve()
        second.starve()
    assert [lease.may_start() for lease in (first, second, third)] == [False, True, False]
    assert [lease.crowded() for lease in (first, second, third)] == [True, False, True]
    second.thrive()
    assert [lease.may_start() for lease in (first, second, third)] == [True, False, False]
    first.thrive()
    assert third.may_start()


def test_a_run_of_slabs_is_taken_from_the_upper_end(tmp_path: Path) -> None:
    table = SlabTable.create(tmp_path / "table", 10, 120, 2)
    with table.lock():
        assert table.take_run(0, 3) == 7
        assert table.take(1, 2) == [1, 2]
        assert table.take_run(1, 5) is None
        assert table.take_run(1, 4) == 3
        assert table.take(0, 1) is None
    with pytest.raises(RegionError, match="engine 1 gives back slab 7"):
        table.give_back(1, [7])


def test_a_second_host_is_refused_and_a_crash_is_recognised(tmp_path: Path) -> None:
    paths = RegionPaths(tmp_path, "gpu0")
    script = (
        "import sys, time, pathlib\n"
        "from fineserve_runtime.engines.region import *\n"
        "from fineserve_runtime.engines.table import SlabTable\n"
        "paths = RegionPaths(pathlib.Path(sys.argv[1]), 'gpu0')\n"
        "lock = RegionLock(paths)\n"
        "SlabTable.create(paths.table, 4, 120, 1), CpuRegion.create(paths.bytes_file, 480)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    server = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert server.stdout
    with server:
        assert server.stdout.readline() == "up\n"
        with pytest.raises(RegionError, match=f"'gpu0' is in use by the server with process id {server.pid}"):
            RegionLock(paths)
        server.send_signal(signal.SIGKILL)
    lock = RegionLock(paths)
    assert lock.stale
    assert not paths.table.exists()
    assert not paths.bytes_file.exists()
    lock.release()
    clean = RegionLock(paths)
    assert not clean.stale
    clean.release()


@pytest.mark.parametrize("content", [b"", b"\0" * 400, b"something else entirely" * 20])
def test_foreign_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "table").write_bytes(content)
    with pytest.raises(RegionError, match="no slab table"):
        SlabTable(tmp_path / "table")
    with pytest.raises(RegionError, match=r"no slab table at .*: No such file"):
        SlabTable(tmp_path / "missing")
    with pytest.raises(RegionError, match="no region at"):
        CpuRegion(tmp_path / "missing")


def test_too_small_a_region(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="enlarge region_bytes"):
        SlabTable.create(tmp_path / "table", 1, 120, 2)


def test_a_region_is_for_its_owner_alone(tmp_path: Path) -> None:
    """KV memory is what clients said; /dev/shm is open to everybody."""
    before = os.umask(0)
    try:
        Shared(tmp_path, 4)
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {"table": 0o600, "bytes": 0o600}


def test_who_holds_the_lock_is_known(tmp_path: Path) -> None:
    shared = Shared(tmp_path, 4)
    assert lock_holder(tmp_path / "table") is None
    with shared.table.lock():
        assert lock_holder(tmp_path / "table") == os.getpid()
