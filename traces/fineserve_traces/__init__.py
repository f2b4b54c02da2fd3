"""Request traces: one columnar schema, readers, generators, statistics."""

from fineserve_traces.schema import Trace, TraceError

__all__ = ["Trace", "TraceError"]
