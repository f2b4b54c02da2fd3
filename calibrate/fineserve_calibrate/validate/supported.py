"""Whether the simulator can serve a setting at all; if not, why: the reason under which its rows are counted."""

from __future__ import annotations

from fineserve_calibrate.validate.cases import Serving
from fineserve_calibrate.validate.names import UnsupportedRow
from fineserve_calibrate.validate.predict import block_bytes, kv_bytes
from fineserve_sim.catalog import CatalogError, check_tp
from fineserve_sim.latency.rates import resolve


def supported(serving: Serving) -> Serving:
    """``serving`` itself. Raises UnsupportedRow when the model does not split over its TP degree, does not fit into the GPU's
    memory, or its precision, TP degree or deployment has no rates there."""
    try:
        check_tp(serving.model, serving.tp)
        resolve(serving.gpu, serving.precision, serving.tp)
        serving.deployment.floor(serving.precision.name)
    except (CatalogError, ValueError) as error:
        raise UnsupportedRow(str(error)) from None
    if kv_bytes(serving) < block_bytes(serving):
        raise UnsupportedRow(f"does not fit into the memory of {serving.gpu.name} at TP {serving.tp}")
    return serving
