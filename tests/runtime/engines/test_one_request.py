"""Real engines: what one request brings along harms no other, and an engine that crashed all the same comes back."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

import pytest
from fineserve_runtime.engines.api import Sampling, Submission

from .conftest import BF16, draw_requests

pytestmark = pytest.mark.filterwarnings("ignore")


def test_stop_ids_beyond_the_vocabulary_end_that_request_alone(
    start: Callable[..., tuple[Any, Any]], same_tokens: Callable[..., None]
) -> None:
    """vLLM's minimum-tokens processor writes to these columns of the logits."""
    host, heard = start(BF16)
    requests = draw_requests(3, 8)
    for request in requests:
        host.engines[0].submit(request)
    bad = Sampling(max_tokens=6, min_tokens=4, stop_token_ids=(99999,))
    host.engines[0].submit(Submission(1000, (5, 6), bad))
    assert host.engines[0].drain(60)
    assert heard.reasons[0, 1000] == "error" and heard.tokens.pop((0, 1000)) == []
    same_tokens(BF16, requests, heard.of(0))
    assert not heard.deaths


def test_an_in_process_engine_that_crashed_is_built_again_beside_one_that_goes_on(
    start: Callable[..., tuple[Any, Any]], same_tokens: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from fineserve_runtime.engines.vllm_engine import SteppedCore

    other = replace(BF16, name="other")
    host, heard = start(BF16, other)
    step, all_there = SteppedCore.step, Event()

    def crash(core: Any) -> Any:
        if core.engine == 0:
            assert all_there.wait(60)
            raise IndexError("index 99999 is out of bounds")
        return step(core)

    requests = draw_requests(4, 8)
    monkeypatch.setattr(SteppedCore, "step", crash)
    for engine in (0, 1):
        for request in requests:
            host.engines[engine].submit(request)
    all_there.set()
    assert heard.died.wait(60)
    monkeypatch.undo()
    assert heard.deaths[0][0] == 0 and set(heard.deaths[0][2]) == {request.request_id for request in requests}
    host.restart(0)
    for request in requests:
        host.engines[0].submit(request)
    assert host.engines[0].drain(120) and host.engines[1].drain(120)
    same_tokens(BF16, requests, heard.of(0))
    same_tokens(other, requests, heard.of(1))
    free_slabs = 256 - 1
    assert host.ledger().free_bytes == free_slabs * 65536


def test_a_thread_that_hangs_is_dead_and_the_process_says_so(
    start: Callable[..., tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fineserve_runtime.engines.vllm_engine import SteppedCore

    host, heard = start(BF16)
    released = Event()
    monkeypatch.setattr(SteppedCore, "step", lambda core: released.wait(60) and None)
    host.engines[0].submit(draw_requests(5, 1)[0])
    assert host.sound and host.engines[0].silent_s < 60
    host.end_hung([0], "no sign of life")
    assert heard.deaths == [(0, "no sign of life", (0,))] and not host.sound
    with pytest.raises(RuntimeError, match="restart the server"):
        host.restart(0)
    released.set()
