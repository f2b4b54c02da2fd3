"""An engine that embeds, over leased slabs beside one that generates: stock vLLM's vectors, in poisoned memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fineserve_runtime.engines.api import Sampling
from fineserve_runtime.warmup import Relay, measure_engine

from .conftest import BF16, draw_requests, stock_outputs

pytestmark = pytest.mark.filterwarnings("ignore")
EMBEDS = replace(BF16, name="embeds", embeds=True)


def test_vectors_are_stock_vllms_and_all_memory_comes_back(
    start: Callable[..., tuple[Any, Any]], same_tokens: Callable[..., None], cache_dir: Path
) -> None:
    texts = [replace(request, sampling=Sampling(max_tokens=1)) for request in draw_requests(5, 24)]
    expected = {int(out.request_id): out.pooling_output for out in stock_outputs(EMBEDS, texts, cache_dir)}
    host, heard = start(EMBEDS, BF16, slabs=24)
    requests = draw_requests(6, 12)
    for engine, submissions in ((0, texts), (1, requests)):
        for each in submissions:
            host.engines[engine].submit(each)
    assert host.engines[0].drain(120) and host.engines[1].drain(120)
    vectors = {
        chunk.request_id: chunk.vector for report in heard.reports if report.engine == 0 for chunk in report.chunks
    }
    assert vectors.keys() == expected.keys()
    for number, vector in vectors.items():
        assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-3)
        assert vector == pytest.approx(expected[number].float().tolist(), abs=0.02), "a chunk rounds otherwise"
    same_tokens(BF16, requests, heard.of(1))
    assert host.ledger().used_bytes == 0


def test_it_is_warmed_up_as_others_are(start: Callable[..., tuple[Any, Any]]) -> None:
    host, _ = start(EMBEDS)
    relay = Relay()
    host._listener = relay
    rows = measure_engine(host.engines[0], relay)
    assert rows and all(row.prefill_tokens and not row.decodes for row in rows)
