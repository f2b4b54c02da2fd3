"""vTensor and FlexInfer: the paper's worked examples, and a state machine with a ledger of rows and references."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fineserve_sim.catalog import model
from fineserve_sim.experiment.reproduce.papers.vtensor.flexinfer_model import FlexInfer, Readings, VirtualRanges
from fineserve_sim.policy.interfaces import PrefixKVManager, TimedKVManager, keeps_prefixes, takes_time
from fineserve_sim.policy.memory.prefix import SharedBlocks, block_keys
from fineserve_sim.policy.memory.vtensor import CHUNK_BYTES, ChunkCosts, VTensorManager, tokens_per_chunk

GIB = 2**30


def tensor_token_bytes(name: str) -> int:
    """K or V of one token in one layer, FP16, TP 1."""
    spec = model(name)
    return spec.kv_heads * spec.head_dim * 2


# -- worked examples


@pytest.mark.parametrize(("name", "tokens"), [("yi-6b", 2048), ("yi-9b", 2048), ("yi-34b", 1024), ("llama-2-7b", 256)])
def test_tokens_per_chunk(name: str, tokens: int) -> None:
    """Claim VT-5-chunk."""
    assert tokens_per_chunk(tensor_token_bytes(name)) == tokens


def test_a_request_takes_at_least_a_chunk_of_every_tensor() -> None:
    manager = VTensorManager(80 * GIB, {0: 64})
    flexinfer = FlexInfer(manager, 0, 2048, 4096)
    assert flexinfer.prefill(0, 1) == 0
    assert manager.mapped_bytes() == 128 * 2**20
    assert flexinfer.ranges.reserved == 1  # virtual, of the maximum length, at no memory


def test_half_a_chunk_a_request_is_wasted_on_average() -> None:
    """Claim VT-2-reserve: 64 requests of Llama-2-7B whose lengths fall evenly into their last chunks leave 64 x 64 x 1 MB
    unused: 5 % of 80 GB."""
    chunk = tokens_per_chunk(tensor_token_bytes("llama-2-7b"))
    flexinfer = FlexInfer(VTensorManager(80 * GIB, {0: 64}), 0, chunk, 4096)
    for request in range(64):
        flexinfer.prefill(request, chunk + (2 * request + 1) * chunk // 128)
    wasted = flexinfer.reserved_tokens() * 2 * 32 * tensor_token_bytes("llama-2-7b")
    assert wasted == 64 * 64 * CHUNK_BYTES // 2
    assert wasted / (80 * GIB) == pytest.approx(0.0499, abs=2e-4)


@pytest.mark.parametrize(("extends", "rows"), [(0, 2), (1, 3), (2, 4)])
def test_the_listing_maps_two_rows_beyond_the_prompt(extends: int, rows: int) -> None:
    manager = VTensorManager(640, {0: 1}, chunk_bytes=64)
    flexinfer = FlexInfer(manager, 0, 8, 64, Readings(prefill_extends=extends))
    flexinfer.prefill(0, 9)
    assert manager.used_bytes(0) == rows * 64


def test_a_match_shares_full_chunks_and_copies_nothing() -> None:
    """Claim VT-5-prefix: 12 K of shared prefix in chunks of 2048. The second request takes rows for its own 4 K alone."""
    manager = VTensorManager(80 * GIB, {0: 64})
    flexinfer = FlexInfer(manager, 0, 2048, 32768)
    first = [*range(6), 100, 101]
    second = [*range(6), 200, 201]
    assert flexinfer.prefill(0, 16384, first) == 0
    flexinfer.finish(0, continued=True)
    mapped = manager.used_bytes(0)
    matched = manager.match(0, second)
    assert len(matched) == 6 and manager.used_bytes(0) == mapped  # no new physical memory
    assert all(manager.references(0, row) == 2 for row in matched)
    manager.free(0, matched)
    assert flexinfer.prefill(1, 16384, second) == 12288
    assert manager.used_bytes(0) - mapped == 2 * 64 * CHUNK_BYTES
    flexinfer.check()


def test_the_listing_forgets_the_rest_of_the_prompt() -> None:
    manager = VTensorManager(640, {0: 1}, chunk_bytes=64)
    flexinfer = FlexInfer(manager, 0, 8, 64, Readings(suffix_after_match=False, record="always"))
    flexinfer.prefill(0, 8, [1])
    flexinfer.finish(0, continued=False)
    assert flexinfer.prefill(1, 24, [1, 2, 3]) == 8
    assert len(flexinfer.requests[1].rows) == 1  # memory for 8 of 24 tokens


def test_a_partly_filled_chunk_is_not_shared() -> None:
    manager = VTensorManager(640, {0: 1}, chunk_bytes=64)
    flexinfer = FlexInfer(manager, 0, 8, 64)
    flexinfer.prefill(0, 12, [1])
    flexinfer.finish(0, continued=True)
    assert manager.used_bytes(0) == 64  # the second row went back
    assert flexinfer.prefill(1, 12, [1]) == 8
    flexinfer.check()


def test_only_sessions_that_go_on_are_recorded() -> None:
    manager = VTensorManager(640, {0: 1}, chunk_bytes=64)
    flexinfer = FlexInfer(manager, 0, 8, 64)
    flexinfer.prefill(0, 8, [1])
    flexinfer.finish(0, continued=False)
    assert manager.used_bytes(0) == 0 and flexinfer.prefill(1, 8, [1]) == 0


def test_decode_extends_when_the_row_is_full_and_preempts_the_last_until_it_fits() -> None:
    manager = VTensorManager(5 * 64, {0: 1}, chunk_bytes=64)
    flexinfer = FlexInfer(manager, 0, 8, 64)
    for request, tokens in enumerate((16, 16, 8)):
        flexinfer.prefill(request, tokens)
    assert flexinfer.decode(0) == [2]
    assert [flexinfer.decode(0) for _ in range(7)] == [[]] * 7
    assert flexinfer.decode(1) == [1]  # the last of all gives up itself
    assert list(flexinfer.requests) == [0]
    flexinfer.check()


def test_the_listing_preempts_once_and_may_fail() -> None:
    """Request 2 shares its only row with a record and a running request: its release frees nothing."""
    manager = VTensorManager(3 * 64, {0: 1}, chunk_bytes=64)
    flexinfer = FlexInfer(manager, 0, 8, 64, Readings(preempt="once"))
    flexinfer.prefill(0, 8, [1])
    flexinfer.finish(0, continued=True)
    flexinfer.prefill(1, 24, [1])
    flexinfer.prefill(2, 8, [1])
    with pytest.raises(MemoryError, match="after one preemption"):
        flexinfer.decode(1)


def test_extending_with_every_token_maps_the_whole_range() -> None:
    manager = VTensorManager(640, {0: 1}, chunk_bytes=64)
    flexinfer = FlexInfer(manager, 0, 8, 64, Readings(decode_extends="every_token"))
    flexinfer.prefill(0, 8)
    for _ in range(9):
        flexinfer.decode(0)
    assert manager.used_bytes(0) == 8 * 64  # 8 rows of 8 tokens for 17 tokens


def test_records_go_before_running_requests() -> None:
    manager = VTensorManager(2 * 64, {0: 1}, chunk_bytes=64)
    flexinfer = FlexInfer(manager, 0, 8, 64)
    flexinfer.prefill(0, 8, [1])
    flexinfer.finish(0, continued=True)
    flexinfer.prefill(1, 8)
    assert manager.free_blocks(0) == 1 and flexinfer.decode(1) == []
    assert manager.match(0, [1]) == []


def test_chunks_stay_for_a_second_and_are_used_again() -> None:
    manager = VTensorManager(640, {0: 1, 1: 2}, chunk_bytes=64)
    ids = manager.alloc(0, 4)
    assert ids is not None
    manager.advance(10.0)
    manager.free(0, ids)
    assert manager.mapped_bytes() == 256 and manager.ledger() == (640, 0, 0, 640, 0)
    manager.advance(10.5)
    assert manager.alloc(1, 1) == [0]  # two of the four, for the tensors of another engine
    assert manager.mapped_bytes() == 256
    manager.advance(11.0)
    assert manager.mapped_bytes() == 128
    keeping = VTensorManager(640, {0: 1}, chunk_bytes=64, trim_s=float("inf"))
    keeping.free(0, keeping.alloc(0, 4) or [])
    keeping.advance(1e9)
    assert keeping.mapped_bytes() == 256


def test_extension_ahead_costs_a_step_nothing() -> None:
    """Claim VT-5-overlap; late, it costs what the driver needs: created chunks more than spare ones."""
    costs = {"create_s": 0.5, "map_s": 0.25}
    ahead = VTensorManager(640, {0: 2}, chunk_bytes=64, costs=ChunkCosts(**costs))
    late = VTensorManager(640, {0: 2}, chunk_bytes=64, costs=ChunkCosts(**costs, ahead=False))
    for manager in (ahead, late):
        manager.advance(1.0)
        ids = manager.alloc(0, 1)
        assert ids is not None
    assert ahead.exposed_s(0) == 0.0 and late.exposed_s(0) == 2 * 0.75
    late.advance(5.0)
    late.free(0, ids)
    late.alloc(0, 2)
    assert late.exposed_s(0) == 4 * 0.25 + 2 * 0.5
    assert ahead.fits({0: 4, 9: 99}) and not ahead.fits({0: 6}) and not late.fits({0: 1}) and late.fits({0: 0})


def test_virtual_ranges_are_used_again() -> None:
    ranges = VirtualRanges()
    assert [ranges.take(), ranges.take()] == [0, 1]
    ranges.give_back(0)
    assert ranges.take() == 0 and ranges.reserved == 2


def test_refusals() -> None:
    with pytest.raises(ValueError, match="does not fit a chunk of 8"):
        tokens_per_chunk(9, 8)
    with pytest.raises(ValueError, match="limit -1 bytes"):
        VTensorManager(-1, {})
    manager = VTensorManager(640, {0: 1}, chunk_bytes=64)
    with pytest.raises(ValueError, match="owner 7 is not registered"):
        manager.alloc(7, 1)
    with pytest.raises(ValueError, match="asks for -1 rows"):
        manager.alloc(0, -1)
    with pytest.raises(ValueError, match="owner 0: block 3 is held by no sequence"):
        manager.free(0, [3])
    flexinfer = FlexInfer(manager, 0, 8, 16)
    with pytest.raises(ValueError, match="request 0 with 17 tokens; at most 16"):
        flexinfer.prefill(0, 17)
    flexinfer.prefill(0, 16)
    with pytest.raises(ValueError, match="at its maximum of 16 tokens"):
        flexinfer.decode(0)
    with pytest.raises(ValueError, match="request 1 is not here"):
        flexinfer.release(1)


# -- keys of blocks


def test_block_keys_cover_the_whole_block() -> None:
    assert block_keys([7, 8, 9], 4, 8, 12) == (8,)  # ids for 12 tokens, one full block of 8
    assert block_keys([7, 8, 9], 16, 8, 40) == (7, 7, 8, 8, 9)
    assert block_keys([7, 8], 6, 4, 12) == (7, 8, 8)
    assert block_keys([7, 8], 6, 4, 11) == (7, 8) and block_keys([], 6, 4, 100) == ()


@given(
    texts=st.lists(st.text("ab", min_size=1, max_size=24), min_size=2, max_size=2),
    id_tokens=st.integers(1, 5),
    block_tokens=st.integers(1, 5),
)
def test_equal_keys_mean_equal_tokens(texts: list[str], id_tokens: int, block_tokens: int) -> None:
    """Ids made of the text itself: blocks with the same key at the same place hold the same tokens, from the first on."""
    a, b = (
        block_keys(
            [hash(text[: end + id_tokens]) for end in range(0, len(text) - id_tokens + 1, id_tokens)],
            id_tokens,
            block_tokens,
            len(text),
        )
        for text in texts
    )
    for block, (one, other) in enumerate(zip(a, b, strict=False)):
        end = (block + 1) * block_tokens
        assert one != other or texts[0][:end] == texts[1][:end]


def test_shared_blocks_refuse_what_nobody_holds() -> None:
    shared = SharedBlocks()
    shared.add([1, 2])
    shared.record([10, 20], [1, 2])
    assert shared.drop([1, 2]) == [] and shared.evictable == 2
    with pytest.raises(ValueError, match="block 1 is held by no sequence"):
        shared.drop([1])
    assert shared.match([10]) == [1]
    with pytest.raises(ValueError, match="named twice"):
        shared.drop([1, 1])
    assert shared.evict(5) == [2] and shared.drop([1]) == []
    assert shared.evict(5) == [1] and len(shared) == 0
    shared.check()


# -- any sequence of calls

CHUNK = 8
TENSORS = {0: 2, 1: 3}
LIMIT = 20
KEYS = st.lists(st.integers(0, 1), max_size=4).map(lambda bits: [hash(tuple(bits[: i + 1])) for i in range(len(bits))])


class VTensorMachine(RuleBasedStateMachine):
    """Sequences hold rows, some shared; a record holds its rows too. What exists is counted anew each time."""

    @initialize()
    def start(self) -> None:
        self.manager = VTensorManager(LIMIT * CHUNK + 3, TENSORS, chunk_bytes=CHUNK)
        timed: TimedKVManager = self.manager
        keeps: PrefixKVManager = self.manager
        assert takes_time(timed) and keeps_prefixes(keeps)
        self.sequences: list[tuple[int, list[int], list[int]]] = []  # owner, keys, rows
        self.now = 0.0

    def held(self, owner: int) -> Counter[int]:
        return Counter(row for who, _, rows in self.sequences if who == owner for row in rows)

    @rule(owner=st.sampled_from([0, 1]), keys=KEYS, more=st.integers(0, 3))
    def begin(self, owner: int, keys: list[int], more: int) -> None:
        """A sequence matches its prefix and takes rows for the rest of its keys, and some more."""
        before = self.manager.mapped_bytes(), self.manager.used_bytes(owner)
        rows = self.manager.match(owner, keys)
        assert (self.manager.mapped_bytes(), self.manager.used_bytes(owner)) == before
        self.sequences.append((owner, keys, rows))
        blocks = len(keys) - len(rows) + more
        free = self.manager.free_blocks(owner)
        ids = self.manager.alloc(owner, blocks)
        assert (ids is None) == (blocks > free)
        if ids is None:
            self.sequences.pop()
            self.manager.free(owner, rows)
            return
        assert not self.held(owner).keys() & set(ids) and len(set(ids)) == blocks
        rows += ids

    @rule(data=st.data(), keep=st.booleans())
    def end(self, data: st.DataObject, keep: bool) -> None:
        if not self.sequences:
            return
        owner, keys, rows = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        if keep:
            self.manager.record(owner, keys, rows)
            matched = self.manager.match(owner, keys)
            assert len(matched) == len(keys)
            self.manager.free(owner, matched)
        self.manager.free(owner, rows)

    @rule(seconds=st.sampled_from([0.4, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.manager.advance(self.now)
        if seconds > 1:
            used = sum(self.manager.used_bytes(owner) for owner in TENSORS)
            assert self.manager.mapped_bytes() == used  # what was spare is trimmed

    @invariant()
    def agrees(self) -> None:
        self.manager.check()
        for owner, tensors in TENSORS.items():
            held = self.held(owner)
            for row, count in held.items():
                assert self.manager.references(owner, row) in (count, count + 1)  # one more when recorded
            assert self.manager.used_bytes(owner) >= len(held) * tensors * CHUNK
        assert self.manager.mapped_bytes() <= LIMIT * CHUNK


TestVTensor = VTensorMachine.TestCase
