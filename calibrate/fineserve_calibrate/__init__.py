"""Measured latency tables for the simulator, made from published tables or probes, and validated end to end."""
