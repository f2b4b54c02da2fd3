"""Two shapes over one set of weights in torch on the CPU, groups by gloo, and how graphs are captured, on a fake of CUDA's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from fineserve_calibrate.probes.engines import TINY

torch = pytest.importorskip("torch", reason="torch is not installed")

from fineserve_evidence.campaign.shapes import graphs, groups  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # torch warns of itself


def test_each_shape_computes_the_same_after_the_other_beside_poison_and_after_a_restore() -> None:
    found = graphs.both_shapes(TINY, "cpu")
    assert found.pop("graphs_error") == 0.0
    assert found == dict.fromkeys(
        (
            *("half_again", "whole_after_half", "whole_again", "half_after_whole", "half_beside_poison"),
            *("whole_sees_poison", "whole_restored", "half_after_restore"),
        ),
        1.0,
    )


def test_layers_are_views_of_the_run_and_fill_it() -> None:
    run, layers = graphs.weights(TINY.config, "cpu")
    assert len(layers) == TINY.config["num_hidden_layers"]
    parts = [tensor for layer in layers for tensor in layer.values()]
    assert all(part.untyped_storage().data_ptr() == run.untyped_storage().data_ptr() for part in parts)
    assert sum(part.numel() for part in parts) == run.numel()
    assert parts[0].data_ptr() == run.data_ptr()


def test_a_prompt_is_computed_causally_through_every_layer() -> None:
    _, layers = graphs.weights(TINY.config, "cpu")
    prompt = torch.randn(8, TINY.config["hidden_size"]).bfloat16()
    whole, half = (graphs.compute(part, prompt, TINY.config) for part in (layers, layers[:2]))
    assert whole.shape == prompt.shape and not torch.equal(whole, half)
    first = graphs.compute(layers, prompt[:4], TINY.config)
    assert torch.allclose(first.float(), whole[:4].float(), rtol=0.05, atol=0.05)


def test_shapes_that_disturb_each_other_are_noticed() -> None:
    state = torch.ones(4)

    def half() -> Any:
        state[0] = 2.0  # what the whole shape reads
        return state[1:2]

    dropped = state[3:]
    found = graphs.checks([lambda: state], [half], dropped)
    assert found["whole_after_half"] == found["whole_restored"] == 0.0
    assert found["half_after_whole"] == found["half_beside_poison"] == 1.0
    assert found["whole_sees_poison"] == 0.0  # not everywhere
    leaking = graphs.checks([dropped.clone], [dropped.clone], dropped)
    assert leaking["half_beside_poison"] == 0.0 and leaking["whole_sees_poison"] == 1.0


def test_a_graph_is_captured_once_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.cuda's: capturing runs the call once, and a replay runs it again into the same tensor."""
    calls: list[str] = []
    result = torch.zeros(1)

    def call() -> Any:
        calls.append("call")
        return result

    @contextmanager
    def capture(graph: Any) -> Iterator[None]:
        calls.append("begin")
        yield
        calls.append("end")

    def replay() -> None:
        calls.append("replay")
        result.add_(1)

    used = iter((100, 164))
    monkeypatch.setattr(graphs, "used_bytes", lambda: next(used))
    for name, fake in {
        "CUDAGraph": lambda: SimpleNamespace(replay=replay),
        "graph": capture,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    (replayed,), cost = graphs.captured([call], "cuda")
    assert calls == ["call"] * graphs.WARM_UP + ["begin", "call", "end", "replay"]
    assert cost["bytes"] == 64.0 and cost["capture_s"] >= 0
    assert float(replayed()) == 2.0 and calls[-1] == "replay"


def test_groups_by_gloo() -> None:
    found = groups.made("gloo", 2)
    assert set(found) == {"2_ranks_first_s", "2_ranks_next_s"}
    assert all(0 < seconds < 60 for seconds in found.values())
