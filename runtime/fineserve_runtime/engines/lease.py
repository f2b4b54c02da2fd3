"""One engine's KV blocks: slabs leased from the owner table, blocks inside them kept by the core's `KVSlabManager`.

Where memory is mapped, pages stand for slabs (backing.py).

**Why leases.** Every step of every engine takes and frees blocks. Were the manager's whole state shared, each of these would
lock and rewrite it; a server in the middle would cost a round trip a step. Processes must agree only on the owner of each
slab, one byte of the table. So each engine keeps a manager of its own, over the whole region. A second owner in it, the
LANDLORD, has blocks of one slab and holds every slab that the engine does not lease:

    lease:   the table grants slabs; the manager's landlord frees them       -> the engine can allocate there
    return:  the landlord takes the slabs that drained; the table frees them -> others can lease them

Block ids, the choice of a slab and the ledger belong to the core: id = first block of the slab + place in it. Against one
manager for all, engines of equal block size do not share partly used slabs. In return a slab holds bytes of one model at a
time, so stale bytes are a matter of slabs (``take_stale``).

**Livelock.** Engines that starve preempt their own sequences, as vLLM does, and start again when there is room. Several of
them could undo each other's work for ever: each takes what the other has just given up. So an engine whose last sequence
found no block draws a ticket. While tickets are out, only the engine with the oldest one starts sequences, and no engine keeps
idle prefixes. Running sequences go on, so the others finish or give up theirs; in the end the ticket's holder can have the
whole region, in which one sequence always fits. It gives the ticket up when a request of it finishes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from fineserve_runtime.engines.backing import Backing, SlabBacking
from fineserve_sim.policy.memory.geometry import SlabPlan
from fineserve_sim.policy.memory.slab import KVSlabManager

ENGINE, LANDLORD = 0, 1
POISON = 0xFF


class SlabLease:
    """The KV memory of engine ``engine``, in units of ``backing``: slabs, or pages in their place (pages.py). Block ids count
    over all units, block 0 is in a reserved one. ``poison_freed`` overwrites every unit before it goes back.

    Not for several threads; other engines' instances may be used at the same time.
    """

    def __init__(self, backing: Backing, engine: int, block_bytes: int, *, poison_freed: bool = False) -> None:
        unit_bytes = backing.unit_bytes
        self.block_bytes = block_bytes
        self._backing = backing
        self._table = backing.table
        self._engine = engine
        self.counters = self._table.counters[engine]
        self._poison = poison_freed
        self._plan = SlabPlan(unit_bytes, tuple(sorted({block_bytes, unit_bytes})))
        self._blocks_per_unit = self._plan.least_blocks(block_bytes)
        self._manager = KVSlabManager(
            backing.units * unit_bytes,
            {ENGINE: block_bytes, LANDLORD: unit_bytes},
            plan=self._plan,
            reserved_slabs=backing.reserved,
        )
        self._manager.alloc(LANDLORD, backing.units - backing.reserved)
        self._leased = 0
        self._below = backing.units
        self._locked = False
        self._promised: int | None = None  # what ``free_blocks`` answers until something changes
        self._stale: set[int] = set()
        self._unzeroed: list[int] = []
        self.counters.set("block_bytes", block_bytes)

    @property
    def capacity_blocks(self) -> int:
        """How many blocks the engine could hold if no other engine leased a slab."""
        return self._backing.limit * self._blocks_per_unit

    @property
    def virtual_blocks(self) -> int:
        """Block ids are below this."""
        return self._backing.units * self._backing.unit_bytes // self.block_bytes

    @property
    def used_blocks(self) -> int:
        return self._manager.used_bytes(ENGINE) // self.block_bytes

    @property
    def leased_slabs(self) -> int:
        return self._leased

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """No other engine takes slabs meanwhile, so ``alloc`` grants what ``free_blocks`` promises. Not reentrant."""
        with self._table.lock():
            self.look()
            self._locked = True
            try:
                yield
            finally:
                self._locked = False

    def look(self) -> None:
        """See what others took and gave meanwhile."""
        self._backing.look()
        self._promised = None

    def free_blocks(self) -> int:
        """How many blocks ``alloc`` would grant; exact inside ``exclusive`` (for grid keys on the safe side), else as of the
        last ``look``."""
        if self._promised is None:  # vLLM asks for every running sequence
            self._promised = self._manager.free_blocks(ENGINE) + self._backing.obtainable() * self._blocks_per_unit
        return self._promised

    def alloc(self, blocks: int) -> list[int] | None:
        """``blocks`` block ids, or None when they do not all fit. Call it inside ``exclusive``."""
        self._promised = None
        short = blocks - self._manager.free_blocks(ENGINE)
        if short > 0 and not self._lease(-(-short // self._blocks_per_unit)):
            return None
        ids = self._manager.alloc(ENGINE, blocks)
        assert ids is not None, "the slab manager counts fewer blocks than were leased"
        if self._stale and (stale := self._stale.intersection(ids)):
            self._unzeroed.extend(stale)
        return ids

    def free(self, block_ids: Sequence[int]) -> None:
        """Give back blocks; slabs that drain go back to the table at once. Raises ValueError for a block not held."""
        self._promised = None
        self._manager.free(ENGINE, block_ids)
        drained = self._manager.free_blocks(LANDLORD)
        if drained:
            units = self._manager.alloc(LANDLORD, drained)
            assert units is not None
            self._give_back(units)

    def take_stale(self) -> list[int]:
        """Blocks handed out since the last call that carry another model's bytes: zero them before the engine reads them.
        Blocks freed again meanwhile are left out, since another engine may have their slab by then."""
        if not self._unzeroed:
            return []
        ids = sorted({block for block in self._unzeroed if block in self._stale and self._holds(block)})
        self._unzeroed.clear()
        self._stale.difference_update(ids)
        self.counters.add("blocks_zeroed", len(ids))
        return ids

    def set_aside(self, block_ids: Iterable[int]) -> None:
        """Blocks just handed out are only kept, so no step reads them: they are zeroed once they are handed out again.

        Zeroed by the next step, they could lose what is written into them meanwhile: a step zeroes when it runs, and
        ``write_blocks`` writes at once."""
        kept = set(block_ids)
        self._unzeroed = [block for block in self._unzeroed if block not in kept]

    def read_blocks(self, block_ids: Sequence[int]) -> tuple[bytes, ...]:
        """The bytes of each of these blocks."""
        return tuple(self._slabs.read(block * self.block_bytes, self.block_bytes) for block in block_ids)

    def write_blocks(self, block_ids: Sequence[int], blocks: Sequence[bytes]) -> None:
        """Fill these blocks, which the engine holds, with what ``read_blocks`` gave."""
        for block, data in zip(block_ids, blocks, strict=True):
            self._slabs.write(block * self.block_bytes, data)
        self._stale.difference_update(block_ids)

    def stay_below(self, slab: int | None) -> None:
        """Lease no slab from this one on; None: any. Slabs that are leased stay."""
        self._below = self._backing.units if slab is None else slab
        self._slabs.stay_below(self._below)
        self.look()

    def reaches(self, block_ids: Sequence[int]) -> bool:
        """Whether some of these blocks are in slabs that the engine is to stay below."""
        return any(self._manager.locate(ENGINE, block)[0] >= self._below for block in block_ids)

    def crowded(self) -> bool:
        """Whether idle prefixes should make room: another engine starves, or hardly a slab is free."""
        return self._table.others_starve(self._engine) or self._backing.crowded()

    @property
    def spare_bytes(self) -> int:
        """Memory that the engine holds ahead of need; free, for it is given up on demand."""
        return self._backing.spare_bytes

    def settle(self) -> None:
        """Give up memory held ahead when others need it; inside ``exclusive``, get some when no other engine does."""
        if not self._locked:
            self._backing.look()
        self._promised = None
        self._backing.settle(may_take=self._locked)

    def give_up_spares(self) -> None:
        self._backing.give_up_spares()
        self._promised = None

    def close(self) -> None:
        self._backing.close()

    # --- livelock ----------------------------------------------------------------------------------------------------

    def may_start(self) -> bool:
        """Whether the engine may start or resume sequences now."""
        return not self._table.others_starve(self._engine)

    def starve(self) -> None:
        """No sequence of the engine finds room. Call it inside ``exclusive``."""
        self._table.draw_ticket(self._engine)

    def thrive(self) -> None:
        """A request of the engine finished, or none is left."""
        self._table.drop_ticket(self._engine)

    # --- inside ------------------------------------------------------------------------------------------------------

    @property
    def _slabs(self) -> SlabBacking:
        """Systems that copy KV or drop layers have slabs: instances of one model have no memory that is mapped."""
        assert isinstance(self._backing, SlabBacking)
        return self._backing

    def _holds(self, block: int) -> bool:
        """Whether the unit of the block is (still) leased; the caller knows whether the block itself is held."""
        unit, _ = self._manager.locate(ENGINE, block)
        return self._backing.holds(unit)

    def _lease(self, count: int) -> bool:
        assert self._locked, "slabs are leased under the table's lock"
        if count > self._backing.obtainable():
            return False
        units = self._backing.take(count)
        self._leased += count
        self.counters.add("slabs_leased", count)
        self._manager.free(LANDLORD, units)
        for unit in units:
            if self._backing.foreign(unit):
                self._stale.update(range(*self._plan.span(self.block_bytes, unit)))
        return True

    def _give_back(self, units: Sequence[int]) -> None:
        for unit in units:
            blocks = range(*self._plan.span(self.block_bytes, unit))
            all_mine = self._stale.isdisjoint(blocks)
            self._stale.difference_update(blocks)
            if self._poison:
                self._backing.fill(unit, POISON)
            self._backing.give_back(unit, meaningful=all_mine and not self._poison)
        self._leased -= len(units)
        self.counters.add("slabs_returned", len(units))

    def check(self) -> None:
        """Raise AssertionError if the manager and the table disagree."""
        self._manager.check()
        leased = self._backing.units - self._backing.reserved
        leased -= self._manager.used_bytes(LANDLORD) // self._backing.unit_bytes
        assert self._leased == leased, "units leased"
        assert leased * self._backing.unit_bytes >= self._manager.used_bytes(ENGINE), "more blocks than slabs"
        self._backing.check(leased)
