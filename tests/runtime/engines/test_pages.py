"""Memory mapped page by page, without vLLM: several engines with address spaces of their own over one region."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from fineserve_runtime.engines.api import Paging
from fineserve_runtime.engines.lease import POISON, SlabLease
from fineserve_runtime.engines.pages import AddressSpace, PageBacking, pages_of
from fineserve_runtime.engines.region import CpuRegion
from fineserve_runtime.engines.table import RegionError, SlabTable
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fineserve_sim.policy.memory.kvcached import KvCachedManager, VirtualKV

SLAB = 4096
ENGINES = ((2, 2048), (4, 4096), (6, 10240))
"""Tensors of an engine, and the bytes of its block over all of them: four blocks a page, four, and two of a grid."""

PAGINGS = (Paging(SLAB), Paging(SLAB, (2, 3)), Paging(SLAB, (1, 1), batched=True))


class Shared:
    """A table, its region, and a lease an engine."""

    def __init__(self, folder: Path, slabs: int, paging: Paging, *, poison: bool = False) -> None:
        self.folder, self.paging, self.poison = folder, paging, poison
        self.table = SlabTable.create(folder / "table", slabs, SLAB, len(ENGINES), reserved_slabs=0)
        self.region = CpuRegion.create(folder / "bytes", slabs * SLAB)
        self.spaces = [
            AddressSpace(folder / "bytes", SLAB, tensors, pages_of(self.table.header, tensors))
            for tensors, _ in ENGINES
        ]
        self.leases = [self.lease(engine) for engine in range(len(ENGINES))]

    def lease(self, engine: int) -> SlabLease:
        backing = PageBacking(SlabTable(self.folder / "table"), self.spaces[engine], engine, self.paging)
        return SlabLease(backing, engine, ENGINES[engine][1], poison_freed=self.poison)

    def block(self, engine: int, block: int) -> np.ndarray:
        """The bytes of a block that is held: to look at any other one would end this process."""
        size = ENGINES[engine][1]
        return self.spaces[engine].array.view(np.uint8)[block * size : (block + 1) * size]

    def close(self) -> None:
        for lease in self.leases:
            lease.close()


class Leases(RuleBasedStateMachine):
    """What three engines write into their blocks stays there: no slab is behind two pages, and no poison under a live block.
    ``alloc`` grants just what ``free_blocks`` promised. In the end all slabs are free."""

    @initialize(slabs=st.integers(6, 40), paging=st.sampled_from(PAGINGS), poison=st.booleans())
    def setup(self, slabs: int, paging: Paging, poison: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.shared = Shared(Path(self.folder.name), slabs, paging, poison=poison)
        self.held: list[dict[int, int]] = [{} for _ in ENGINES]
        self.writes = 0

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        for engine, lease in enumerate(self.shared.leases):
            lease.free(list(self.held[engine]))
            lease.give_up_spares()
        assert self.shared.table.free_slabs() == self.shared.table.header.slab_count, "slabs were not given back"
        self.shared.close()
        self.folder.cleanup()

    @rule(engine=st.integers(0, 2), blocks=st.integers(1, 9))
    def alloc(self, engine: int, blocks: int) -> None:
        lease = self.shared.leases[engine]
        with lease.exclusive():
            lease.settle()
            promised = lease.free_blocks()
            ids = lease.alloc(blocks)
            assert (ids is not None) == (blocks <= promised)
            stale = lease.take_stale()
        for block in stale:
            self.shared.block(engine, block)[:] = 0
        for block in ids or ():
            seen = set(self.shared.block(engine, block).tolist())
            assert all(byte % 4 in (0, engine + 1) and byte != POISON for byte in seen), "bytes of another engine"
            self.writes = (self.writes + 1) % 60
            self.held[engine][block] = mark = 4 * self.writes + engine + 1
            self.shared.block(engine, block)[:] = mark

    @rule(engine=st.integers(0, 2), data=st.data())
    def free(self, engine: int, data: st.DataObject) -> None:
        if self.held[engine]:
            ids = data.draw(st.lists(st.sampled_from(sorted(self.held[engine])), unique=True))
            self.shared.leases[engine].free(ids)
            for block in ids:
                del self.held[engine][block]

    @rule(engine=st.integers(0, 2))
    def starve_and_let_the_others_make_room(self, engine: int) -> None:
        with self.shared.leases[engine].exclusive():
            self.shared.leases[engine].starve()
        for lease in self.shared.leases:
            lease.settle()
        others = [lease for other, lease in enumerate(self.shared.leases) if other != engine]
        if self.shared.table.first_starving() == engine:
            assert not any(lease.spare_bytes for lease in others), "others keep pages ahead"

    @rule(engine=st.integers(0, 2))
    def thrive(self, engine: int) -> None:
        self.shared.leases[engine].thrive()

    @invariant()
    def what_was_written_is_there(self) -> None:
        if not hasattr(self, "shared"):
            return
        for engine, held in enumerate(self.held):
            self.shared.leases[engine].check()
            for block, mark in held.items():
                assert block > 0, "block 0 is the null block"
                assert set(self.shared.block(engine, block).tolist()) == {mark}


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return Shared(tmp_path, 20, Paging(SLAB, (5, 10)))


def test_one_engine_alone_gets_the_blocks_of_the_core(tmp_path: Path) -> None:
    """Same ids but for the null block's page, as many pages, and a buffer as the core's manager of the policy."""
    lease = Shared(tmp_path, 40, Paging(SLAB, (5, 10))).leases[0]
    core = KvCachedManager(40 * SLAB, {0: VirtualKV(2, 1024)}, page_bytes=SLAB, min_reserved=5, max_reserved=10)
    mine: list[int] = []
    theirs: list[int] = []
    for blocks in (2, 5, 1, 4, 9):
        with lease.exclusive():
            lease.settle()
            mine += lease.alloc(blocks) or []
            lease.settle()
        theirs += core.alloc(0, blocks) or []
        assert [block - 4 for block in mine] == theirs
        assert lease.free_blocks() == core.free_blocks(0)
    lease.free(mine[1:9])
    core.free(0, theirs[1:9])
    with lease.exclusive():
        lease.settle()
    held_and_buffered = lease.leased_slabs * 2 * SLAB + lease.spare_bytes
    assert held_and_buffered == core.mapped_bytes() and lease.spare_bytes >= 5 * 2 * SLAB


def test_a_page_that_was_emptied_stays_mapped_and_serves_again_unless_others_want_it(shared: Shared) -> None:
    lease, row = shared.leases[0], shared.table.counters[0]
    with lease.exclusive():
        lease.settle()
        ids = lease.alloc(4)
    assert ids and lease.spare_bytes == 4 * 2 * SLAB
    lease.free(ids)
    assert lease.spare_bytes == 5 * 2 * SLAB and row.get("pages_unmapped") == 0
    shared.table.counters[1].set("wanted_slabs", 20)  # the weights of engine 1 find no room
    lease.settle()
    lease.give_up_spares()
    assert lease.spare_bytes == 0 and shared.table.free_slabs() == 20
    assert row.get("pages_mapped") == row.get("pages_unmapped") == 5 and row.get("map_ns") > 0


def test_who_reads_memory_that_is_not_mapped_is_killed(tmp_path: Path) -> None:
    """Freed pages cannot be read, whatever is in them."""
    import subprocess
    import sys

    script = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path; from test_pages import *\n"
        "shared = Shared(Path(sys.argv[1]), 20, Paging(SLAB))\n"
        "lease = shared.leases[0]\n"
        "with lease.exclusive(): ids = lease.alloc(1)\n"
        "print(shared.block(0, ids[0]).sum(), flush=True)\n"
        "lease.free(ids)\n"
        "shared.block(0, ids[0]).sum()\n"
    )
    arguments = [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent), *sys.path]
    done = subprocess.run(arguments, check=False, capture_output=True, text=True)
    assert done.stdout == "0\n" and done.returncode == -11, done.stderr


def test_where_the_kernel_refuses_one_line_says_so(tmp_path: Path) -> None:
    with pytest.raises(RegionError, match="no address space for 3 pages"):
        AddressSpace(tmp_path / "missing", SLAB, 2, 3)
    (tmp_path / "bytes").write_bytes(bytes(SLAB))
    space = AddressSpace(tmp_path / "bytes", SLAB, 2, 3)
    with pytest.raises(RegionError, match="cannot be mapped: Invalid argument"):
        space._forbid(1, 1)
