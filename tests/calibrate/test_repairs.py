"""Repairs of published tables: rows that an L2 cache served, products under unsteady clocks; sound tables stay as they are."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("fineserve_calibrate", reason="calibrate/ is not on the import path")

from fineserve_calibrate.repairs import repaired
from fineserve_calibrate.tables import Fingerprint, Table

from fineserve_sim.catalog import gpu
from fineserve_sim.latency.tables import gemm_roofline_s

L40S = gpu("l40s")
SIZES = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256]
LAUNCH_S = 3e-6


def products() -> Table:
    """A machine at 80 % of the data sheet; the last width, 537 MB in 16 bits, is far beyond any cache."""
    m, n = (axis.ravel() for axis in np.meshgrid(SIZES, [1024, 4096, 16384], indexing="ij"))
    latency_s = LAUNCH_S + gemm_roofline_s(L40S, "bfloat16", m.astype(float), n.astype(float), 16384.0) / 0.8
    columns = {
        "dtype": np.full(len(m), "bfloat16"),
        "m": m,
        "n": n,
        "k": np.full(len(m), 16384),
        "latency_s": latency_s,
    }
    return Table("gemm", columns, Fingerprint("NVIDIA L40S", "vllm 0", "made up", "none"))


def changed(table: Table, latency_s: np.ndarray) -> Table:
    return Table(table.operator, {**table.columns, "latency_s": latency_s}, table.fingerprint)


def test_a_sound_table_stays_as_it_is() -> None:
    table = products()
    found = repaired(table, L40S)
    assert found.columns["latency_s"].tolist() == table.columns["latency_s"].tolist()
    assert found.fingerprint == table.fingerprint


def test_rows_that_the_cache_served_take_what_memory_needs() -> None:
    table = products()
    latency_s = table.columns["latency_s"]
    served = (table.columns["n"] == 1024) & (table.columns["m"] <= 64)  # 34 MB of weights
    found = repaired(changed(table, np.where(served, latency_s / 4, latency_s)), L40S)
    weights_s = 2 * 1024 * 16384 / (0.8 * L40S.memory_bytes_per_s)
    assert found.columns["latency_s"][served].min() >= weights_s
    assert found.columns["latency_s"][served] == pytest.approx(latency_s[served], rel=0.2)
    assert found.columns["latency_s"][~served] == pytest.approx(latency_s[~served], rel=0.1)
    assert "of 36 rows were in the L2 cache and take what memory needs" in found.fingerprint.source


def test_rows_far_from_their_neighbours_take_the_median() -> None:
    table = products()
    latency_s = table.columns["latency_s"]
    spikes = (table.columns["m"] == 32) & (table.columns["n"] >= 4096)
    found = repaired(changed(table, np.where(spikes, 5 * latency_s, latency_s)), L40S)
    assert found.columns["latency_s"] == pytest.approx(latency_s, rel=0.1)
    assert "2 of 36 rows were far from the median of their neighbours" in found.fingerprint.source
