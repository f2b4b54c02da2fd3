"""Least-squares fits of measured step times: a parameter comes with its interval, a fit with its errors or its refusal."""

from fineserve_calibrate.fit.chunk_cost import fit_chunk_cost, read_chunks, simulated_chunks
from fineserve_calibrate.fit.contention import ContentionFit, HalfShare, fit_contention, half_shares, with_references
from fineserve_calibrate.fit.host_overhead import fit_host_overhead
from fineserve_calibrate.fit.least_squares import Fit, Parameter, Residuals, Unknown, fit_curve
from fineserve_calibrate.fit.rows import RowError, read_authors, read_decodes

__all__ = [
    "ContentionFit",
    "Fit",
    "HalfShare",
    "Parameter",
    "Residuals",
    "RowError",
    "Unknown",
    "fit_chunk_cost",
    "fit_contention",
    "fit_curve",
    "fit_host_overhead",
    "half_shares",
    "read_authors",
    "read_chunks",
    "read_decodes",
    "simulated_chunks",
    "with_references",
]
