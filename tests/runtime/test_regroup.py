"""KunServe on fake engines: two instances become a pipeline and two again, and no request is lost, whatever dies when."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fake_engines import FakeEngine, continuation
from fineserve_runtime.engines.api import KvPart
from fineserve_runtime.jobs import Handover
from fineserve_runtime.replay_log import replay
from fineserve_runtime.twin import Memory, _Tap
from runtimekit import BLOCK_TOKENS, Heard, Runtime, core_spec, eventually, runtime

from fineserve_sim.systems.spec import KunServeDropSpec, LeastLoadedDispatchSpec

HANDOVERS: tuple[Handover, ...] = ("exchange", "recompute")
WEIGHT_BYTES = 16 * 1024
INSTANCES, PIPELINE = (0, 1), 2
Asked = list[tuple[tuple[int, ...], int, Heard]]


@contextmanager
def pair(handover: Handover = "exchange") -> Iterator[Runtime]:
    """Two instances with 16 blocks each, beside as many of weights; a pipeline has 48."""
    spec = core_spec(
        ("A",),
        dispatch=LeastLoadedDispatchSpec(),
        drop=KunServeDropSpec(trigger=0.8),
        gpus=2,
        blocks=32,
        weight_bytes=WEIGHT_BYTES,
        max_tokens=12 * BLOCK_TOKENS,
    )
    with runtime(spec, handover=handover, max_sequences=16) as here:
        yield here
        look(here)
    log = [json.loads(json.dumps(entry)) for entry in here.log]
    assert replay(log).difference is None


def engine(here: Runtime, number: int) -> FakeEngine:
    return here.host.engines[number]


def look(here: Runtime) -> bool:
    """A look of the core at everything; True, for lambdas."""
    with here.driver.locked():
        here.driver.tell(here.driver._tick())
    return True


def burst(here: Runtime, seed: int = 1, count: int = 24) -> Asked:
    """More than both instances hold; they have begun with it."""
    rng = random.Random(seed)
    asked: Asked = []
    for _ in range(count):
        prompt = tuple(rng.randrange(2, 200) for _ in range(rng.randrange(20, 60)))
        tokens = rng.randrange(10, 40)
        asked.append((prompt, tokens, here.ask("A", prompt, tokens=tokens)[1]))
    for _ in range(rng.randrange(3, 9)):
        here.host.step_all()
    return asked


def until(here: Runtime, event: str, times: int = 1) -> None:
    def told() -> bool:
        look(here)
        return sum(entry.get("event") == event for entry in here.log) >= times

    eventually(told)


def finish(here: Runtime, asked: Asked) -> None:
    eventually(lambda: here.run() and all(heard.end for *_, heard in asked))
    for prompt, tokens, heard in asked:
        assert heard.tokens_ == continuation(prompt, tokens)
        assert heard.ends == 1


def rest(here: Runtime) -> None:
    """Both instances serve alone, and the pipeline sleeps."""

    def rests() -> bool:
        here.run()
        look(here)
        whole = all(engine(here, each).alive and not engine(here, each).asleep for each in INSTANCES)
        return whole and engine(here, PIPELINE).asleep and len(here.driver._places.engines()) == 2

    eventually(rests)
    assert here.host.weights_now() == 2 * WEIGHT_BYTES
    assert not any(each.carried for each in here.host.engines.values())


@pytest.mark.parametrize("handover", HANDOVERS)
def test_instances_drop_and_restore_over_and_over_and_every_text_is_right(handover: Handover) -> None:
    with pair(handover) as here:
        for round_ in range(5):
            asked = burst(here, round_)
            until(here, "LayersDropped", round_ + 1)
            assert not engine(here, PIPELINE).asleep
            assert here.host.weights_now() == WEIGHT_BYTES
            asked += burst(here, 100 + round_, 4)
            finish(here, asked)
            until(here, "LayersRestored", round_ + 1)
            rest(here)


def test_with_the_exchange_a_request_brings_the_kv_of_all_its_tokens_but_the_last() -> None:
    """No engine has computed the last one."""
    with pair() as here:
        hold, brought = engine(here, PIPELINE).hold_kv, dict[int, int]()

        def note(request_id: int, part: KvPart, *, last: bool = False) -> bool:
            brought[request_id] = part.tokens
            return hold(request_id, part, last=last)

        engine(here, PIPELINE).hold_kv = note  # type: ignore[method-assign]
        asked = burst(here)
        until(here, "LayersDropped")
        eventually(lambda: here.driver._tick().loads[2].stalled == 0)
        given = {each.request_id: len(each.prompt_token_ids) for each in engine(here, PIPELINE).submitted}
        assert brought and brought == {id: given[id] - 1 for id in brought}
        finish(here, asked)


def test_the_twin_remembers_steps_of_instances_and_of_the_pipeline() -> None:
    """Each with its stages."""
    memory = Memory({"A": 0})
    with pair() as here:
        here.host.listener = _Tap(here.host.listener, here.host, memory)
        asked = burst(here)
        until(here, "LayersDropped")
        assert 1 in _stages(memory)
        while 2 not in _stages(memory):
            here.host.step_all()
        whole = _stages(memory).count(1)
        here.host.step_all()
        assert _stages(memory).count(1) == whole and _stages(memory).count(2) > 1
        finish(here, asked)


def _stages(memory: Memory) -> list[int]:
    return memory.steps.copy()[:, -2].astype(int).tolist()


def test_the_capacity_of_the_pipeline_is_that_of_the_plan() -> None:
    with pair() as here:
        asked = burst(here)
        until(here, "LayersDropped")
        assert engine(here, PIPELINE).kv_capacity_tokens == 48 * BLOCK_TOKENS
        layers = here.driver._spec.layers
        assert layers is not None and layers.pair_tokens == 48 * BLOCK_TOKENS
        finish(here, asked)


@pytest.mark.parametrize("handover", HANDOVERS)
@pytest.mark.parametrize("dies", [*INSTANCES, PIPELINE])
@pytest.mark.parametrize("calls", range(6))
def test_an_engine_that_dies_at_any_step_of_a_change_loses_no_request(
    dies: int, calls: int, handover: Handover
) -> None:
    """Calls of an instance: it is emptied, and drops its layers. Those of the pipeline: it borrows, is told what memory it
    has, and gets requests with their KV."""
    with pair(handover) as here:
        engine(here, dies).calls_left = calls
        asked = burst(here)
        eventually(lambda: look(here) and bool(here.commands("DropLayers")))
        finish(here, asked)
        engine(here, dies).calls_left = None
        asked = burst(here, 2)
        finish(here, asked)
        rest(here)


@pytest.mark.parametrize("dies", [*INSTANCES, PIPELINE])
def test_an_engine_that_dies_while_the_pipeline_serves_loses_no_request(dies: int) -> None:
    with pair() as here:
        asked = burst(here)
        until(here, "LayersDropped")
        here.host.step_all()
        here.host.kill(dies)
        finish(here, asked)
        rest(here)
        again = burst(here, 2)
        until(here, "LayersDropped", 2)
        finish(here, again)
        rest(here)


def test_a_pipeline_that_dies_as_soon_as_it_is_awake_undoes_the_drop() -> None:
    """Its death is told before it is an engine of the core."""
    with pair() as here:
        pipeline = engine(here, PIPELINE)
        wake = pipeline.wake

        def and_die() -> float:
            seconds = wake()
            pipeline.wake = wake  # type: ignore[method-assign]
            here.host.kill(PIPELINE)
            return seconds

        pipeline.wake = and_die  # type: ignore[method-assign]
        asked = burst(here)
        until(here, "LayersKept")
        finish(here, asked)
        rest(here)


def test_a_restore_waits_until_its_memory_is_free() -> None:
    with pair() as here:
        engine(here, 1).fails_to_wake = 2
        asked = burst(here)
        until(here, "LayersDropped")
        finish(here, asked)
        until(here, "LayersRestored")
        assert any(what == "layers not restored" for what, _ in here.incidents)
        rest(here)


def test_a_request_that_ends_during_a_drop_is_not_given_to_the_pipeline() -> None:
    with pair() as here:
        hold, gone = engine(here, PIPELINE).hold_kv, list[int]()

        def and_abort(request_id: int, part: object, *, last: bool = False) -> bool:
            held = hold(request_id, part, last=last)  # type: ignore[arg-type]
            if not gone:
                gone.append(request_id)
                here.driver.abort(request_id)
            return held

        engine(here, PIPELINE).hold_kv = and_abort  # type: ignore[method-assign]
        asked = burst(here)
        until(here, "LayersDropped")
        eventually(lambda: bool(gone) and here.driver._tick().loads[2].stalled == 0)
        assert all(submitted.request_id not in gone for submitted in engine(here, PIPELINE).submitted)
        finish(here, [each for number, each in enumerate(asked) if number not in gone])
        assert asked[gone[0]][2].end is not None
        rest(here)
