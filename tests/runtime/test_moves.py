"""Live migration between engines: a request ends with its tokens wherever it goes, and whatever ends on its way."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fake_engines import FakeEngine, continuation
from fineserve_runtime.engines.api import KvPart, Sampling
from fineserve_runtime.replay_log import replay
from runtimekit import BLOCK_TOKENS, Heard, Runtime, core_spec, eventually, runtime

from fineserve_sim.policy.commands import Migrate
from fineserve_sim.systems.spec import FreenessDispatchSpec, LlumnixMigrationSpec

PROMPT = tuple(range(2, 2 + 5 * BLOCK_TOKENS + 3))
NEVER = LlumnixMigrationSpec(out_blocks=-1e9, in_blocks=1e9)


@contextmanager
def two_engines(migration: LlumnixMigrationSpec = NEVER, blocks: int = 40) -> Iterator[Runtime]:
    spec = core_spec(("A",), dispatch=FreenessDispatchSpec(), migration=migration, gpus=2, blocks=blocks)
    with runtime(spec, max_sequences=6) as here:
        yield here


def engine(here: Runtime, number: int) -> FakeEngine:
    return here.hosts[number].engines[0]


def decoding(here: Runtime, tokens: int = 12, sampling: Sampling | None = None) -> Heard:
    """What is heard of a request that decodes on engine 0, as request 0."""
    job, heard = here.ask("A", PROMPT, tokens=tokens, sampling=sampling)
    while len(heard.tokens_) < 2:
        here.hosts[0].step_all()
    assert job.engine == 0
    return heard


def move(here: Runtime) -> None:
    """Request 0 from engine 0 to engine 1, as if the core had said so; until its end is told."""
    controller = here.driver._controller
    command = Migrate(0, 0, 1)
    controller._moving[0] = command  # type: ignore[attr-defined]
    with here.driver.locked():
        here.driver._moves.start(command)
    eventually(lambda: not controller._moving)  # type: ignore[attr-defined]


def test_a_request_goes_on_where_its_kv_is_and_nothing_is_computed_again() -> None:
    with two_engines() as here:
        heard = decoding(here)
        move(here)
        source, destination = engine(here, 0), engine(here, 1)
        assert not source.has_work
        (moved,) = destination.submitted
        assert moved.prompt_token_ids == (*PROMPT, *continuation(PROMPT, 2))
        report = destination.step()
        assert report is not None and report.prefill_tokens == 1  # the token whose KV no engine has computed
        here.driver.stepped(1, report)
        here.run()
        assert heard.tokens_ == continuation(PROMPT, 12)
        assert heard.ends == 1
        ((_, facts),) = [incident for incident in here.incidents if incident[0] == "migrated"]
        assert facts["destination"] == 1


def test_without_room_a_request_stays_where_it_is() -> None:
    with two_engines(blocks=8) as here:
        heard = decoding(here)
        here.hosts[1].engines[0].submit(here.hosts[0].engines[0].submitted[0])
        here.hosts[1].engines[0].step()
        move(here)
        assert not engine(here, 1).carried
        here.run()
        assert heard.tokens_ == continuation(PROMPT, 12)


@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("copies", range(4))
def test_an_engine_that_dies_at_any_copy_loses_no_request(dies: int, copies: int) -> None:
    """The source is asked for three copies of this request, and the destination to keep as many."""
    with two_engines() as here:
        heard = decoding(here)
        engine(here, dies).calls_left = copies
        move(here)
        eventually(lambda: here.run() and heard.end is not None)
        assert heard.tokens_ == continuation(PROMPT, 12)
        assert heard.ends == 1
        assert not any(each.carried for host in here.hosts.values() for each in host.engines.values())


def test_a_request_that_ends_on_its_way_leaves_nothing_behind() -> None:
    with two_engines() as here:
        heard = decoding(here)
        source, destination = engine(here, 0), engine(here, 1)
        copy, stopped = source.copy_kv, []

        def and_abort(request_id: int, first_block: int, *, stop: bool = False) -> KvPart | None:
            part = copy(request_id, first_block, stop=stop)
            if stop:
                stopped.append(request_id)
                here.driver.abort(0)
            return part

        source.copy_kv = and_abort  # type: ignore[method-assign]
        move(here)
        assert stopped == [0]
        assert heard.end is not None and heard.end.kind == "aborted"
        assert not destination.submitted and not destination.carried
        assert not source.has_work


def test_requests_that_could_not_go_on_as_if_nothing_had_happened_do_not_move() -> None:
    """A seeded generator would start anew at the destination."""
    with two_engines() as here:
        seeded = decoding(here, sampling=Sampling(max_tokens=12, temperature=1.0, seed=4))
        with here.driver.locked():
            loads = here.driver._tick().loads
        assert [load.shortest for load in loads.values()] == [None, None]
        here.run()
        assert seeded.ends == 1


def test_the_core_moves_requests_from_the_full_to_the_free_and_its_log_replays() -> None:
    """Every look finds the instances out of balance, so that requests move all the time."""
    rng = random.Random(7)
    with two_engines(LlumnixMigrationSpec(out_blocks=8.0, in_blocks=8.0)) as here:
        asked = []
        for _ in range(40):
            prompt = tuple(rng.randrange(2, 200) for _ in range(rng.randrange(4, 200)))
            tokens = rng.randrange(10, 60)
            asked.append((prompt, tokens, here.ask("A", prompt, tokens=tokens)[1]))
            for host in (0, 0, 1):
                here.hosts[host].step_all()
            with here.driver.locked():
                here.driver.tell(here.driver._tick())
        eventually(lambda: here.run() and all(heard.end for *_, heard in asked))
        for prompt, tokens, heard in asked:
            assert heard.tokens_ == continuation(prompt, tokens)
            assert heard.ends == 1
        eventually(lambda: not here.driver._controller._moving)  # type: ignore[attr-defined]
        assert not any(each.carried for host in here.hosts.values() for each in host.engines.values())
    assert any(what == "migrated" for what, _ in here.incidents)
    result = replay([json.loads(json.dumps(entry)) for entry in here.log])
    assert result.difference is None
    assert result.commands["Migrate"] == result.events["MigrationEnded"] > 0
